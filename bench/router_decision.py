"""What one placement costs: an 8k-token prompt over 64 workers, prefix index included.

    python bench/router_decision.py [--workers 64] [--prompt 8192] [--rounds 400]

Every round routes another prompt through the whole decision: which workers may have it, block keys, the walk through the
index, the ranking, and the prediction that is counted at once. Three cases: nobody has any of it; every worker has the
first half (a system prompt); every worker has all of it (the longest walk). Prints the median and the 90th percentile in
microseconds, the same for the constraints alone and for the decision in CPU time, which other work on the machine moves
less, and the index's memory per reported block.
"""

import argparse
import asyncio
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.identity import block_keys, engine_salt
from rollplane.protocol.kv_events import BlocksStored
from rollplane.protocol.state import WorkerState
from rollplane.rl.fleet import Fleet
from rollplane.router.constraints import Lineup, circuits, fitting
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.prefix_index import PrefixIndex
from rollplane.router.worker import RoutedWorker
from rollplane.testing.requests import make_request
from rollplane.worker import Worker, WorkerSettings

BLOCK_TOKENS = 16


class Told:
    """A worker of which only its state is needed."""

    def __init__(self, url: str, state: WorkerState) -> None:
        self.url, self.state, self.reachable = url, state, True
        self.engine = None

    def follow(self, listener: Any) -> None:
        listener()

    async def close(self) -> None:
        return


async def routed_workers(count: int, *, max_model_len: int) -> tuple[Fleet, list[RoutedWorker]]:
    """So many workers, current and idle."""
    worker = Worker(
        MockEngine(MockSettings(block_tokens=BLOCK_TOKENS, max_model_len=max_model_len)),
        settings=WorkerSettings(name="w"),
    )
    await worker.start()
    fleet = Fleet(epoch=1)
    for i in range(count):
        fleet.add(Told(f"http://10.0.0.{i}:8000", await worker.snapshot()))
    for _ in range(50):
        await asyncio.sleep(0)
    if not all(member.routable for member in fleet.members):
        raise SystemExit(f"the workers are not current: {fleet.members}")
    return fleet, [RoutedWorker(member) for member in fleet.members]


def stored(tokens: np.ndarray, version: str) -> BlocksStored:
    """The event of a whole prompt."""
    salt = engine_salt(None, scope=version)
    whole = tokens[: tokens.size - tokens.size % BLOCK_TOKENS]
    keys = block_keys(whole, block_tokens=BLOCK_TOKENS, salt=salt)
    return BlocksStored(hashes=keys, parent=None, token_ids=whole, block_tokens=BLOCK_TOKENS, salt=salt)


def microseconds(samples: list[float]) -> str:
    """Median and 90th percentile."""
    ordered = sorted(samples)
    return f"{statistics.median(ordered) * 1e6:6.0f} {ordered[int(len(ordered) * 0.9)] * 1e6:6.0f}"


async def measure(case: str, args: argparse.Namespace) -> None:
    """One line."""
    rng = np.random.default_rng(0)
    fleet, workers = await routed_workers(args.workers, max_model_len=args.prompt + 1024)
    policy = PrefixAware()
    version = workers[0].version or ""
    shared = rng.integers(0, 32_000, args.prompt).astype(np.int32)
    for worker in workers:
        policy._look(worker)
        part = {"nothing cached": 0, "half cached by all": args.prompt // 2, "all cached by all": args.prompt}[case]
        if part and policy.index is not None:
            policy.index.apply_events(worker.url, [stored(shared[:part], version)])
    lineup = Lineup(workers)  # a router keeps it until something is told
    whole, alone, cpu = [], [], []
    for _ in range(args.rounds):
        tokens = shared.copy()
        if case == "nothing cached":
            tokens[0] = rng.integers(0, 32_000)
            tokens[1:8] = rng.integers(0, 32_000, 7)
        elif case == "half cached by all":
            tokens[args.prompt // 2 :] = rng.integers(0, 32_000, args.prompt - args.prompt // 2)
        request = make_request(tokens, max_tokens=16)
        cpu_began, began = time.thread_time(), time.perf_counter()
        fit = fitting(request, lineup, fleet)
        candidates = fit.workers if lineup.steady else circuits(fit.workers)
        constrained = time.perf_counter()
        worker = policy.choose(request, candidates)
        worker.place(sequences=1, tokens=request.prompt_tokens)
        policy.placed(request, worker)
        ended, cpu_ended = time.perf_counter(), time.thread_time()
        worker.release(sequences=1, tokens=request.prompt_tokens)
        whole.append(ended - began)
        cpu.append(cpu_ended - cpu_began)
        alone.append(constrained - began)
    print(f"{case:20} {microseconds(whole)}     {microseconds(alone)}         {microseconds(cpu)}", flush=True)
    await fleet.close()


def memory() -> None:
    """Bytes per reported block."""
    rng = np.random.default_rng(1)
    index = PrefixIndex(block_tokens=BLOCK_TOKENS)
    prompts = [rng.integers(0, 32_000, 4096).astype(np.int32) for _ in range(200)]
    events = [stored(tokens, "v") for tokens in prompts]
    index.observe("w", instance="i", generation=0)
    tracemalloc.start()
    index.apply_events("w", events)
    bytes_, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"\n{bytes_ / index.sizes.blocks:.0f} bytes per reported block of one worker (its own hashes not counted)")


async def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=400)
    args = parser.parse_args()
    print(f"{args.prompt} tokens, {args.workers} workers, {args.rounds} rounds; microseconds")
    print(f"{'':20} decision (p50 p90)  of it constraints  decision, CPU time")
    for case in ("nothing cached", "half cached by all", "all cached by all"):
        await measure(case, args)
    memory()


if __name__ == "__main__":
    asyncio.run(main())
