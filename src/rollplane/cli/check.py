"""`rollplane check`: what would go wrong if a worker or a frontend were started with these settings, said before it is."""

import asyncio
import contextlib
import importlib.metadata
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from rollplane.cli.engines import build_engine
from rollplane.cli.frontend import discovery_of, urls_of, worker_key
from rollplane.cli.main import missing
from rollplane.config import FrontendSettings, ServerSettings, Settings, WorkerSettings
from rollplane.discovery.file import FileDiscovery
from rollplane.discovery.static import StaticDiscovery
from rollplane.engines.registry import engine_class
from rollplane.errors import RollplaneError
from rollplane.router.policies import make_policy
from rollplane.server import ops
from rollplane.server.auth import KeyRing, check_binding
from rollplane.server.text import TOKENIZER_FILE, text_directory

State = Literal["ok", "warn", "fail"]

PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "embedded": ("torch", "transformers", "peft", "safetensors"),
    "vllm": ("vllm", "torch"),
    "vllm-grpc": ("grpcio", "protobuf"),
}
"""Engine -> the distributions whose versions decide what it can do."""
OLDEST_VLLM: Final = (0, 29)
LEAST_FREE_BYTES: Final = 2 * 2**30
CONNECT_S: Final = 3.0
CLOCK_S: Final = 5.0
"""Clocks that differ by more make ages, deadlines and logs misleading."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    state: State
    says: str


def main(settings: Settings) -> None:
    """Look at everything, print a line each, and exit with 1 where something would fail."""
    found = list(findings(settings))
    for each in found:
        print(f"{each.state:<5} {each.name}: {each.says}")
    failed = sum(each.state == "fail" for each in found)
    warned = sum(each.state == "warn" for each in found)
    print(f"{failed} failed, {warned} warnings, {len(found) - failed - warned} fine")
    if failed:
        raise SystemExit(1)


def findings(settings: Settings) -> Iterator[Finding]:
    """Every check that these settings call for; workers' addresses make it a frontend, else it is a worker."""
    server, frontend = settings.table(ServerSettings), settings.table(FrontendSettings)
    is_frontend = bool(frontend.workers or frontend.workers_file or frontend.fleet or frontend.dynamo_rl_url)
    yield Finding(name="role", state="ok", says="frontend" if is_frontend else "worker")
    yield from _keys(server)
    yield from _ports(server)
    yield from _roots(server)
    if is_frontend:
        yield from _frontend(frontend)
    else:
        worker = settings.table(WorkerSettings)
        yield from _engine(worker)
        yield from _model(worker, server)
    yield from _disks(server)


def _tried(name: str, work: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, state="ok", says=work())
    except RollplaneError as error:
        return Finding(name=name, state="fail", says=error.message)
    except ModuleNotFoundError as error:
        return Finding(name=name, state="fail", says=missing(error))
    except (OSError, ValueError) as error:
        return Finding(name=name, state="fail", says=str(error))


def _keys(server: ServerSettings) -> Iterator[Finding]:
    def ring() -> str:
        keys = KeyRing(server.data_key_file, server.admin_key_file)
        check_binding(server.host, keys)
        check_binding(server.admin_host or server.host, keys)
        return "none, so loopback only" if keys.open else repr(keys)[9:-1]

    yield _tried("keys", ring)
    for path in (*server.data_key_file, *server.admin_key_file):
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(Path(path).stat().st_mode)
            if mode & 0o077:
                says = f"{path} may be read by others (mode {mode:o}); chmod 600"
                yield Finding(name="keys", state="warn", says=says)
    if server.data_key_file and not server.admin_key_file:
        yield Finding(name="keys", state="warn", says="there is no admin key: nobody can update the policy")

    def tls() -> str:
        ops.check_tls(server)
        return "off" if server.tls_cert_file is None else f"certificate {server.tls_cert_file}"

    yield _tried("tls", tls)


def _ports(server: ServerSettings) -> Iterator[Finding]:
    def listen() -> str:
        with contextlib.ExitStack() as stack:
            sockets = [ops.bind(server), ops.bind_admin(server)]
            open_now = [stack.enter_context(each) for each in sockets if each is not None]
            return ", ".join(ops.url_of(each, tls=server.tls_cert_file is not None) for each in open_now)

    yield _tried("ports", listen)

    def ready_file() -> str:
        ops.check_ready_file(server.ready_file)
        return f"{server.ready_file} can be written"

    if server.ready_file is not None:
        yield _tried("ready file", ready_file)


