"""What the sampled tokens' log-probabilities cost a server: 64 requests at once, 256 tokens each, with and without.

    python bench/logprobs.py [--requests 512] [--rounds 5]

The engine takes no time, so what is measured is the server alone: CPU milliseconds per request and process, and bytes
per answer. A model that makes 256 tokens takes seconds for it; the last column says what share of one core 64 such
requests per second would keep busy.
"""

import argparse
import asyncio
import statistics

import aiohttp
import msgspec
import numpy as np

from rollplane.protocol.artifacts import TokenLogprobs
from rollplane.protocol.events import EndEvent, Event
from rollplane.protocol.info import Capabilities
from rollplane.protocol.request import GenerateRequest
from rollplane.testing import ScriptedEngine, script_choice, scripted_info
from served import Hop, hops

CONCURRENCY, TOKENS = 64, 256
IDS = np.random.default_rng(0).integers(0, 32_000, TOKENS).astype(np.int32)
VALUES = -np.random.default_rng(1).exponential(1.0, TOKENS).astype(np.float32)
RANKS = np.ones(TOKENS, dtype=np.int32)


def script(request: GenerateRequest) -> list[Event]:
    """One whole answer, as an engine makes it."""
    choice = script_choice([1])
    choice.token_ids = IDS
    if request.sampling.get("logprobs") is not None:
        choice.logprobs = TokenLogprobs(values=VALUES, ranks=RANKS)
    return [choice, EndEvent()]


def make_engine() -> ScriptedEngine:
    """An engine whose every answer is there at once."""
    return ScriptedEngine(script, info=scripted_info(capabilities=Capabilities(sampling_fields=["ignore_eos"])))


async def load(url: str, body: bytes, accept: str, *, requests: int) -> int:
    """Send `requests`, `CONCURRENCY` at once; bytes of one answer."""
    sizes: list[int] = []
    headers = {"Content-Type": "application/json", "Accept": accept}

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in range(requests // CONCURRENCY):
            async with session.post(f"{url}/inference/v1/generate", data=body, headers=headers) as answer:
                sizes.append(len(await answer.read()))
                if answer.status != 200:
                    raise SystemExit(f"{url} answered {answer.status}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:
        await asyncio.gather(*(client(session) for _ in range(CONCURRENCY)))
    return sizes[0]


def measure(chain: list[Hop], *, requests: int, rounds: int) -> None:
    """Print a line per encoding, with and without logprobs; rounds alternate, so that noise falls on both."""
    for accept in ("application/json", "application/msgpack"):
        cost_ms: dict[str, dict[str, list[float]]] = {}
        size: dict[str, int] = {}
        for _ in range(rounds):
            for name, asked in (("without", {}), ("with", {"logprobs": 0})):
                body = msgspec.json.encode({"token_ids": [5, 6, 7], "sampling_params": {"ignore_eos": True, **asked}})
                for hop in chain:
                    hop.read()
                size[name] = asyncio.run(load(chain[-1].url, body, accept, requests=requests))
                for hop in chain:
                    cost_ms.setdefault(name, {}).setdefault(hop.name, []).append(hop.read().cpu_s / requests * 1e3)
        print(f"{accept}, {' < '.join(hop.name for hop in reversed(chain))}")
        for name, found in cost_ms.items():
            medians = {hop: statistics.median(values) for hop, values in found.items()}
            each = ", ".join(f"{hop} {value:.3f} ms" for hop, value in medians.items())
            core = sum(medians.values()) * CONCURRENCY / 10
            print(f"  {name:7s} logprobs: {size[name]:6d} bytes, CPU per request {each}; {core:.1f} % of a core")


def main() -> None:
    """Measure everything once."""
    parser = argparse.ArgumentParser(description="Cost of log-probabilities.")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for frontend in (False, True):
        with hops(make_engine, frontend=frontend) as chain:
            measure(chain, requests=args.requests, rounds=args.rounds)


if __name__ == "__main__":
    main()
