"""The life of a server process: bind, start, say ready, serve, drain, stop. Every step is bounded and logged.

The first SIGTERM or SIGINT (or the end of standard input, with `server.stop_with_stdin`) stops listening and gives running requests
`server.drain_s` to finish; what is left then ends with an error of ours, not with a dropped connection. The second one stops at once.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import uvicorn
from starlette.types import ASGIApp

from rollplane.config import ServerSettings
from rollplane.errors import EngineDied, InvalidRequest
from rollplane.server.connections import Connection
from rollplane.server.service import Service

KEEP_ALIVE_S: Final = 75
"""Longer than the 60 s for which our own clients keep idle connections, so that the server is never the first to close."""
LAST_ANSWERS_S: Final = 5.0
HARD_STOP_S: Final = 15.0
WATCH_S: Final = 1.0
YOUNG_OBJECTS: Final = 10_000
"""Containers made between two looks at the youngest; a request makes some hundreds."""
SWITCH_S: Final = 0.0001
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""glibc's `mallopt`, as malloc.h numbers them."""
KEPT_BYTES: Final = 64 << 20
KEPT_BLOCK_BYTES: Final = 16 << 20
"""A larger block has memory of its own, given back when it is freed."""

log = structlog.get_logger("rollplane.ops")


def bind(settings: ServerSettings, *, shared: bool = False) -> socket.socket:
    """A listening socket; `shared`: other processes of ours listen on the same port, and the system spreads connections.

    Raises:
        InvalidRequest: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((settings.host, settings.port))
    except OSError as error:
        sock.close()
        raise InvalidRequest(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}", param="server.port"
        ) from None
    sock.setblocking(False)
    return sock


def bind_admin(settings: ServerSettings) -> socket.socket | None:
    """The listening socket of administration alone, None where it shares the first one.

    Raises:
        InvalidRequest: the address cannot be listened on.
    """
    if settings.admin_port is None:
        return None
    if settings.admin_port == settings.port != 0:
        raise InvalidRequest(
            f"server.admin_port is server.port, {settings.port}: choose another", param="server.admin_port"
        )
    host = settings.admin_host or settings.host
    return bind(msgspec.structs.replace(settings, host=host, port=settings.admin_port))


def port_of(sock: socket.socket | None) -> int | None:
    """The port that a socket listens on, None without one."""
    return None if sock is None else int(sock.getsockname()[1])


def check_tls(settings: ServerSettings) -> None:
    """Refuse half of a certificate, or one that cannot be used, before anything starts.

    Raises:
        InvalidRequest: naming the file.
    """
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if (cert is None) != (key is None):
        raise InvalidRequest("server.tls_cert_file and server.tls_key_file go together", param="server.tls_cert_file")
    if cert is None or key is None:
        return
    try:
        # An empty passphrase: a key that needs one is refused instead of asking on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"server.tls_cert_file {cert} and server.tls_key_file {key} cannot be used: {error}",
            param="server.tls_cert_file",
        ) from None


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The address others on this machine reach a listening socket at."""
    scheme = "https" if tls else "http"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are this module's."""
        yield


def make_server(app: ASGIApp, settings: ServerSettings) -> uvicorn.Server:
    """A server that serves an app on a socket of ours."""
    return _Server(
        uvicorn.Config(
            app,
            http=partial(Connection, settings=settings),  # type: ignore[arg-type]  # called as the class would be
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the caller's address in the audit log is the connection's
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=settings.tls_cert_file,
            ssl_keyfile=settings.tls_key_file,
            timeout_graceful_shutdown=int(LAST_ANSWERS_S) + 1,  # begins when the engine is closed
        )
    )


async def run(
    app: ASGIApp,
    service: Service,
    sock: socket.socket,
    *,
    admin_sock: socket.socket | None = None,
    on_ready: Callable[[], None] = lambda: None,
    exit_on_death: bool = False,
) -> None:
    """Serve until told to stop; then drain and close the engine. The engine is started already.

    Args:
        admin_sock: from `bind_admin`; the app serves administration on its port only.
        on_ready: called once requests are accepted.
        exit_on_death: stop when the engine has died, so that whoever supervises the process starts another.

    Raises:
        EngineDied: the engine died (with `exit_on_death`).
        InvalidRequest: the server could not start.
    """
    settings, lifecycle = service.settings, service.lifecycle
    _warn_of_roots(settings)
    server = make_server(app, settings)

    def stop(reason: str) -> None:
        if lifecycle.stopping.is_set():
            log.warning("stop_now", reason=reason)
            server.should_exit = server.force_exit = True
            return
        log.info("stop", reason=reason, in_flight=lifecycle.in_flight, drain_s=settings.drain_s)
        lifecycle.draining = True
        lifecycle.stopping.set()

    with _stop_on_signals(stop), stop_on_end_of_stdin(stop, wanted=settings.stop_with_stdin):
        serving = asyncio.create_task(
            server.serve(sockets=[sock] if admin_sock is None else [sock, admin_sock]), name="http server"
        )
        stopping = asyncio.create_task(lifecycle.stopping.wait(), name="stop requested")
        death = asyncio.create_task(_death(service), name="engine watch") if exit_on_death else None
        watched = {serving, stopping} | ({death} if death is not None else set())
        try:
            while not server.started and not serving.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # uvicorn has no event for this
            if serving.done():
                raise InvalidRequest("the HTTP server did not start; its log has the reason", param="server")
            prepare_process()
            on_ready()
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            reason = death.result() if death is not None and death.done() else None
            if reason is not None:
                stop(f"the engine died: {reason}")
            lifecycle.draining = True
            lifecycle.stopping.set()
            watchdog = _hard_stop(settings.drain_s + 2 * LAST_ANSWERS_S + HARD_STOP_S)
            await _close_engine(service)  # the port stays open meanwhile: probes see `draining`, new requests a 503
            server.should_exit = True
            await serving
            watchdog.cancel()
            log.info("stopped")
        finally:
            for task in (stopping, death):
                if task is not None:
                    task.cancel()
            server.should_exit = True
            await asyncio.gather(serving, *watched, return_exceptions=True)
            service.pool.shutdown(wait=False, cancel_futures=True)
        if reason is not None:
            raise EngineDied(reason)