def _roots(server: ServerSettings) -> Iterator[Finding]:
    for root in server.root:
        yield _tried(f"root {root}", lambda root=root: _readable(Path(root)))  # type: ignore[misc]
    if not server.root and (server.admin_key_file or server.data_key_file):
        says = "none: no checkpoint or adapter can be loaded; set --root"
        yield Finding(name="roots", state="warn", says=says)
    for root in server.root:
        skew = _file_clock_skew(Path(root))
        if skew is not None and abs(skew) > CLOCK_S:
            yield Finding(
                name="clock", state="warn", says=f"files below {root} get times {skew:+.0f} s from this machine's"
            )


def _readable(path: Path) -> str:
    if not path.is_dir():
        raise ValueError("is not a directory" if path.exists() else "does not exist")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ValueError("cannot be read by this user")
    return f"{sum(1 for _ in path.iterdir())} entries"


def _file_clock_skew(path: Path) -> float | None:
    """How far the clock of a file system is from ours, in seconds; None where nothing can be written."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            now = time.time()
            file.write(b"x")
            file.flush()
            return os.fstat(file.fileno()).st_mtime - now
    except OSError:
        return None


def _frontend(about: FrontendSettings) -> Iterator[Finding]:
    """The routing policy, the key that is sent to workers, and every worker that the settings name."""
    yield _tried("workers", lambda: repr(discovery_of(about)).strip("<>"))
    if about.router is not None:
        yield _tried("router", lambda: repr(make_policy(about.router)).strip("<>"))
    if about.worker_key_file is not None:
        yield _tried("worker key", lambda: f"the first of {about.worker_key_file}" if worker_key(about) else "none")
    urls = list(about.workers)

    def adding(listed: Callable[[], list[str]]) -> Callable[[], str]:
        def add() -> str:
            more = StaticDiscovery(listed()).urls
            urls.extend(more)
            return f"{len(more)} workers"

        return add

    for name, text in about.fleet.items():
        yield _tried(f"fleet {name}", adding(partial(urls_of, name, text)))
    if about.workers_file is not None:
        yield _tried("workers file", adding(FileDiscovery(Path(about.workers_file)).read))
    if about.dynamo_rl_url is not None:
        yield _peer("dynamo", about.dynamo_rl_url)
    for url in dict.fromkeys(urls):
        yield _peer("worker", url)


def _engine(worker: WorkerSettings) -> Iterator[Finding]:
    def versions() -> str:
        engine_class(worker.engine)
        names = PACKAGES.get(worker.engine, ())
        found = {name: importlib.metadata.version(name) for name in names}
        release = found.get("vllm")
        if release is not None and tuple(int(part) for part in release.split(".")[:2]) < OLDEST_VLLM:
            raise ValueError(f"vLLM {release} is older than {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]}, the oldest supported")
        return " ".join([worker.engine, *(f"{name} {version}" for name, version in found.items())])

    def options() -> str:
        engine: Any = build_engine(worker)
        if worker.engine == "vllm":
            _check_vllm_arguments(engine.settings)
        return f"{len(worker.engine_option)} options, {len(worker.engine_args)} arguments of its own"

    yield _tried("engine", versions)
    yield _tried("engine flags", options)
    if worker.grpc_endpoint is not None:
        yield _peer("grpc endpoint", f"grpc://{worker.grpc_endpoint}")
    if worker.vllm_http_endpoint is not None:
        yield _peer("vllm http endpoint", worker.vllm_http_endpoint)


def _check_vllm_arguments(settings: Any) -> None:
    """What vLLM's own parser and ours say of its arguments; nothing is started."""
    from rollplane.engines.vllm import versions
    from rollplane.engines.vllm.settings import check_engine_args, engine_words

    api = versions.load_api(allow_untested=settings.allow_untested_vllm)
    words = engine_words(settings, api.engine_fields, kv_events_at=tempfile.gettempdir(), on_cpu=api.on_cpu)
    check_engine_args(versions.parse_engine_args(api, words))


