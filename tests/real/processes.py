"""Starts a server of another project for a test, waits until it answers, and ends it with everything that it started.

The environments come from `scripts/make_vllm_env.sh`, `scripts/fetch_vllm_rs.sh` and `scripts/make_dynamo_env.sh`. One that
is missing is a failure that names its script: a test of a real part that did not meet the part has shown nothing.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPERVISE = Path(__file__).with_name("supervise.py")
VLLM_ENV = ROOT / ".venv-vllm"
DYNAMO_ENV = ROOT / ".venv-dynamo"
VLLM_RS = ROOT / ".cache" / "vllm-rs" / "vllm-rs-0.31.0"

# Without the first, vLLM on a CPU wants 92 % of the machine's memory for its KV cache.
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

POLL_S = 0.1
STOP_S = 20.0
GRACE_S = 3.0


@dataclass(frozen=True)
class Server:
    """A running server: its process, the ports that it listens on at 127.0.0.1, and where its output goes."""

    pid: int
    http_port: int
    log: Path
    grpc_port: int | None = None
    rl_port: int | None = None  # Dynamo's frontend answers `/v1/rl/workers` on a port of its own

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        if self.grpc_port is None:
            raise ValueError("this server speaks no gRPC")
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def rl_url(self) -> str:
        if self.rl_port is None:
            raise ValueError("this server has no RL port")
        return f"http://127.0.0.1:{self.rl_port}"


@contextlib.contextmanager
def vllm_rs(
    model: Path,
    log: Path,
    *,
    arguments: Sequence[str] = (),
    frontend_arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """vLLM's Rust server with one engine on the CPU: HTTP, `/inference/v1/generate` and gRPC. 20 to 30 s to start.

    `arguments` go to the engine, after those that every tiny model needs, `frontend_arguments` to the server itself;
    `environment` is added to `VLLM_SETTINGS`.
    """
    python = _require(VLLM_ENV / "bin" / "python", "scripts/make_vllm_env.sh")
    binary = _require(VLLM_RS, "scripts/fetch_vllm_rs.sh")
    http_port, grpc_port = free_ports(2)
    command = [str(binary), "serve", str(model), "--port", str(http_port), "--grpc-port", str(grpc_port)]
    command += [
        "--enable-scale-out",
        *frontend_arguments,
        "--",
        "--enforce-eager",
        "--dtype",
        "bfloat16",
        "--block-size",
        "32",
    ]
    command += ["--max-model-len", "4096", *arguments]
    settings = VLLM_SETTINGS | {"PATH": f"{python.parent}:{os.environ['PATH']}"} | dict(environment or {})
    with running(command, log, environment=settings) as process:
        wait_for_http(f"http://127.0.0.1:{http_port}/health", process, log, timeout_s=180)
        yield Server(process.pid, http_port, log, grpc_port=grpc_port)


@contextlib.contextmanager
def dynamo_frontend(store: Path, log: Path, *, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Dynamo's frontend with file discovery in `store`, and its routes for Generate and RL. Knows no model at first."""
    python = _require(DYNAMO_ENV / "bin" / "python", "scripts/make_dynamo_env.sh")
    http_port, rl_port = free_ports(2)
    command = [str(python), "-m", "dynamo.frontend", "--http-port", str(http_port), "--router-mode", "round-robin"]
    settings = dynamo_settings(store) | {"DYN_ENABLE_RL": "true", "DYN_RL_PORT": str(rl_port)} | dict(environment or {})
    with running(command, log, environment=settings) as process:
        wait_for_http(f"http://127.0.0.1:{http_port}/health", process, log, timeout_s=60)
        yield Server(process.pid, http_port, log, rl_port=rl_port)


