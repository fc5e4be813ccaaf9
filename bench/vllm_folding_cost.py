"""What serving unary requests costs on the API side of vLLM: our worker beside vLLM's own server, on one engine.

Both run in this process over one `AsyncLLM` on uvloop, take the same HTTP bodies and give whole HTTP answers, so many at
once; the engine core computes in a process of its own and is not counted. CPU seconds of this process per request, medians
over rounds in which the two take turns, vLLM's server with the stat loggers that it has by default. `AsyncLLM alone` is what neither can save: the same requests asked of vLLM as we
ask them, their outputs thrown away.

    .venv-vllm/bin/python bench/vllm_folding_cost.py [--prompt 2048] [--output 1024] [--at-once 16] [--rounds 5]
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

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
from tests.vllm.own_server import own_server
from tests.vllm.support import ENGINE_ARGS

from rollplane.config import ServerSettings
from rollplane.engines.vllm import convert, versions
from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.engines.vllm.settings import VllmSettings
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.testing import make_request
from rollplane.worker import Worker

THEIRS, OURS, ALONE = "vLLM's server", "rollplane", "AsyncLLM alone"
Ask = Callable[[], Awaitable[int]]


async def measure(ask: Ask, at_once: int) -> tuple[float, float]:
    """CPU milliseconds per request, and wall milliseconds of all."""
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(at_once)))
    return (time.process_time() - cpu) * 1e3 / at_once, (time.perf_counter() - wall) * 1e3


async def run(prompt: int, output: int, at_once: int, rounds: int) -> None:
    settings = VllmSettings(
        model=str(shared_model("qwen3")),
        served_model_name=("policy",),
        policy_version="initial",
        dtype="float32",
        max_model_len=prompt + output + 16,
        max_num_seqs=16,
        engine_args=ENGINE_ARGS,
    )
    engine = VllmEngine(settings)
    worker = Worker(engine)
    await worker.start()
    rng = np.random.default_rng(0)

    sampling = {"max_tokens": output, "ignore_eos": True, "logprobs": 1, "temperature": 1.0, "seed": 1}

    def body() -> bytes:
        ids = rng.integers(300, 1000, prompt).tolist()
        return msgspec.json.encode({"model": "policy", "token_ids": ids, "sampling_params": sampling})

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
        own_server(engine) as theirs,
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as ours,
    ):

        def asking(client: httpx.AsyncClient) -> Ask:
            async def ask() -> int:
                headers = {"Content-Type": "application/json"}
                answer = await client.post("/inference/v1/generate", content=body(), headers=headers, timeout=600)
                answer.raise_for_status()
                return len(answer.content)

            return ask

        async def alone() -> int:
            request = make_request(rng.integers(300, 1000, prompt).tolist(), **sampling)
            fields = convert.sampling_fields(request, engine.info, vocab_tokens=1024)
            params = versions.make_sampling_params(engine._api, fields)
            text = engine._api.tokens_input(request.token_ids.tolist())
            collector = await versions.submit(engine._engine, request.request_id, text, params)
            return len((await collector.get()).outputs[0].token_ids)

        from vllm.v1.metrics.loggers import StatLoggerManager

        manager = engine._engine.logger_manager
        by_default = StatLoggerManager(engine._engine.vllm_config).stat_loggers
        loggers = {
            THEIRS: [*manager.stat_loggers, *by_default],
            OURS: manager.stat_loggers,
            ALONE: manager.stat_loggers,
        }
        asks = {THEIRS: asking(theirs), OURS: asking(ours), ALONE: alone}
        for ask in asks.values():
            await ask()
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in asks}
        for _ in range(rounds):
            for name, ask in asks.items():
                manager.stat_loggers = loggers[name]
                taken[name].append(await measure(ask, at_once))
    cpu = {name: statistics.median(c for c, _ in values) for name, values in taken.items()}
    print(
        f"{prompt} tokens in, {output} out, logprobs on, unary; median of {rounds} rounds, vLLM {engine.info.engine_version}"
    )
    for name, values in taken.items():
        wall = statistics.median(w for _, w in values)
        spread = f"{min(c for c, _ in values):.1f}..{max(c for c, _ in values):.1f}"
        print(f"  {name:14} {cpu[name]:7.1f} ms CPU per request ({spread}), {wall:.0f} ms wall")
    print(f"  ratio {cpu[OURS] / cpu[THEIRS]:.2f}")
    await worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--output", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    uvloop.run(run(args.prompt, args.output, args.at_once, args.rounds))


if __name__ == "__main__":
    main()
