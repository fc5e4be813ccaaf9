"""What serving unary requests costs on the API side of vLLM: our worker beside vLLM's own server, the same requests to both.

Each has an engine of its own over one model in this process (on uvloop), takes HTTP bodies and gives whole HTTP answers;
vLLM's is left as `vllm serve` makes it. Both feed vLLM's Prometheus metrics, and ours follows the prefix cache besides.
The engine cores compute in processes of their own and are not counted. CPU seconds of this process per request, medians
over rounds in which they take turns. What a step costs is shared by the requests in it, so the figure falls with their
number: `--at-once` is for both alike, 1 by default, which is one request and what a step costs without company.

`AsyncLLM` is vLLM's own generate call with what spares it most (only the last output, no text), `folded` is our engine
without worker and HTTP.

    .venv-vllm/bin/python bench/vllm_folding_cost.py [--prompt 2048] [--output 1024] [--at-once 1] [--rounds 5]
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import msgspec
import numpy as np
import uvloop
from tests.models.tiny import shared_model
from tests.vllm.own_server import server_over
from tests.vllm.support import ENGINE_ARGS

from rollplane.config import ServerSettings
from rollplane.engines.vllm import convert, versions
from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.engines.vllm.settings import VllmSettings
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.testing import answer, make_request
from rollplane.worker import Worker

THEIRS, OURS, ALONE, FOLDED = "vLLM's server", "rollplane", "AsyncLLM", "folded"
Ask = Callable[[], Awaitable[int]]


async def measure(ask: Ask, at_once: int) -> tuple[float, float]:
    """CPU milliseconds per request, and wall milliseconds of all."""
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(at_once)))
    return (time.process_time() - cpu) * 1e3 / at_once, (time.perf_counter() - wall) * 1e3


def own_engine(words: list[str]) -> Any:
    """vLLM's engine as its own server makes it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parser.parse_args(words)))


def asking(client: httpx.AsyncClient, body: Callable[[], bytes]) -> Ask:
    """A way to ask a server for one answer."""

    async def ask() -> int:
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/inference/v1/generate", content=body(), headers=headers, timeout=600)
        answer.raise_for_status()
        return len(answer.content)

    return ask


async def run(prompt: int, output: int, at_once: int, rounds: int) -> None:
    model, room = str(shared_model("qwen3")), prompt + output + 16
    engine = VllmEngine(
        VllmSettings(
            model=model,
            served_model_name=("policy",),
            policy_version="initial",
            dtype="float32",
            max_model_len=room,
            max_num_seqs=64,
            engine_args=ENGINE_ARGS,
        )
    )
    worker = Worker(engine)
    await worker.start()
    words = ["--model", model, "--dtype", "float32", "--max-model-len", str(room), "--max-num-seqs", "64"]
    vllm = own_engine([*words, "--no-enable-chunked-prefill", *ENGINE_ARGS])
    rng = np.random.default_rng(0)
    sampling = {"max_tokens": output, "ignore_eos": True, "logprobs": 1, "temperature": 1.0, "seed": 1}

    def ids() -> list[int]:
        found: list[int] = rng.integers(300, 1000, prompt).tolist()
        return found

    def body() -> bytes:
        return msgspec.json.encode({"model": "policy", "token_ids": ids(), "sampling_params": sampling})

    service = Service(
        role="worker",
        engine=worker,
        admin=worker,
        worker=worker,
        settings=ServerSettings(),
        keys=KeyRing([], []),
        metrics=Metrics(),
    )
    transport = httpx.ASGITransport(app=create_app(service))
    async with (
        server_over(vllm, model=model) as theirs,
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as ours,
    ):

        async def alone() -> int:
            request = make_request(ids(), **sampling)
            fields = convert.sampling_fields(request, engine.info, vocab_tokens=1024)
            params = versions.make_sampling_params(engine._api, fields)
            text = engine._api.tokens_input(request.token_ids.tolist())
            async for made in vllm.generate(text, params, request.request_id):
                last = made
            return len(last.outputs[0].token_ids)

        async def folded() -> int:
            return int((await answer(engine, make_request(ids(), **sampling))).choices[0].token_ids.size)

        asks = {THEIRS: asking(theirs, body), OURS: asking(ours, body), ALONE: alone, FOLDED: folded}
        for ask in asks.values():
            await ask()
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in asks}
        for _ in range(rounds):
            for name, ask in asks.items():
                taken[name].append(await measure(ask, at_once))
    cpu = {name: statistics.median(c for c, _ in values) for name, values in taken.items()}
    print(
        f"{prompt} tokens in, {output} out, logprobs on, unary, {at_once} at once; median of {rounds} rounds, "
        f"vLLM {engine.info.engine_version}, load average {os.getloadavg()[0]:.1f}"
    )
    for name, values in taken.items():
        wall = statistics.median(w for _, w in values)
        spread = f"{min(c for c, _ in values):.1f}..{max(c for c, _ in values):.1f}"
        print(f"  {name:14} {cpu[name]:7.1f} ms CPU per request ({spread}), {wall:.0f} ms wall")
    print(f"  ratio {cpu[OURS] / cpu[THEIRS]:.2f}")
    await worker.close()
    await asyncio.to_thread(vllm.shutdown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--output", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    uvloop.run(run(args.prompt, args.output, args.at_once, args.rounds))


if __name__ == "__main__":
    main()
