"""The servers that are measured side by side, as processes of this machine, each stack with the ids of its processes.

A stack is what a user would put between a client and an engine. Its engine's own process (the mock vLLM server, vLLM's
engine core) is no part of it and is not counted.
"""

import asyncio
import contextlib
import json
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models.tiny import shared_model
from tests.real import processes

CPUCLOCK_SCHED = 2
"""Linux makes the number of a process's CPU clock of its id and this (`clock_getcpuclockid`)."""
ROLLPLANE = [sys.executable, "-m", "rollplane.cli.main"]
START_S = 180.0
MODEL = "roll"
MAX_MODEL_LEN = 40_000
ROOT = Path(__file__).parents[1]
VLLM_PYTHON = processes.VLLM_ENV / "bin" / "python"
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""On the CPU vLLM puts a worker process behind its engine core, and the two spin for each other on a core each; so set, the
core computes itself, on one core, as if it waited for a GPU: what stands before the engine has the other one."""
VLLM_PATH = processes.VLLM_SETTINGS | ONE_PROCESS | {"PATH": f"{VLLM_PYTHON.parent}:{os.environ['PATH']}"}
VLLM_ARGS = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"]
VLLM_ENGINE_ARGS = ["--enforce-eager", "--block-size", "32"]
MOE = {"layers": 48, "top_k": 8, "num_experts": 128}


@dataclass(frozen=True)
class Stack:
    """`url`: its base. `pids`: its processes by name. `streams`, `msgpack`: whether it has such answers."""

    name: str
    engine: str
    url: str
    pids: dict[str, int]
    streams: bool = True
    msgpack: bool = True
    log: Path = field(default=Path(os.devnull))

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process since it started, user and system."""
        return {name: cpu_s(pid) for name, pid in self.pids.items()}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process since it started, all its threads, user and system: /proc's figure before it is cut to ticks."""
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


def interpreter() -> str:
    """The Python that runs this and Rollplane's processes, with the time that it takes for a fixed piece of work.

    One that was built without profile-guided optimization needs a fifth to a third more.
    """
    times_ms = []
    for _ in range(5):
        began_s = time.process_time()
        sum(number * number for number in range(100_000))
        times_ms.append((time.process_time() - began_s) * 1e3)
    build = (
        "with" if "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS")) else "not known to be with"
    )
    return f"Python {platform.python_version()}, {build} --enable-optimizations, {min(times_ms):.1f} ms for 100,000 squares"


