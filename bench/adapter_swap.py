"""What a reload of an adapter costs the requests that run: a new generation beside the old one, against draining first.

    python bench/adapter_swap.py [--reloads 50] [--clients 8] [--lengths 64 256 1024]

Clients ask without pause for streams under one adapter name; meanwhile the name is loaded again and again with other
files, through the same worker that serves. Measured is the time between a request's tokens, the longest wait of a client
for the first token of its next request, and how long a reload takes, which is where draining shows. The yardstick is measured in the same run, for
the same lengths: one load with nothing else running, plus one decode step of as many sequences with no load going on
(its 99th percentile). Times between tokens are this process's processor time, which other load on a shared machine does not lengthen;
`--wall` takes the wall clock for them too.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models import tiny

from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.protocol.events import ChoiceEvent
from rollplane.testing import make_request
from rollplane.worker import Worker

NAME = "policy"
clock = time.process_time
PROMPT = list(range(10, 42))


@dataclass
class Timeline:
    """When one client's tokens came, seconds; `starts`: indices of the first token of each request."""

    at: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def gaps(self) -> np.ndarray:
        """Between tokens of one request."""
        gaps = np.diff(np.array(self.at))
        keep = np.ones(gaps.size, dtype=bool)
        keep[[i - 1 for i in self.starts if i]] = False
        return gaps[keep]

    def waits(self) -> np.ndarray:
        """By the wall clock, from the last token of one request to the first of the next."""
        wall = np.array(self.wall)
        return np.array([wall[i] - wall[i - 1] for i in self.starts if i])


async def ask(worker: Worker, line: Timeline, *, tokens: int, model: str | None = NAME) -> None:
    request = make_request(PROMPT, stream=True, fields={"model": model}, max_tokens=tokens, ignore_eos=True, seed=1)
    first = True
    async for event in worker.generate(request):
        if isinstance(event, ChoiceEvent) and event.token_ids.size:
            if first:
                line.starts.append(len(line.at))
                first = False
            line.at.append(clock())
            line.wall.append(time.perf_counter())


async def loop(worker: Worker, line: Timeline, stop: asyncio.Event, *, tokens: int) -> None:
    while not stop.is_set():
        await ask(worker, line, tokens=tokens)


async def start(model: Path, *, clients: int, slots: int) -> Worker:
    settings = EmbeddedSettings(
        model=str(model), threads=1, max_num_seqs=clients * 2, max_model_len=2048, max_loras=slots, max_lora_rank=64
    )
    worker = Worker(EmbeddedEngine(settings))
    await worker.start()
    return worker


async def isolated_load(model: Path, adapters: list[Path]) -> float:
    """Median milliseconds of a load with nothing else running."""
    worker = await start(model, clients=1, slots=4)
    loads = []
    for i in range(20):
        began = clock()
        await worker.load_adapter(NAME, str(adapters[i % len(adapters)]))
        loads.append(clock() - began)
    await worker.close()
    return float(np.median(loads)) * 1e3


async def measure(
    model: Path, adapters: list[Path], *, clients: int, slots: int, tokens: int, reloads: int
) -> dict[str, float]:
    """Milliseconds between tokens while the name is loaded again `reloads` times; without any for the yardstick."""
    worker = await start(model, clients=clients, slots=slots)
    await worker.load_adapter(NAME, str(adapters[-1]))
    lines = [Timeline() for _ in range(clients)]
    stop = asyncio.Event()
    tasks = [asyncio.create_task(loop(worker, line, stop, tokens=tokens)) for line in lines]
    await ask(worker, Timeline(), tokens=8)
    took = []
    for i in range(reloads):
        began = time.perf_counter()
        await worker.load_adapter(NAME, str(adapters[i % len(adapters)]))
        took.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    if not reloads:
        await ask(worker, Timeline(), tokens=256)
    stop.set()
    await asyncio.gather(*tasks)
    await worker.close()
    within = np.concatenate([line.gaps() for line in lines]) * 1e3
    waits = np.concatenate([line.waits() for line in lines]) * 1e3
    return {
        "p50": float(np.median(within)),
        "p99": float(np.quantile(within, 0.99)),
        "max": float(within.max()),
        "wait": float(waits.max()) if waits.size else 0.0,
        "reload": float(np.median(took)) * 1e3 if took else 0.0,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reloads", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args()
    if options.wall:
        global clock
        clock = time.perf_counter
    model = tiny.shared_model("qwen3")
    with tempfile.TemporaryDirectory() as root:
        adapters = [tiny.make_lora(Path(root) / str(i), base=model, seed=i, rank=options.rank) for i in range(3)]
        load = await isolated_load(model, adapters)
        print(f"one isolated load: {load:.1f} ms; {options.reloads} reloads, {options.clients} clients")
        for title, slots in (("beside the old generation", 4), ("drain first (one slot)", 1)):
            print(f"\n{title}: ms between tokens")
            print("length | step p99 | p50    p99   max | p99 / (load + step) | longest wait | reload (wall)")
            ratios = []
            for tokens in options.lengths:
                run = {"clients": options.clients, "slots": slots, "tokens": tokens}
                step = (await measure(model, adapters, **run, reloads=0))["p99"]
                reloads = options.reloads if slots > 1 else min(options.reloads, 5)
                found = await measure(model, adapters, **run, reloads=reloads)
                ratios.append(found["p99"] / (load + step))
                print(
                    f"{tokens:6d} | {step:8.1f} | {found['p50']:4.1f}  {found['p99']:5.1f} {found['max']:5.1f} | "
                    f"{ratios[-1]:19.2f} | {found['wait']:14.1f} | {found['reload']:.1f}",
                    flush=True,
                )
            fit = float(np.polyfit(options.lengths, ratios, 1)[0]) if len(ratios) > 1 else 0.0
            print(f"worst ratio {max(ratios):.2f}; slope {fit * 1e3:+.2f} per 1,000 tokens of output")


if __name__ == "__main__":
    asyncio.run(main())
