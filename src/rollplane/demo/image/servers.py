"""The servers of the image run: vLLM's renderer, vLLM's Rust server, and Rollplane's frontend and sidecar before it."""

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
from pathlib import Path

from rollplane.demo.fleet import Fleet
from rollplane.errors import InvalidRequest, Unavailable

VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # else 92 % of the machine's memory
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
START_S, STOP_S = 240.0, 20.0


@contextlib.contextmanager
def running(words: Sequence[str], *, log: Path, environment: Mapping[str, str], health: str) -> Iterator[None]:
    """A command and all that it starts in its process group, from its first healthy answer to the block's end.

    Raises:
        Unavailable: it ended, or was not healthy within four minutes; with the end of its log.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        _wait(process, health, log)
        yield
    finally:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _signal(process.pid, signal.SIGKILL)  # engine processes may outlive their parent
        process.wait()


@contextlib.contextmanager
def renderer(model: Path, *, vllm_env: Path, log: Path) -> Iterator[str]:
    """vLLM's render server, which loads no weights; its base URL. About 15 s to start."""
    (port,) = free_ports(1)
    words = [str(there(vllm_env / "bin" / "vllm")), "launch", "render", str(model), "--port", str(port)]
    words += ["--max-model-len", "1024", "--dtype", "float32", "--limit-mm-per-prompt", '{"image":1,"video":0}']
    words += ["--no-mm-device-do-normalize"]  # normalised pixels in the features, as other renderers send them
    url = f"http://127.0.0.1:{port}"
    with running(words, log=log, environment=_environment(vllm_env), health=f"{url}/health"):
        yield url


@contextlib.contextmanager
def rust_server(model: Path, *, vllm_env: Path, vllm_rs: Path, adapters: Path, log: Path) -> Iterator[tuple[str, str]]:
    """vLLM's Rust server over one engine on the CPU; its gRPC address and its HTTP base URL. About 30 s to start."""
    http_port, grpc_port = free_ports(2)
    words = [str(there(vllm_rs)), "serve", str(model), "--port", str(http_port), "--grpc-port", str(grpc_port)]
    words += ["--enable-scale-out", "--", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
    words += ["--block-size", "32", "--limit-mm-per-prompt", '{"image":1,"video":0}', "--no-mm-device-do-normalize"]
    words += ["--logprobs-mode", "processed_logprobs", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "6"]
    environment = _environment(vllm_env) | {
        "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(adapters),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    url = f"http://127.0.0.1:{http_port}"
    with running(words, log=log, environment=environment, health=f"{url}/health"):
        yield f"127.0.0.1:{grpc_port}", url


class SidecarFleet(Fleet):
    """A frontend and one sidecar worker over a vLLM gRPC server; `root` holds the adapters."""

    def __init__(self, model: Path, *, grpc_endpoint: str, http_endpoint: str, root: Path, log: Path) -> None:
        super().__init__(model, workers=1, dtype="float32", slots=64, max_model_len=1024, log=log)
        self._grpc_endpoint = grpc_endpoint
        self._http_endpoint = http_endpoint
        self._root = root

    def command(self, ready: Path) -> list[str]:
        """See `Fleet.command`."""
        options = {
            "--engine": "vllm-grpc",
            "--grpc-endpoint": self._grpc_endpoint,
            "--vllm-http-endpoint": self._http_endpoint,
            "--workers": self.workers,
            "--root": self._root,
            "--port": 0,
            "--ready-file": ready,
            "--drain-s": 2,
            "--log-level": "warning",
        }
        said = {"logprobs_mode": "sampling", "mm_device_do_normalize": "false"}
        words = [str(word) for option in options.items() for word in option]
        words += [word for name, value in said.items() for word in ("--engine-option", f"{name}={value}")]
        return [sys.executable, "-m", "rollplane.cli.main", "serve", "--stop-with-stdin", *words]


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago, all different, below those of outgoing connections."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(20_000, 32_768), 200):
            each = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise Unavailable(f"found {len(found)} free ports, not {count}")


def _environment(vllm_env: Path) -> dict[str, str]:
    return VLLM_SETTINGS | {"PATH": f"{vllm_env / 'bin'}:{os.environ.get('PATH', '')}"}


def there(path: Path, *, made_by: str = "make vllm-env") -> Path:
    """The path.

    Raises:
        InvalidRequest: nothing is there.
    """
    if not path.exists():
        raise InvalidRequest(f"{path} is missing: `{made_by}` makes it")
    return path


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.HTTPError, OSError), urllib.request.urlopen(url, timeout=5):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # the pause between two tries, cut short by the process's end
            break
    end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise Unavailable(f"{process.args!r} is not healthy (exit code {process.poll()}):\n{end}")


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