class Rack:
    """Starts stacks and ends them with the block that holds it.

    Args:
        root: for logs and discovery files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Rack":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def run(self, command: list[str], name: str, *, environment: dict[str, str] | None = None) -> int:
        """Start a command; its process id."""
        log = self.root / f"{name}.log"
        return self._stack.enter_context(processes.running(command, log, environment=environment or {})).pid

    def mock(self, *, tokens_per_message: int, name: str = "mock", stepwise: bool = False) -> processes.Server:
        """A mock vLLM gRPC server."""
        (port,) = processes.free_ports(1)
        command = [sys.executable, str(Path(__file__).with_name("mock_vllm.py")), "--port", str(port)]
        command += ["--model", str(shared_model("qwen3")), "--tokens-per-message", str(tokens_per_message)]
        pid = self.run([*command, *(["--stepwise"] if stepwise else [])], name)
        return processes.Server(pid=pid, http_port=9, log=self.root / f"{name}.log", grpc_port=port)

    def vllm_rs(self, *, arguments: list[str]) -> processes.Server:
        """vLLM's Rust server over a real engine with a tiny model on the CPU."""
        return self._stack.enter_context(
            processes.vllm_rs(
                shared_model("qwen3"), self.root / "vllm-rs.log", arguments=arguments, environment=ONE_PROCESS
            )
        )

    def worker(self, engine: processes.Server, *, name: str = "worker") -> tuple[str, int]:
        """Our worker over a gRPC engine: its URL and process."""
        (port,) = processes.free_ports(1)
        command = [*ROLLPLANE, "worker", "--engine", "vllm-grpc", "--grpc-endpoint", engine.grpc_target]
        command += ["--port", str(port), "--engine-option", "vocab_size=1024", "--name", name]
        command += ["--engine-option", "mm_device_do_normalize=false"]
        return f"http://127.0.0.1:{port}", self.run(command, name)

    def mock_worker(self, *, name: str, options: dict[str, str] | None = None) -> tuple[str, int]:
        """Our worker with the mock engine in its process: with these options, else a mixture of experts that returns routes
        and masks.
        """
        (port,) = processes.free_ports(1)
        command = [*ROLLPLANE, "worker", "--engine", "mock", "--port", str(port), "--name", name]
        own = {"moe": json.dumps(MOE), "sampling_mask": "true"} if options is None else options
        for key, value in {"model": MODEL, "max_model_len": str(MAX_MODEL_LEN), **own}.items():
            command += ["--engine-option", f"{key}={value}"]
        return f"http://127.0.0.1:{port}", self.run(command, name)

    def frontend(self, workers: list[str], *, name: str = "frontend") -> tuple[str, int]:
        """Our frontend before workers: its URL and process."""
        (port,) = processes.free_ports(1)
        command = [*ROLLPLANE, "frontend", "--port", str(port)]
        for url in workers:
            command += ["--workers", url]
        return f"http://127.0.0.1:{port}", self.run(command, name)

    def vllm_python(self) -> Stack:
        """vLLM's Python server over a real engine with a tiny model on the CPU; the engine's core is a child and not counted."""
        (port,) = processes.free_ports(1)
        command = [str(VLLM_PYTHON.with_name("vllm")), "serve", str(shared_model("qwen3")), "--port", str(port)]
        command += ["--served-model-name", MODEL, "--enable-scale-out", *VLLM_ARGS, *VLLM_ENGINE_ARGS]
        pid = self.run(command, "vllm-python", environment=VLLM_PATH)
        return Stack("vllm python", "vllm-python", f"http://127.0.0.1:{port}", {"server": pid}, msgpack=False)

    def vllm_worker(self) -> Stack:
        """Our worker with vLLM in its process, the same engine with the same arguments."""
        (port,) = processes.free_ports(1)
        command = [str(VLLM_PYTHON), "-m", "rollplane.cli.main", "worker", "--engine", "vllm", "--port", str(port)]
        command += ["--model", str(shared_model("qwen3")), "--served-model-name", MODEL, *VLLM_ARGS]
        pid = self.run([*command, "--", *VLLM_ENGINE_ARGS], "vllm-worker", environment=VLLM_PATH)
        return Stack("rollplane in process", "vllm-python", f"http://127.0.0.1:{port}", {"worker": pid})

    def vllm_router(self, served: Stack) -> Stack:
        """vLLM's router before another stack's server."""
        port, metrics = processes.free_ports(2)
        command = [str(ROOT / ".venv-vllm-router/bin/vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "round_robin", "--worker-urls", served.url, "--prometheus-port", str(metrics)]
        command += ["--worker-startup-check-interval", "1", "--log-level", "warning"]
        pids = {"router": self.run(command, f"router-{served.engine}"), **served.pids}
        url = f"http://127.0.0.1:{port}"
        return Stack(f"vllm-router + {served.name}", served.engine, url, pids, msgpack=False)

    def rollplane(self, engine: processes.Server, *, kind: str) -> Stack:
        """Frontend and worker over a gRPC engine."""
        worker, worker_pid = self.worker(engine, name=f"worker-{kind}")
        url, pid = self.frontend([worker], name=f"frontend-{kind}")
        return Stack("rollplane", kind, url, {"frontend": pid, "worker": worker_pid})

    def rollplane_worker(self, engine: processes.Server, *, kind: str) -> Stack:
        """A worker alone."""
        url, pid = self.worker(engine, name=f"lone-worker-{kind}")
        return Stack("rollplane worker", kind, url, {"worker": pid})

    def dynamo(self, engine: processes.Server, *, kind: str) -> Stack:
        """NVIDIA Dynamo's frontend and its sidecar over a gRPC engine."""
        store = self.root / f"kv-{kind}"
        logs = [self.root / f"dynamo-{part}-{kind}.log" for part in ("frontend", "sidecar")]
        frontend = self._stack.enter_context(processes.dynamo_frontend(store, logs[0]))
        sidecar = self._stack.enter_context(processes.dynamo_sidecar(store, logs[1], engine=engine))
        pids = {"frontend": frontend.pid, "sidecar": sidecar.pid}
        return Stack("dynamo", kind, frontend.http_url, pids, streams=False, msgpack=False)


async def wait_until_serving(session: aiohttp.ClientSession, stack: Stack) -> str:
    """The name of the stack's first model, once it lists one.

    Raises:
        RuntimeError: not within `START_S`.
    """
    try:
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{stack.url}/v1/models") as answered:
                        if answered.status == 200 and (models := (await answered.json())["data"]):
                            return str(models[0]["id"])
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise RuntimeError(f"{stack.name} at {stack.url} lists no model after {START_S:g} s") from None


@contextlib.contextmanager
def rack() -> Iterator[Rack]:
    """A rack with a directory of its own; logs are kept until the end."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="rollplane-bench-") as directory, Rack(Path(directory)) as made:
        yield made