def _model(worker: WorkerSettings, server: ServerSettings) -> Iterator[Finding]:
    if worker.model is None:
        needs = worker.engine in ("embedded", "vllm")
        yield Finding(name="model", state="fail" if needs else "ok", says="none given")
        return
    path = Path(worker.model)
    if not path.is_dir():
        local = worker.engine in ("embedded", "mock") or path.is_absolute()
        says = f"{path} is not a directory" + ("" if local else "; vLLM would take it for the name of a hub's model")
        yield Finding(name="model", state="fail" if local else "warn", says=says)
        return

    def weights() -> str:
        if worker.engine == "mock":
            return "the mock engine reads no weights"
        config = msgspec.json.decode((path / "config.json").read_bytes())
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{path} holds no safetensors file")
        total = sum(_checked_size(file) for file in files)
        return f"{config.get('architectures', ['?'])[0]}, {len(files)} files, {total / 2**20:.1f} MiB"

    yield _tried("model", weights)
    named = server.tokenizer
    text = text_directory(worker.model if named is None else named)
    if text is not None:
        yield Finding(name="text", state="ok", says=f"tokenizer in {text}")
    elif named is not None:
        yield Finding(name="text", state="fail", says=f"{named} has no {TOKENIZER_FILE}")
    else:
        yield Finding(name="text", state="warn", says="no tokenizer: OpenAI's routes and stop strings are refused")
    newest = max((file.stat().st_mtime for file in path.iterdir()), default=0.0)
    ahead = newest - time.time()
    if ahead > CLOCK_S:
        yield Finding(name="clock", state="warn", says=f"the model's files are {ahead:.0f} s from the future")
    else:
        yield Finding(name="clock", state="ok", says=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def _checked_size(file: Path) -> int:
    """Bytes of a safetensors file whose header and length agree.

    Raises:
        ValueError: it is cut off, or is no safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
        if not 2 <= header <= min(size - 8, 100 * 2**20):
            raise ValueError(f"{file} is no safetensors file")
        try:
            entries = msgspec.json.decode(opened.read(header), type=dict[str, dict[str, Any]])
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}: {error}") from None
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    if 8 + header + max(ends, default=0) != size:
        raise ValueError(
            f"{file} has {size} bytes, its header says {8 + header + max(ends, default=0)}: it was cut off"
        )
    return size


def _disks(server: ServerSettings) -> Iterator[Finding]:
    for place in dict.fromkeys([tempfile.gettempdir(), *server.root]):
        if Path(place).is_dir():
            free = shutil.disk_usage(place).free
            state: State = "ok" if free >= LEAST_FREE_BYTES else "warn"
            yield Finding(name=f"disk {place}", state=state, says=f"{free / 2**30:.1f} GiB free")


def _peer(name: str, url: str) -> Finding:
    """Whether somebody listens, and whether its clock is ours where it says."""
    parts = urlsplit(url)
    if not parts.hostname or (parts.port is None and parts.scheme not in ("http", "https")):
        return Finding(name=f"{name} {url}", state="fail", says="is no address with a port")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), timeout=CONNECT_S):
            pass
        if parts.scheme == "grpc":
            return Finding(name=f"{name} {url}", state="ok", says="listens")
        status, date = asyncio.run(_asked(f"{url.rstrip('/')}/health"))
    except (OSError, TimeoutError) as error:
        return Finding(
            name=f"{name} {url}", state="fail", says=f"cannot be reached: {str(error) or type(error).__name__}"
        )
    skew = 0.0 if date is None else parsedate_to_datetime(date).timestamp() - time.time()
    if abs(skew) > CLOCK_S:
        return Finding(name=f"{name} {url}", state="warn", says=f"its clock is {skew:+.0f} s from ours")
    return Finding(name=f"{name} {url}", state="ok" if status == 200 else "warn", says=f"/health answers {status}")


async def _asked(url: str) -> tuple[int, str | None]:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CONNECT_S)) as session,
            session.get(url) as answer,
        ):
            return answer.status, answer.headers.get("Date")
    except aiohttp.ClientError as error:
        raise OSError(str(error)) from None
