"""A worker and, if wanted, a frontend before it, each in a process of its own that meters itself.

A meter counts the process's CPU seconds and the longest time its event loop could not run, so that what an answer costs
is told per hop, and apart from the client that asks.
"""

import asyncio
import contextlib
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from rollplane.config import ServerSettings
from rollplane.discovery.static import StaticDiscovery
from rollplane.engines.base import Engine
from rollplane.rl.fleet import Fleet
from rollplane.router.router import Router
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.ops import bind, make_server, prepare_process, url_of
from rollplane.server.service import Service
from rollplane.worker import Worker, WorkerSettings

TICK_S = 0.001


@dataclass(frozen=True)
class Reading:
    """Since the last reading: CPU seconds of the process, and the longest stall of its event loop in seconds."""

    cpu_s: float
    stall_s: float


class Hop:
    """One server process."""

    def __init__(self, name: str, make: Callable[[], Engine] | None, workers: list[str]) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(make, workers, theirs), daemon=True)
        self._process.start()
        self.url: str = self._pipe.recv()

    def read(self) -> Reading:
        self._pipe.send("read")
        reading: Reading = self._pipe.recv()
        return reading

    def stop(self) -> None:
        self._pipe.send("stop")
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


@contextlib.contextmanager
def hops(make: Callable[[], Engine], *, frontend: bool) -> Iterator[list[Hop]]:
    """The processes, from the engine outwards; the last one is what a client asks. `make` is a module's function."""
    running = [Hop("worker", make, [])]
    try:
        if frontend:
            running.append(Hop("frontend", None, [running[0].url]))
        yield running
    finally:
        for hop in reversed(running):
            hop.stop()


def _run(make: Callable[[], Engine] | None, workers: list[str], pipe: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop of the commands
        runner.run(_serve(make, workers, pipe))


async def _serve(make: Callable[[], Engine] | None, workers: list[str], pipe: Connection) -> None:
    settings = ServerSettings(port=0)
    if make is not None:
        worker = Worker(make(), settings=WorkerSettings(name="worker-0"))
        engine, admin, own = worker, worker, worker
    else:
        fleet = Fleet()
        engine, admin, own = Router(fleet, discovery=StaticDiscovery(workers)), fleet, None  # type: ignore[assignment]
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
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started or (make is None and not all(m.routable for m in fleet.members)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    prepare_process()
    pipe.send(url_of(sock))
    loop, stall_s = asyncio.get_running_loop(), [0.0]

    async def tick() -> None:
        while True:
            before = loop.time()
            await asyncio.sleep(TICK_S)
            stall_s[0] = max(stall_s[0], loop.time() - before - TICK_S)

    ticker = asyncio.create_task(tick())
    cpu_s = _cpu_s()
    while await loop.run_in_executor(None, pipe.recv) == "read":
        now = _cpu_s()
        pipe.send(Reading(cpu_s=now - cpu_s, stall_s=stall_s[0]))
        cpu_s, stall_s[0] = _cpu_s(), 0.0
    ticker.cancel()
    service.lifecycle.stopping.set()
    server.should_exit = True
    await serving
    await engine.close()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
