"""What a reload of an adapter costs the requests that run: a new generation beside the old one, against draining first.

    python bench/adapter_swap.py --engine mock|embedded|vllm [--reloads 50] [--clients 8] [--lengths 64 256 1024]

Clients ask without pause for streams under one adapter name, each begun at another moment; meanwhile the name is loaded
again and again with other files, through the worker that serves. Measured while that goes on: the time between a
request's tokens, the longest wait of a client for the first token of its next request, and how long a reload takes,
which is where draining shows. The yardstick comes from the same engine and the same clients: one load with nothing else
running, plus one decode step (the median time between tokens with no load going on; their 99th percentile, which has
the prompts of the next requests in it, is in "p99 without"). The bar is a 99th percentile of 1.5 times that, with no slope
over the outputs' lengths.

Prompts are computed `--chunk` tokens at a time: an engine that computes a whole prompt between two decode steps makes its
neighbours wait for that, reload or not, and on a CPU the few prompts of this load would be all that the 99th percentile shows.

vLLM needs the Python of `scripts/make_vllm_env.sh`. All times are by the wall clock, so the machine should have no other
work; of the mock and the embedded engine `--cpu` takes this process's processor time between tokens instead.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models import tiny

from rollplane.protocol.events import ChoiceEvent
from rollplane.server.ops import prepare_process
from rollplane.testing import make_request
from rollplane.worker import Worker

NAME = "step"
BAR = 1.5
PROMPT = list(range(300, 332))
MODEL = {"layers": 6, "hidden_size": 512, "intermediate_size": 1024}
"""Large enough that a step is work, and not only the interpreter's own time."""
ISOLATED_LOADS = 20
clock = time.perf_counter


@dataclass
class Timeline:
    """When one client's tokens came: `at` by the chosen clock, `wall` by the wall clock, seconds; `starts`: indices of
    the first token of each request.
    """

    at: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def gaps(self, since: float, until: float) -> np.ndarray:
        """Between tokens of one request, of those that overlap the given time."""
        wall, gaps = np.array(self.wall), np.diff(np.array(self.at))
        keep = (wall[1:] >= since) & (wall[:-1] <= until)
        keep[[i - 1 for i in self.starts if i]] = False
        return gaps[keep]

    def waits(self, since: float) -> np.ndarray:
        """From the last token of one request to the first of the next."""
        wall = np.array(self.wall)
        return np.array([wall[i] - wall[i - 1] for i in self.starts if i and wall[i] >= since])


@dataclass
class Found:
    """Milliseconds."""

    p50: float
    p99: float
    longest: float
    wait: float
    reload: float
    generations: int


def make_engine(kind: str, model: Path, *, slots: int, clients: int, rank: int, chunk: int) -> Any:
    if kind == "mock":
        from rollplane.engines.mock.engine import MockEngine
        from rollplane.engines.mock.settings import MockSettings

        return MockEngine(MockSettings(step_s=0.008, max_adapters=slots, max_adapter_rank=rank))
    if kind == "embedded":
        from rollplane.engines.embedded.engine import EmbeddedEngine
        from rollplane.engines.embedded.settings import EmbeddedSettings

        settings = {"max_num_seqs": clients * 2, "max_loras": slots, "max_lora_rank": rank, "chunk_tokens": chunk}
        return EmbeddedEngine(EmbeddedSettings(model=str(model), threads=1, max_model_len=2048, **settings))
    from tests.vllm.support import make_engine as make_vllm

    slots_of_vllm = ["--max-loras", str(slots), "--max-cpu-loras", str(slots + 2), "--max-lora-rank", str(rank)]
    step = [
        "--enable-chunked-prefill",
        "--max-num-seqs",
        str(clients),
        "--max-num-batched-tokens",
        str(clients + chunk),
    ]
    return make_vllm(model, "--enable-lora", *slots_of_vllm, *step)


async def ask(worker: Worker, line: Timeline, *, tokens: int, model: str | None) -> None:
    request = make_request(PROMPT, stream=True, fields={"model": model}, max_tokens=tokens, ignore_eos=True)
    first = True
    async for event in worker.generate(request):
        if isinstance(event, ChoiceEvent) and event.token_ids.size:
            if first:
                line.starts.append(len(line.at))
                first = False
            line.at.append(clock())
            line.wall.append(time.perf_counter())


