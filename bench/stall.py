"""What big answers do to small neighbours: 30,000 tokens with logprobs and the routes of 48 layers, beside one-token requests.

    python bench/stall.py [--rounds 9]

Rounds come in pairs, small requests alone and beside a big one after the other. Per server process: the longest stall of
the event loop while big answers were made. Per pair: by how much the 99th percentile of the small requests rose. Medians.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from typing import Any

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
SMALL, SMALL_PAUSE_S = 100, 0.002


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


async def ask(session: aiohttp.ClientSession, url: str, text: bytes, accept: str) -> None:
    """One request whose answer is only received."""
    headers = {"Content-Type": "application/json", "Accept": accept}
    async with session.post(f"{url}/inference/v1/generate", data=text, headers=headers) as answered:
        async for _ in answered.content.iter_any():
            pass
        if answered.status != 200:
            raise SystemExit(f"{url} answered {answered.status}")


async def small_p99_s(session: aiohttp.ClientSession, url: str, accept: str) -> float:
    """The 99th percentile of small requests, one after the other."""
    times_s: list[float] = []
    for _ in range(SMALL):
        began_s = time.perf_counter()
        await ask(session, url, body(3, big=False), accept)
        times_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(SMALL_PAUSE_S)
    return sorted(times_s)[int(0.99 * len(times_s))]


class Bigs:
    """A process that asks for one big answer after the other while it is told to: reading them stalls its own loop, not ours."""

    def __init__(self, url: str, accept: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._on, self._ended = context.Event(), context.Event()
        self._asked = context.Value("l", 0)
        args = (url, accept, self._on, self._ended, self._asked)
        self._process = context.Process(target=run_bigs, args=args, daemon=True)
        self._process.start()

    @property
    def asked(self) -> int:
        """Big answers so far."""
        return int(self._asked.value)

    def start(self) -> None:
        """Begin; returns when the first answer is whole, so that they are under way."""
        before = self.asked
        self._on.set()
        while self.asked == before:
            if not self._process.is_alive():
                raise SystemExit("the process that asks for big answers ended")
            time.sleep(0.01)

    def stop(self) -> None:
        """No further one; the last one ends within a moment."""
        self._on.clear()
        time.sleep(0.3)

    def close(self) -> None:
        """End the process."""
        self._ended.set()
        self._on.set()
        self._process.join(10)


def run_bigs(url: str, accept: str, on: Any, ended: Any, asked: Any) -> None:
    """The process of `Bigs`."""

    async def work() -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                on.wait()
                if ended.is_set():
                    return
                await ask(session, url, body(PROMPT_TOKENS, big=True), accept)
                asked.value += 1

    asyncio.run(work())


async def measure(chain: list[Hop], accept: str, *, rounds: int) -> None:
    """Print a line per hop and one for the small requests."""
    readings: dict[str, list[Reading]] = {hop.name: [] for hop in chain}
    alone_s: list[float] = []
    beside_s: list[float] = []
    bigs = Bigs(chain[-1].url, accept)
    asked = 0
    async with aiohttp.ClientSession() as session:
        await asyncio.to_thread(bigs.start)
        await small_p99_s(session, chain[-1].url, accept)
        for _ in range(rounds):
            await asyncio.to_thread(bigs.stop)
            alone_s.append(await small_p99_s(session, chain[-1].url, accept))
            for hop in chain:
                await asyncio.to_thread(hop.read)
            before = bigs.asked
            await asyncio.to_thread(bigs.start)
            beside_s.append(await small_p99_s(session, chain[-1].url, accept))
            asked += bigs.asked - before
            for hop in chain:
                readings[hop.name].append(await asyncio.to_thread(hop.read))
    bigs.close()
    rise_s = statistics.median(b - a for a, b in zip(alone_s, beside_s, strict=True))
    print(
        f"{accept}: p99 of small requests {statistics.median(alone_s) * 1e3:.1f} ms alone, "
        f"{statistics.median(beside_s) * 1e3:.1f} ms beside {asked} big ones; median rise {rise_s * 1e3:.1f} ms"
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