@contextlib.contextmanager
def dynamo_sidecar(store: Path, log: Path, *, engine: Server) -> Iterator[Server]:
    """Dynamo's own sidecar between its frontend in `store` and a gRPC engine. The HTTP port is its system port."""
    python = _require(DYNAMO_ENV / "bin" / "python", "scripts/make_dynamo_env.sh")
    (system_port,) = free_ports(1, highest=32_767)  # Dynamo reads this one as a signed 16-bit number
    command = [str(python), "-m", "dynamo.vllm.sidecar", "--grpc-endpoint", engine.grpc_target]
    command += ["--enable-rl", "--vllm-http-endpoint", engine.http_url]
    settings = dynamo_settings(store) | {"DYN_SYSTEM_PORT": str(system_port)}
    with running(command, log, environment=settings) as process:
        wait_for_http(f"http://127.0.0.1:{system_port}/health", process, log, timeout_s=60)
        yield Server(process.pid, system_port, log)


def dynamo_settings(store: Path) -> dict[str, str]:
    """What every Dynamo process of one test shares: discovery in a directory, no etcd and no NATS."""
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Supervised:
    """A command under `supervise.py`, its output in `log`: it and all its descendants end with this process, however.

    `pid` is the command's own. `returncode` is as a shell says it: 128 and the signal's number where it was killed.
    """

    def __init__(self, command: Sequence[str], log: Path, *, environment: Mapping[str, str], stop_s: float) -> None:
        self.args = list(command)
        pid_read, pid_write = os.pipe()
        with log.open("wb") as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, str(SUPERVISE), str(pid_write), str(min(stop_s, GRACE_S)), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment),
                start_new_session=True,
                pass_fds=(pid_write,),
            )
        os.close(pid_write)
        with os.fdopen(pid_read, encoding="ascii") as said:
            text = said.read()
        if not text:
            self._supervisor.communicate()
            raise RuntimeError(f"{self.args!r} could not be run:\n{_tail(log)}")
        self.pid = int(text)

    @property
    def returncode(self) -> int | None:
        return self._supervisor.returncode

    def poll_s(self, timeout_s: float) -> int | None:
        """The return code once it has ended; None where it still runs after `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._supervisor.wait(timeout_s)
        return None

    def wait(self, timeout_s: float) -> int:
        """Raises `subprocess.TimeoutExpired` where it has not ended, with its descendants, after `timeout_s`."""
        return self._supervisor.wait(timeout_s)

    def stop(self, *, stop_s: float) -> None:
        """Ask the command to end; what is left of it and its descendants after `stop_s` is killed."""
        self._supervisor.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(stop_s)
        self._supervisor.communicate(timeout=STOP_S)  # closes its standard input


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str], stop_s: float = STOP_S
) -> Iterator[Supervised]:
    """The command. At the end it and all its descendants are gone, whatever the test did: see `Supervised.stop`."""
    process = Supervised(command, log, environment=environment, stop_s=stop_s)
    try:
        yield process
    finally:
        process.stop(stop_s=stop_s)


def wait_for_http(url: str, process: Supervised, log: Path, *, timeout_s: float) -> None:
    """Returns at the first answer with a status below 500.

    Raises:
        RuntimeError: the process ended, or `timeout_s` went by; the message has the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)  # the pause between two tries, cut short by the process's end
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{_tail(log)}")
    raise RuntimeError(f"{url} did not answer within {timeout_s} s:\n{_tail(log)}")


_told: set[int] = set()
"""Ports that `free_ports` gave in this process."""


def free_ports(count: int, *, highest: int = 32_767) -> list[int]:
    """Ports of 127.0.0.1 from 20000 up to `highest` that were free a moment ago, all different, and not told before.

    The default stays below those that Linux gives to outgoing connections: a server that starts for half a minute would
    find its port taken by somebody's request.
    """
    among = [port for port in range(20_000, highest + 1) if port not in _told]  # one told may not be bound yet
    candidates = random.SystemRandom().sample(among, 200)  # other processes draw others
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in candidates:
            each = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                _told.update(found)
                return found
    raise RuntimeError(f"found {len(found)} free ports, not {count}")


def _require(path: Path, script: str) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run {script}")
    return path


def _tail(log: Path, *, lines: int = 30) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
