"""`rollplane serve`: a frontend and its workers as child processes, kept running until told to stop.

Each child has a process group of its own, so that what it started goes with it, and reads its standard input, which is a
pipe of ours: when this process ends, by whatever way, the pipe does too and the child stops. Children get their settings as
a private file and nothing by environment; the workers' admin key is made for this run and is in a private file too.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog

from rollplane.cli.private_directory import private_directory
from rollplane.config import (
    ENV_PREFIX,
    CrewSettings,
    FrontendSettings,
    ServerSettings,
    ServeSettings,
    Settings,
    WorkerSettings,
)
from rollplane.errors import InvalidRequest, Unavailable
from rollplane.server.auth import KeyRing, check_binding
from rollplane.server.ops import bind, check_ready_file, say_ready, stop_on_end_of_stdin

STEADY_S: Final = 60.0
"""A child that lived this long starts again without a pause."""
KILL_AFTER_S: Final = 10.0
CRASHES_AT_START: Final = 3
"""So many ends before it was ever ready, and a child is given up."""

REFUSED: Final = 2
"""The exit code of a process that cannot run with its settings: starting it again would not help."""

FRONTEND: Final = "frontend"
"""The first process of the frontend; further ones have its name and their number."""

ChildState = Literal["starting", "ready", "waiting", "stopped"]
log = structlog.get_logger("rollplane.serve")


class Child:
    """One child process, started again with a growing pause when it ends by itself."""

    def __init__(self, name: str, arguments: list[str], *, settings: ServeSettings, inherits: int) -> None:
        self.name = name
        self.state: ChildState = "starting"
        self.restarts = 0
        self.url: str | None = None
        self.failure: str | None = None
        self.ready = asyncio.Event()
        self._arguments = arguments
        self._settings = settings
        self._inherits = inherits  # a descriptor: the lock of the directory that it reads from
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        pid = self._process.pid if self._process is not None else "-"
        return f"<Child {self.name} {self.state} pid={pid} restarts={self.restarts}>"

    async def run(self) -> None:
        """Keep the process running until `stop`.

        Raises:
            InvalidRequest: it refused its settings.
            Unavailable: it ended `CRASHES_AT_START` times before it was ever ready, or restarts are off.
        """
        pause_s = self._settings.backoff_s
        early = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            self.state = "starting"
            code = await self._once()
            self.ready.clear()
            if self._stopping.is_set():
                break
            early = early + 1 if self.url is None else 0
            log.warning("child_ended", child=self.name, code=code, lived_s=round(time.monotonic() - began, 1))
            if not self._settings.restart or code == REFUSED or early >= CRASHES_AT_START:
                self.failure = f"{self.name} ended with code {code}"
                kind = InvalidRequest if code == REFUSED else Unavailable
                raise kind(f"{self.failure}; its log lines above have the reason")
            pause_s = self._settings.backoff_s if time.monotonic() - began > STEADY_S else pause_s
            self.state = "waiting"
            log.info("child_restart", child=self.name, in_s=pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            pause_s = min(pause_s * 2, self._settings.max_backoff_s)
            self.restarts += 1
        self.state = "stopped"

    def stop(self) -> None:
        """Ask the process to drain and end; it is not started again."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process and all that it started, now."""
        self._signal(signal.SIGKILL)

    async def _once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollplane.cli.main",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_child_environment(),
            process_group=0,
            pass_fds=(self._inherits,),
        )
        self._process = process
        log.info("child_started", child=self.name, pid=process.pid)
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)  # asked to stop while it was being started
        reader = asyncio.create_task(self._read_output(process))
        try:
            return await process.wait()
        finally:
            self.kill()  # what it started and left behind
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if process.stdin is not None:
                process.stdin.close()

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        """Hear the ready line; pass everything else on."""
        rest = b""
        while process.stdout is not None and (data := await process.stdout.read(1 << 16)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._hear(line)
            rest = rest[-(1 << 20) :]

    def _hear(self, line: bytes) -> None:
        try:
            said = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            sys.stderr.write(f"[{self.name}] {line.decode('utf-8', 'replace')}\n")
            return
        if said.get("event") == "ready":
            self.url = str(said.get("url"))
            self.state = "ready"
            self.ready.set()
            log.info("child_ready", child=self.name, url=self.url)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


async def run_serve(settings: Settings) -> None:
    """Start the workers, then the frontend; keep them until told to stop.

    Raises:
        InvalidRequest: settings that nothing can be served with.
        Unavailable: a child did not become ready, or was given up.
    """
    await _run(settings, workers=settings.table(ServeSettings).workers, role="serve")


async def run_processes(settings: Settings) -> None:
    """Start the processes of a frontend whose workers are elsewhere; keep them until told to stop.

    Raises:
        InvalidRequest: settings that nothing can be served with.
        Unavailable: a process did not become ready, or was given up.
    """
    await _run(settings, workers=0, role="frontend")


async def _run(settings: Settings, *, workers: int, role: str) -> None:
    server, serve = settings.table(ServerSettings), settings.table(ServeSettings)
    keys = KeyRing(server.data_key_file, server.admin_key_file)
    check_binding(server.host, keys)
    check_ready_file(server.ready_file)
    _check_port(server)
    with private_directory() as (private, lock), contextlib.ExitStack() as held:
        plan = _Plan(settings, directory=private, open_to_all=keys.open, own_workers=role == "serve", held=held)
        children = [Child(f"worker-{i}", plan.worker(i), settings=serve, inherits=lock) for i in range(workers)]
        await _supervise(children, plan.frontends(lock), server=server, serve=serve, role=role)


async def _supervise(
    workers: list[Child], frontends: list[Child], *, server: ServerSettings, serve: ServeSettings, role: str
) -> None:
    stop = asyncio.Event()
    children = list(workers)
    tasks = {asyncio.create_task(child.run(), name=child.name): child for child in workers}
    with _stop_when_told(stop, children, with_stdin=server.stop_with_stdin):
        try:
            await _all_ready(workers, tasks, stop, limit_s=serve.start_timeout_s)
            if not stop.is_set():
                children += frontends
                tasks |= {asyncio.create_task(child.run(), name=child.name): child for child in frontends}
                await _all_ready(frontends, tasks, stop, limit_s=serve.start_timeout_s)
            if not stop.is_set():
                urls = [child.url for child in workers]
                url = frontends[0].url or ""
                log.info("ready", url=url, workers=urls, processes=len(frontends))
                say_ready(server, url=url, role=role, workers=urls)
                await _until_stop(tasks, stop)
        finally:
            await _stop_all(children, tasks, drain_s=server.drain_s)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


async def _all_ready(
    children: list[Child], tasks: dict[asyncio.Task[None], Child], stop: asyncio.Event, *, limit_s: float
) -> None:
    waits = [asyncio.create_task(child.ready.wait()) for child in children]
    stopping = asyncio.create_task(stop.wait())
    everything = asyncio.gather(*waits)
    try:
        watched: set[asyncio.Future[Any]] = {everything, stopping, *tasks}
        done, _ = await asyncio.wait(watched, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            late = ", ".join(child.name for child in children if not child.ready.is_set())
            raise Unavailable(f"not ready within {limit_s:g} s: {late}")
        for task in done & set(tasks):
            task.result()  # raises what ended it
    finally:
        everything.cancel()
        stopping.cancel()
        await asyncio.gather(everything, stopping, return_exceptions=True)


async def _until_stop(tasks: dict[asyncio.Task[None], Child], stop: asyncio.Event) -> None:
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


async def _stop_all(children: list[Child], tasks: dict[asyncio.Task[None], Child], *, drain_s: float) -> None:
    """The frontend first: it drains while the workers still serve what it has in flight. Of several processes of it the
    first one last: it is the control owner.
    """
    limit_s = drain_s + KILL_AFTER_S
    frontends = [child for child in children if child.name.startswith(FRONTEND)]
    rest = [child for child in children if child not in frontends]
    for group in (frontends[1:], frontends[:1], rest):
        pending = {task for task, child in tasks.items() if child in group and not task.done()}
        for child in group:
            child.stop()
        if pending:
            _, late = await asyncio.wait(pending, timeout=limit_s)
            for task in late:
                log.error("child_killed", child=tasks[task].name, after_s=limit_s)
                tasks[task].kill()
            if late:
                await asyncio.wait(late, timeout=KILL_AFTER_S)
    log.info("stopped", children=len(children))


class _Plan:
    """The command lines of the children, their settings in private files. `held`: what is theirs while it is open."""

    def __init__(
        self, settings: Settings, *, directory: Path, open_to_all: bool, own_workers: bool, held: contextlib.ExitStack
    ) -> None:
        self._own_workers = own_workers
        self._server = settings.table(ServerSettings)
        self._worker = settings.table(WorkerSettings)
        self._frontend = settings.table(FrontendSettings)
        self._serve = settings.table(ServeSettings)
        self._directory = directory
        self._ports = [held_port("127.0.0.1", held) for _ in range(self._serve.workers if own_workers else 0)]
        # A port of our choosing, also where any will do: a restarted frontend has the address of the one before.
        self._port = self._server.port or held_port(self._server.host, held)
        self._admin_port = self._server.admin_port
        if self._admin_port == 0:
            self._admin_port = held_port(self._server.admin_host or self._server.host, held)
        self._key_file = directory / "worker-admin-key"
        _write_private(self._key_file, secrets.token_urlsafe(32) + "\n")
        # Workers have a key, so they need roots; where the frontend is open, every path is allowed as it would be there.
        self._roots = ["/"] if open_to_all and not self._server.root else list(self._server.root)

    def worker(self, index: int) -> list[str]:
        """The arguments of one worker."""
        server = {
            "host": "127.0.0.1",
            "port": self._ports[index],
            "admin_port": None,  # workers listen on loopback for the frontend alone
            "tls_cert_file": None,
            "tls_key_file": None,
            "data_key_file": [],
            "admin_key_file": [str(self._key_file)],
            "root": self._roots,
        }
        worker: dict[str, Any] = {"name": f"worker-{index}", "public_url": None}
        threads = torch_threads(self._worker, workers=self._serve.workers, cores=len(os.sched_getaffinity(0)))
        if threads is not None:
            worker["engine_option"] = self._worker.engine_option | {"threads": str(threads)}
        return self._command("worker", f"worker-{index}", server=server, worker=worker)

    def frontends(self, lock: int) -> list[Child]:
        """The processes of the frontend; the first is the control owner."""
        count = self._frontend.processes
        names = [FRONTEND, *(f"{FRONTEND}-{i}" for i in range(1, count))]
        return [Child(name, self.frontend(i), settings=self._serve, inherits=lock) for i, name in enumerate(names)]

    def frontend(self, index: int = 0) -> list[str]:
        """The arguments of one process of the frontend."""
        frontend: dict[str, Any] = {}
        if self._own_workers:
            urls = [f"http://127.0.0.1:{port}" for port in self._ports]
            frontend = {"workers": urls, "workers_file": None, "worker_key_file": str(self._key_file)}
        if self._frontend.control_record is None:  # a restarted frontend knows what the one before did
            frontend["control_record"] = str(self._directory / "control.json")
        model = self._worker.model
        own_model = self._own_workers and model is not None and Path(model).is_dir()
        if self._frontend.initial_checkpoint is None and own_model:
            frontend["initial_checkpoint"] = str(Path(model or "").resolve())
            frontend["initial_version"] = self._worker.policy_version
        server = {"port": self._port, "admin_port": self._admin_port}
        crew: dict[str, Any] = {}
        if self._frontend.processes > 1:
            crew = {"directory": str(self._directory), "index": index, "count": self._frontend.processes}
        name = FRONTEND if index == 0 else f"{FRONTEND}-{index}"
        return self._command("frontend", name, server=server, frontend=frontend, crew=crew)

    def _command(self, command: str, name: str, *, server: dict[str, Any], **tables: dict[str, Any]) -> list[str]:
        own = {"ready_file": None, "stop_with_stdin": True}
        tree = {"server": msgspec.to_builtins(self._server) | server | own}
        base: dict[str, Any] = {"worker": self._worker, "frontend": self._frontend, "crew": CrewSettings()}
        for table, values in tables.items():
            tree[table] = msgspec.to_builtins(base[table]) | values
        file = self._directory / f"{name}.json"
        _write_private(file, msgspec.json.encode(tree).decode())
        return [command, "--config", str(file)]


def torch_threads(worker: WorkerSettings, *, workers: int, cores: int) -> int | None:
    """A worker's share of this machine's cores; None where something else says how many threads it has.

    Left alone, torch takes every core in every worker. Its threads wait for each other by spinning: with more of them
    than cores a step takes a hundred times as long.
    """
    if worker.engine != "embedded" or "threads" in worker.engine_option or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, cores // workers)


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _child_environment() -> dict[str, str]:
    """Ours without settings: they are merged already, and a variable would win over the child's file."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def held_port(host: str, held: contextlib.ExitStack) -> int:
    """A port that stays a child's while `held` is open, through its restarts and however long it takes to start.

    Bound, and not listened on: Linux gives it to nobody who takes any port, and lets the child listen on it.
    """
    sock = held.enter_context(bind(ServerSettings(host=host, port=0)))
    return int(sock.getsockname()[1])


def _check_port(server: ServerSettings) -> None:
    """Say at once that a port is taken, not after the workers have loaded.

    Raises:
        InvalidRequest: it is.
    """
    if server.port:
        bind(server).close()


@contextlib.contextmanager
def _stop_when_told(stop: asyncio.Event, children: list[Child], *, with_stdin: bool) -> Generator[None, None, None]:
    """Set `stop` on SIGTERM, SIGINT or (where wanted) the end of standard input; the second time, kill the children."""
    loop = asyncio.get_running_loop()

    def told(name: str) -> None:
        if stop.is_set():
            log.warning("stop_now", reason=name)
            for child in children:
                child.kill()
            return
        log.info("stop", reason=name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number.name)
    try:
        with stop_on_end_of_stdin(told, wanted=with_stdin):
            yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def main(settings: Settings) -> None:
    """Start a frontend and its workers on this machine, and keep them running."""
    from rollplane.cli.logs import configure_logs

    configure_logs(settings.table(ServerSettings))
    asyncio.run(run_serve(settings))  # not uvloop: it cannot give a child its own process group


def serve_processes(settings: Settings) -> None:
    """Start several processes of a frontend, and keep them running."""
    from rollplane.cli.logs import configure_logs

    configure_logs(settings.table(ServerSettings))
    asyncio.run(run_processes(settings))
