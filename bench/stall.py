"""What big answers do to small neighbours: 30,000 tokens with logprobs and the routes of 48 layers, beside one-token requests.

    python bench/stall.py [--rounds 9]

Rounds come in pairs, small requests alone and beside a big one after the other. Per server process: the longest stall of
the event loop while big answers were made. Per pair: by how much the 99th percentile of the small requests rose. Medians.
"""

import argparse
import asyncio
import statistics
import time

import aiohttp
import msgspec

from big_routes import EXPERTS, LAYERS, TOP_K, make_routes
from codec import answer
from rollplane.protocol.events import EndEvent, Event, PromptEvent
from rollplane.protocol.info import Capabilities, MoeShape
from rollplane.protocol.request import GenerateRequest
from rollplane.testing import ScriptedEngine, script_choice, scripted_info
from served import Hop, Reading, hops

OUT_TOKENS = 30_000
PROMPT_TOKENS = 1
SMALL, BIG_AT_ONCE, SMALL_PAUSE_S = 100, 1, 0.002


def make_engine() -> ScriptedEngine:
    """A prompt of one token is answered by the big sample, any other by one token."""
    big = answer(OUT_TOKENS, top=1, routes=False, mask=False)
    routed = script_choice([1] * OUT_TOKENS, routed_experts=make_routes()[: PROMPT_TOKENS + OUT_TOKENS - 1])
    big.routed_experts = routed.routed_experts
    small = script_choice([1])

    def script(request: GenerateRequest) -> list[Event]:
        if request.prompt_tokens == PROMPT_TOKENS:
            return [PromptEvent(prompt_tokens=PROMPT_TOKENS), msgspec.structs.replace(big), EndEvent()]
        return [PromptEvent(prompt_tokens=request.prompt_tokens), msgspec.structs.replace(small), EndEvent()]

    info = scripted_info(
        max_model_len=40_000,
        vocab_bound=200_000,
        moe=MoeShape(layers=LAYERS, top_k=TOP_K, num_experts=EXPERTS),
        capabilities=Capabilities(routed_experts=True),
    )
    return ScriptedEngine(script, info=info)


def body(prompt: int, *, big: bool) -> bytes:
    """A request; small ones want no side channels."""
    sampling = {"logprobs": 1} if big else {}
    return msgspec.json.encode(
        {"token_ids": [5] * prompt, "sampling_params": sampling, "rollplane": {"routed_experts": big}}
    )


async def small_p99_s(session: aiohttp.ClientSession, url: str, accept: str, *, beside_big: bool) -> float:
    """The 99th percentile of small requests, one after the other, with a big one in flight or none."""
    headers = {"Content-Type": "application/json", "Accept": accept}
    done = False

    async def ask(text: bytes) -> None:
        async with session.post(f"{url}/inference/v1/generate", data=text, headers=headers) as answered:
            async for _ in answered.content.iter_any():
                pass
            if answered.status != 200:
                raise SystemExit(f"{url} answered {answered.status}")

    async def bigs() -> None:
        while not done:
            await ask(body(PROMPT_TOKENS, big=True))

    times_s: list[float] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(BIG_AT_ONCE if beside_big else 0):
            group.create_task(bigs())
        for _ in range(SMALL):
            began_s = time.perf_counter()
            await ask(body(3, big=False))
            times_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(SMALL_PAUSE_S)
        done = True
    return sorted(times_s)[int(0.99 * len(times_s))]


async def measure(chain: list[Hop], accept: str, *, rounds: int) -> None:
    """Print a line per hop and one for the small requests."""
    readings: dict[str, list[Reading]] = {hop.name: [] for hop in chain}
    alone_s: list[float] = []
    beside_s: list[float] = []
    async with aiohttp.ClientSession() as session:
        await small_p99_s(session, chain[-1].url, accept, beside_big=True)
        for _ in range(rounds):
            alone_s.append(await small_p99_s(session, chain[-1].url, accept, beside_big=False))
            for hop in chain:
                await asyncio.to_thread(hop.read)
            beside_s.append(await small_p99_s(session, chain[-1].url, accept, beside_big=True))
            for hop in chain:
                readings[hop.name].append(await asyncio.to_thread(hop.read))
    rise_s = statistics.median(b - a for a, b in zip(alone_s, beside_s, strict=True))
    print(
        f"{accept}: p99 of small requests {statistics.median(alone_s) * 1e3:.1f} ms alone, "
        f"{statistics.median(beside_s) * 1e3:.1f} ms beside big ones; median rise {rise_s * 1e3:.1f} ms"
    )
    for name, found in readings.items():
        stalls_s = [reading.stall_s for reading in found]
        print(f"  {name:9s} loop stalled {statistics.median(stalls_s) * 1e3:5.1f} ms (worst {max(stalls_s) * 1e3:.1f})")


def main() -> None:
    """Measure both encodings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with hops(make_engine, frontend=True) as chain:
        for accept in ("application/json", "application/msgpack"):
            asyncio.run(measure(chain, accept, rounds=args.rounds))


if __name__ == "__main__":
    main()