def prepare_process() -> None:
    """What a process that serves sets for itself, once all that it keeps is there."""
    spare_collector()
    keep_freed_memory()
    share_interpreter()


def spare_collector() -> None:
    """Keep the garbage collector from walking, every few hundred requests, what lives as long as the process.

    Modules, routes and settings are tens of thousands of objects, and requests under way count as new ones: full collections
    of 15 ms each were a sixth of a frontend's time. What requests leave behind is still collected.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 50)


def keep_freed_memory() -> None:
    """Let glibc keep up to `KEPT_BYTES` that were freed, for the next answer, instead of giving them back to the kernel.

    The arrays and texts of a long answer are blocks of a tenth of a megabyte to a few: given back after every answer, and
    faulted in again page by page, they were an eighth of a worker's time. What the operator set for glibc's malloc stays;
    other C libraries have no such switch.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def share_interpreter() -> None:
    """Let the event loop have the interpreter back soon while a thread of the pool reads or writes a big answer.

    A thread that wants it asks for it once it has waited this long without the other letting go of it. numpy lets go for a
    moment in some of its calls, which is too short for whoever must wake first and begins the wait anew: at 0.5 ms the loop
    stood still for a whole answer of 30,000 tokens, 16 ms, at 0.1 for about one.
    """
    sys.setswitchinterval(SWITCH_S)


def _warn_of_roots(settings: ServerSettings) -> None:
    """Say which roots are not there; they may come yet, as mounts do."""
    for root in settings.root:
        if not Path(root).is_dir():
            log.warning("root_missing", root=root)


def check_ready_file(path: str | None) -> None:
    """Refuse a ready file that could not be written, before anything starts.

    Raises:
        InvalidRequest: naming it.
    """
    if path is None:
        return
    place = Path(path).absolute().parent
    says = None
    if Path(path).is_dir():
        says = "it is a directory"
    elif not place.is_dir():
        says = f"{place} is not a directory"
    elif not os.access(place, os.W_OK | os.X_OK):
        says = f"this user may not write to {place}"
    if says is not None:
        raise InvalidRequest(f"the ready file {path} cannot be written: {says}", param="server.ready_file")


def say_ready(settings: ServerSettings, *, url: str, **facts: Any) -> None:
    """One JSON line on standard output, and in the ready file (written beside it and moved, so never half there)."""
    line = msgspec.json.encode({"event": "ready", "url": url, "pid": os.getpid(), **facts}).decode()
    if settings.ready_file is not None:
        target = Path(settings.ready_file)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.write_text(line + "\n", encoding="utf-8")
        part.replace(target)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _close_engine(service: Service) -> None:
    limit_s = service.settings.drain_s + LAST_ANSWERS_S
    try:
        async with asyncio.timeout(limit_s):
            await service.engine.close(grace_s=service.settings.drain_s)
    except TimeoutError:
        log.error("engine_close_timed_out", limit_s=limit_s)


async def _death(service: Service) -> str:
    """Returns the reason once the engine is gone; a health check that only timed out is not a death."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S * 5):
                health = await service.engine.health()
            if not health.alive:
                return health.reason or f"the engine is {health.state}"
        await asyncio.sleep(WATCH_S)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[str], None]) -> Generator[None, None, None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only; whoever runs the server in another stops it otherwise
        return
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop, number.name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def stop_on_end_of_stdin(stop: Callable[[str], None], *, wanted: bool) -> Generator[None, None, None]:
    """Call `stop` with the reason once standard input has ended, where that is wanted."""
    if not wanted:
        yield
        return
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()

    def read() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            stop("standard input ended")

    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)


def _hard_stop(after_s: float) -> threading.Timer:
    """Ends the process should the drain itself hang: a stuck engine must not leave a process behind."""

    def end() -> None:
        log.critical("hard_stop", after_s=after_s)
        os._exit(70)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
    return timer
