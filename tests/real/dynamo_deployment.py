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

import msgspec
from tests.models.tiny import shared_model
from tests.real import processes

from rollplane.protocol.arrays import enc_hook
from rollplane.protocol.response import GenerateResponse

MOCK = [
    "--engine-option", "vocab_tokens=1024",
    "--engine-option", "sampling_mask=true",
    "--engine-option", 'moe={"layers":2,"top_k":2,"num_experts":8}',
]  # fmt: skip
WAIT_S = 60.0
CONTEXT, BLOCK_TOKENS = 2048, 32
"""Alike for all real engines of one model: Dynamo serves only workers whose model card is alike."""


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
    card: str | None = "qwen-vl",
    python: Path = processes.DYNAMO_ENV / "bin" / "python",
    start_s: float = WAIT_S,
) -> Iterator[processes.Server]:
    """One of our workers on Dynamo's runtime; ready means that the deployment has it."""
    ready = log.with_suffix(".ready")
    (port,) = processes.free_ports(1)
    command = [str(python), "-m", "rollplane.cli.main", "worker", "--runtime", "dynamo", "--port", str(port), *engine]
    if card is not None:
        command += ["--model-card", str(shared_model(card))]
    command += ["--ready-file", str(ready), "--name", log.stem, *arguments]
    settings = processes.dynamo_settings(store) | dict(environment or {})
    with processes.running(command, log, environment=settings) as process:
        processes.wait_for_http(f"http://127.0.0.1:{port}/health", process, log, timeout_s=start_s)
        until(ready.exists, log)
        yield processes.Server(process.pid, port, log)


@contextlib.contextmanager
def embedded_worker(
    store: Path, log: Path, *, model: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[processes.Server]:
    """Our embedded engine on Dynamo's runtime, in the environment of vLLM: see `scripts/add_dynamo_runtime.sh`."""
    engine = ["--engine", "embedded", "--model", str(model), "--served-model-name", "roll", "--dtype", "float32"]
    engine += ["--max-model-len", str(CONTEXT), "--engine-option", "threads=1"]
    with worker(
        store,
        log,
        engine=engine,
        arguments=["--model-card", str(model), "--block-tokens", str(BLOCK_TOKENS), *arguments],
        environment={"OMP_NUM_THREADS": "1", **(environment or {})},
        card=None,
        python=beside_vllm(),
        start_s=120,
    ) as found:
        yield found


@contextlib.contextmanager
def vllm_worker(
    store: Path,
    log: Path,
    *,
    model: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    env: Path = processes.VLLM_ENV,
) -> Iterator[processes.Server]:
    """vLLM in our worker on Dynamo's runtime. `arguments` go to vLLM; `env` is the environment that has it."""
    python = beside_vllm(env)
    engine = ["--engine", "vllm", "--model", str(model), "--served-model-name", "roll", "--dtype", "float32"]
    engine += ["--max-model-len", str(CONTEXT)]
    settings = processes.VLLM_SETTINGS | {"PATH": f"{python.parent}:{os.environ['PATH']}"} | dict(environment or {})
    with worker(
        store,
        log,
        engine=engine,
        arguments=["--model-card", str(model), "--", "--enforce-eager", "--block-size", str(BLOCK_TOKENS), *arguments],
        environment=settings,
        card=None,
        python=python,
        start_s=180,
    ) as found:
        yield found


@contextlib.contextmanager
def their_vllm_worker(
    store: Path, log: Path, *, model: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[processes.Server]:
    """Dynamo's own vLLM worker, `python -m dynamo.vllm`, as it begins to start. The HTTP port is its system port."""
    python = beside_vllm()
    (port,) = processes.free_ports(1)
    command = [str(python), "-m", "dynamo.vllm", "--enable-rl", "--model", str(model), "--served-model-name", "roll"]
    command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager"]
    command += ["--block-size", str(BLOCK_TOKENS), *arguments]
    settings = processes.VLLM_SETTINGS | {"PATH": f"{python.parent}:{os.environ['PATH']}", "DYN_SYSTEM_PORT": str(port)}
    settings["PYTHONPATH"] = str(processes.VLLM_ENV / "dynamo-worker")
    settings |= processes.dynamo_settings(store) | dict(environment or {})
    with processes.running(command, log, environment=settings) as process:
        yield processes.Server(process.pid, port, log)


def beside_vllm(env: Path = processes.VLLM_ENV) -> Path:
    """The interpreter of vLLM's environment, which has Dynamo's runtime too."""
    python = env / "bin" / "python"
    if not list((env / "lib").glob("python3*/site-packages/dynamo")):
        raise FileNotFoundError(f"{env} lacks Dynamo's runtime: run scripts/add_dynamo_runtime.sh {env.name}")
    return python


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


def get(url: str, *, headers: Mapping[str, str] | None = None) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers or {})), timeout=30) as answered:
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


def comparable(response: GenerateResponse) -> bytes:
    """What must be alike of two answers: ids, log-probabilities, routes, masks, versions, reasons; arrays by dtype, shape and
    bytes. Ranks of sampled tokens are left out, which no JSON answer has.
    """
    choices = [
        msgspec.structs.replace(
            choice, logprobs=choice.logprobs and msgspec.structs.replace(choice.logprobs, ranks=None)
        )
        for choice in response.choices
    ]
    parts = (
        choices,
        response.prompt_logprobs,
        response.prompt_token_ids,
        response.mm_placeholders,
        response.request_id,
    )
    return msgspec.msgpack.encode(parts, enc_hook=enc_hook)


def standing(fleet: processes.Server) -> list[str | None]:
    """Per worker of the fleet, why it takes no part; None where it does."""
    return [each.get("error") for each in get(f"{fleet.http_url}/v1/rl/workers")["workers"]]
