"""A worker or a frontend in a process of its own that tells what it holds: memory, tasks, threads, open files."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

from rollplane.config import ServerSettings
from rollplane.discovery.static import StaticDiscovery
from rollplane.engines.base import Engine
from rollplane.engines.wrappers.live import KeepLimits
from rollplane.rl.fleet import Fleet
from rollplane.router.router import Router
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.ops import bind, make_server, url_of
from rollplane.server.service import Service
from rollplane.worker import Worker, WorkerSettings

START_S = 180.0
KEEP = KeepLimits(max_bytes=8 * 2**20, max_age_s=60.0)
"""Of answers to idempotency keys. The defaults (256 MiB, 600 s) fill up for ten minutes, and look like a leak as long."""


@dataclass(frozen=True)
class Holding:
    """What a process holds now. `tasks`: name of the coroutine -> how many; `memory_bytes`: resident, children included."""

    memory_bytes: int
    tasks: dict[str, int]
    threads: int
    files: int


class SoakServer:
    """One server process. Not a daemon: an engine has children of its own."""

    def __init__(self, name: str, make: Callable[[], Engine] | None, *, workers: list[str], root: Path) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(make, name, workers, str(root), theirs))
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_S):
            self.stop()
            raise TimeoutError(f"{name} was not ready within {START_S:g} s")
        self.url: str = self._pipe.recv()

    def holds(self) -> Holding:
        """Asks the process; its garbage is collected first."""
        self._pipe.send("read")
        if not self._pipe.poll(60.0):
            raise TimeoutError(f"{self.name} does not answer: its event loop hangs")
        holding: Holding = self._pipe.recv()
        return holding

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send("stop")
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)


@contextlib.contextmanager
def serving(make: list[Callable[[], Engine]], *, root: Path) -> Iterator[list[SoakServer]]:
    """Workers, and a frontend over them as the last."""
    running: list[SoakServer] = []
    try:
        for i, one in enumerate(make):
            running.append(SoakServer(f"worker-{i}", one, workers=[], root=root))
        running.append(SoakServer("frontend", None, workers=[each.url for each in running], root=root))
        yield running
    finally:
        for each in reversed(running):
            each.stop()


def _run(make: Any, name: str, workers: list[str], root: str, pipe: Connection) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    asyncio.run(_serve(make, name, workers, root, pipe))


async def _serve(make: Any, name: str, workers: list[str], root: str, pipe: Connection) -> None:
    settings = ServerSettings(port=0, root=[root])
    fleet = None
    if make is not None:
        own = Worker(make(), settings=WorkerSettings(name=name, keep=KEEP))
        engine, admin = own, own
    else:
        own, fleet = None, Fleet()
        engine, admin = Router(fleet, discovery=StaticDiscovery(workers)), fleet
    await engine.start()
    service = Service(
        role="worker" if make is not None else "frontend",
        engine=engine,
        admin=admin,
        worker=own,
        settings=settings,
        keys=KeyRing(),
        metrics=Metrics(),
    )
    sock = bind(settings)
    server = make_server(create_app(service), settings)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started or (fleet is not None and not all(m.routable for m in fleet.members)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    pipe.send(url_of(sock))
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, pipe.recv) == "read":
        pipe.send(_holding())
    service.lifecycle.stopping.set()
    server.should_exit = True
    await running
    await engine.close()


def _holding() -> Holding:
    gc.collect()
    names = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    pids = [os.getpid(), *_children(os.getpid())]
    return Holding(
        memory_bytes=sum(map(_resident_bytes, pids)),
        tasks=dict(names),
        threads=len(list(Path("/proc/self/task").iterdir())),
        files=len(list(Path("/proc/self/fd").iterdir())),
    )


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_children(child)]
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