class Load:
    """Clients that ask without pause, the first request of each another part as long, so that they end apart."""

    def __init__(self, worker: Worker, *, clients: int, tokens: int, model: str | None = NAME) -> None:
        self.lines = [Timeline() for _ in range(clients)]
        self._stop = asyncio.Event()
        lengths = [max(tokens * (i + 1) // clients, 2) for i in range(clients)]
        self._tasks = [
            asyncio.create_task(self._loop(worker, line, first=first, tokens=tokens, model=model))
            for line, first in zip(self.lines, lengths, strict=True)
        ]

    async def _loop(self, worker: Worker, line: Timeline, *, first: int, tokens: int, model: str | None) -> None:
        await ask(worker, line, tokens=first, model=model)
        while not self._stop.is_set():
            await ask(worker, line, tokens=tokens, model=model)

    async def under_way(self) -> None:
        while not all(len(line.at) > 4 for line in self.lines):
            ended, _ = await asyncio.wait(self._tasks, timeout=0.005, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def found(self, since: float, until: float, took: list[float], generations: int) -> Found:
        within = np.concatenate([line.gaps(since, until) for line in self.lines]) * 1e3
        waits = np.concatenate([line.waits(since) for line in self.lines]) * 1e3
        return Found(
            p50=float(np.median(within)),
            p99=float(np.quantile(within, 0.99)),
            longest=float(within.max()),
            wait=float(waits.max()) if waits.size else 0.0,
            reload=float(np.median(took)) * 1e3 if took else 0.0,
            generations=generations,
        )


async def one_generation(worker: Worker) -> None:
    while len(await worker.adapters()) > 1:  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.005)


async def first_load(worker: Worker, adapter: str) -> tuple[float, float]:
    """Milliseconds of a process's first load while its base model serves, and the longest time between tokens then."""
    load = Load(worker, clients=4, tokens=256, model=None)
    await load.under_way()
    began = time.perf_counter()
    await worker.load_adapter(NAME, adapter)
    ended = time.perf_counter()
    await load.end()
    return (ended - began) * 1e3, load.found(began, ended, [], 1).longest


async def isolated_load(worker: Worker, adapters: list[str]) -> float:
    """Median milliseconds of a load with nothing else running."""
    loads = []
    for i in range(ISOLATED_LOADS):
        began = clock()
        await worker.load_adapter(NAME, adapters[(i + 1) % len(adapters)])
        loads.append(clock() - began)
        await one_generation(worker)
    return float(np.median(loads)) * 1e3


async def measure(
    worker: Worker, adapters: list[str], *, clients: int, tokens: int, reloads: int, pause_s: float
) -> Found:
    """What requests see while the name is loaded again `reloads` times, or for two seconds without a load."""
    load = Load(worker, clients=clients, tokens=tokens)
    await load.under_way()
    since, took, generations = time.perf_counter(), [], 1
    for i in range(reloads):
        began = time.perf_counter()
        await worker.load_adapter(NAME, adapters[i % len(adapters)])
        took.append(time.perf_counter() - began)
        generations = max(generations, len(await worker.adapters()))
        await asyncio.sleep(pause_s)
    if not reloads:
        await asyncio.sleep(2.0)
    until = time.perf_counter()
    await load.end()
    await one_generation(worker)
    return load.found(since, until, took, generations)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["mock", "embedded", "vllm"], default="embedded")
    parser.add_argument("--reloads", type=int, default=50)
    parser.add_argument("--drains", type=int, default=3, help="reloads that drain first, which take long")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=8, help="prompt tokens computed with or beside one decode step")
    parser.add_argument("--pause-s", type=float, default=0.05, help="between two reloads")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if options.cpu:
        global clock
        clock = time.process_time
    model = tiny.shared_model("qwen3", **MODEL)
    slots = options.clients + 2  # every client may hold a generation of its own, beside the current and the next one
    with tempfile.TemporaryDirectory() as root:
        made = (tiny.make_lora(Path(root) / str(i), base=model, seed=i, rank=options.rank) for i in range(3))
        adapters = [str(path) for path in made]
        engine = make_engine(
            options.engine, model, slots=slots, clients=options.clients, rank=options.rank, chunk=options.chunk
        )
        worker = Worker(engine)
        await worker.start()
        prepare_process()  # as a worker process does
        try:
            await report(worker, adapters, options)
        finally:
            await worker.close()


async def report(worker: Worker, adapters: list[str], options: argparse.Namespace) -> None:
    table = worker.adapter_table
    assert table is not None
    room = table.capability
    took, gap = await first_load(worker, adapters[0])
    print(
        f"{options.engine}: the first load of the process took {took:.0f} ms, longest time between tokens {gap:.0f} ms"
    )
    load = await isolated_load(worker, adapters)
    print(f"one isolated load: {load:.1f} ms; {options.reloads} reloads, {options.clients} clients; milliseconds\n")
    print(
        "| output | swap | step | p99 without | p50 | p99 | longest | p99 / (load + step) | wait | reload | generations |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    ratios, longest = [], []
    run = {"clients": options.clients, "pause_s": options.pause_s}
    for tokens in options.lengths:
        without = await measure(worker, adapters, **run, tokens=tokens, reloads=0)
        step = without.p50
        for title, slots in (("beside", room.max), ("drain first", 1)):
            table.capability = msgspec.structs.replace(room, max=slots)
            reloads = options.reloads if slots > 1 else options.drains
            found = await measure(worker, adapters, **run, tokens=tokens, reloads=reloads)
            ratio = found.p99 / (load + step)
            if slots > 1:
                ratios.append(ratio)
                longest.append(found.longest)
            print(
                f"| {tokens} | {title} | {step:.1f} | {without.p99:.1f} | {found.p50:.1f} | {found.p99:.1f} "
                f"| {found.longest:.1f} "
                f"| {ratio:.2f} | {found.wait:.0f} | {found.reload:.1f} | {found.generations} |",
                flush=True,
            )
        table.capability = room
    slope = float(np.polyfit(options.lengths, ratios, 1)[0]) * 1e3 if len(ratios) > 1 else 0.0
    met = "met" if max(ratios) <= BAR else "missed"
    print(f"\nbeside: worst ratio {max(ratios):.2f}, bar {BAR} {met}; slope {slope:+.2f} per 1,000 tokens of output")


if __name__ == "__main__":
    asyncio.run(main())
