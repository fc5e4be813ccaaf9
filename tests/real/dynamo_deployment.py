"""A small Dynamo deployment for a test: its frontend, our workers on its runtime, and our own frontend over the same workers."""

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.models.tiny import shared_model
from tests.real import processes

MOCK = [
    "--engine-option", "vocab_tokens=1024",
    "--engine-option", "sampling_mask=true",
    "--engine-option", 'moe={"layers":2,"top_k":2,"num_experts":8}',
]  # fmt: skip
WAIT_S = 60.0


@contextlib.contextmanager
def frontend(
    store: Path, log: Path, *, mode: str = "kv", environment: Mapping[str, str] | None = None
) -> Iterator[processes.Server]:
    """Dynamo's frontend as `docs/dynamo.md` has it: adapters go to the workers that have them, placed by the router."""
    settings = {"DYN_LORA_ENABLED": "true", "DYN_LORA_ALLOCATION_ENABLED": "false", **(environment or {})}
    python = processes.DYNAMO_ENV / "bin" / "python"
    http_port, rl_port = processes.free_ports(2)
    command = [str(python), "-m", "dynamo.frontend", "--http-port", str(http_port), "--router-mode", mode]
    settings = processes.dynamo_settings(store) | {"DYN_ENABLE_RL": "true", "DYN_RL_PORT": str(rl_port)} | settings
    with processes.running(command, log, environment=settings) as process:
        processes.wait_for_http(f"http://127.0.0.1:{http_port}/health", process, log, timeout_s=60)
        yield processes.Server(process.pid, http_port, log, rl_port=rl_port)


@contextlib.contextmanager
def worker(
    store: Path,
    log: Path,
    *,
    arguments: Sequence[str] = (),
    engine: Sequence[str] = ("--engine", "mock", "--served-model-name", "roll", *MOCK),
    environment: Mapping[str, str] | None = None,
    card: str = "qwen-vl",
    python: Path = processes.DYNAMO_ENV / "bin" / "python",
    start_s: float = WAIT_S,
) -> Iterator[processes.Server]:
    """One of our workers on Dynamo's runtime; ready means that the deployment has it."""
    ready = log.with_suffix(".ready")
    (port,) = processes.free_ports(1)
    command = [str(python), "-m", "rollplane.cli.main", "worker", "--runtime", "dynamo", "--port", str(port), *engine]
    command += [
        "--model-card",
        str(shared_model(card)),
        "--ready-file",
        str(ready),
        "--name",
        log.stem,
        *arguments,
    ]
    settings = processes.dynamo_settings(store) | dict(environment or {})
    with processes.running(command, log, environment=settings) as process:
        processes.wait_for_http(f"http://127.0.0.1:{port}/health", process, log, timeout_s=start_s)
        until(ready.exists, log)
        yield processes.Server(process.pid, port, log)


@contextlib.contextmanager
def sidecar(store: Path, log: Path, *, grpc_port: int) -> Iterator[processes.Server]:
    """Dynamo's own vLLM worker that serves adapters too, in front of a gRPC engine. The HTTP port is its system port."""
    python = processes.DYNAMO_ENV / "bin" / "python"
    (port,) = processes.free_ports(1)
    command = [str(python), "-m", "dynamo.vllm.sidecar", "--grpc-endpoint", f"127.0.0.1:{grpc_port}", "--enable-rl"]
    command += ["--vllm-http-endpoint", "http://127.0.0.1:9"]
    settings = processes.dynamo_settings(store) | {"DYN_SYSTEM_PORT": str(port), "DYN_LORA_ENABLED": "true"}
    with processes.running(command, log, environment=settings) as process:
        processes.wait_for_http(f"http://127.0.0.1:{port}/health", process, log, timeout_s=WAIT_S)
        yield processes.Server(process.pid, port, log)


@contextlib.contextmanager
def own_frontend(log: Path, *, arguments: Sequence[str]) -> Iterator[processes.Server]:
    """`rollplane frontend`; `arguments` say who its workers are."""
    (port,) = processes.free_ports(1)
    command = [sys.executable, "-m", "rollplane.cli.main", "frontend", "--port", str(port), *arguments]
    with processes.running(command, log, environment={"PATH": os.environ["PATH"]}) as process:
        processes.wait_for_http(f"http://127.0.0.1:{port}/health", process, log, timeout_s=WAIT_S)
        yield processes.Server(process.pid, port, log)


def post(url: str, body: Any, *, headers: Mapping[str, str] | None = None, timeout_s: float = 30) -> tuple[int, Any]:
    """The status and the JSON answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answered:
            return answered.status, json.load(answered)
    except urllib.error.HTTPError as error:
        text = error.read()
        return error.code, json.loads(text) if text.startswith(b"{") else text.decode()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answered:
        return json.load(answered)


def models(server: processes.Server) -> set[str]:
    return {model["id"] for model in get(f"{server.http_url}/v1/models")["data"]}


def until(condition: Callable[[], object], log: Path, *, timeout_s: float = WAIT_S) -> None:
    """Other processes' doings have no event here: the condition is looked at until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise AssertionError(f"not so after {timeout_s} s:\n{tail}")
        time.sleep(0.05)


def generate(server: processes.Server, body: Mapping[str, Any], **headers: str) -> tuple[int, Any]:
    return post(f"{server.http_url}/inference/v1/generate", {"model": "roll", **body}, headers=headers)


def passed(answer: Any) -> Any:
    """What our worker passed through Dynamo's answer."""
    return answer["kv_transfer_params"]["rollplane"]


def standing(fleet: processes.Server) -> list[str | None]:
    """Per worker of the fleet, why it takes no part; None where it does."""
    return [each.get("error") for each in get(f"{fleet.http_url}/v1/rl/workers")["workers"]]
