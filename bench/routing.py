"""What placement is worth: mock workers with simulated prefill, decode and KV cache, under one policy after the other.

    python bench/routing.py [--seeds 3]

The router, the workers and the mock engines are the real ones, in one process, on a clock whose time is moved from event
to event: the seconds below are simulated. Worker state and KV events reach the router without a network in between.

groups: 64 prompts of 4,096 tokens, each its own, 16 samples of each as 16 requests, all arriving within 1 s.
unique: 1,024 prompts of 4,096 tokens without anything in common, arriving at 90 % of what the workers can prefill.
shared: 1,024 requests with one 4,096-token system prompt and 256 tokens of their own, within 1 s.

8 workers of 128 slots, 20,000 prompt tokens/s, 20 ms a step, blocks of 16; output lengths seeded in 64..1024. `first
token`: arrival to the end of the prompt's computation, where the first token is made. `load`: the largest share of
requests that a worker got, over the mean. `prefilled`: prompt tokens computed, over the distinct ones.
"""

import argparse
import asyncio
import statistics
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import numpy as np

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import RollplaneError
from rollplane.protocol.events import Event, PromptEvent
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.state import WorkerState
from rollplane.rl.fleet import Fleet
from rollplane.router.policies import LeastLoaded, Policy, RoundRobin
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.router import Router
from rollplane.testing.clock import FakeClock, settle
from rollplane.testing.requests import make_request
from rollplane.worker import Worker, WorkerSettings

WORKERS, SLOTS, BLOCK_TOKENS = 8, 128, 16
PREFILL_TOKENS_PER_S, STEP_S = 20_000.0, 0.02
PROMPT_TOKENS, SHORTEST, LONGEST = 4096, 64, 1024
TOLD_EVERY_S = 0.5


class SimulatedWorker:
    """A worker whose time is the simulation's; notes when each prompt was computed, and how many requests it got."""

    def __init__(self, url: str, clock: FakeClock, computed_at: dict[str, float]) -> None:
        self.url = url
        self.engine_clock = clock
        self.mock = MockEngine(
            MockSettings(
                max_model_len=8192,
                max_num_seqs=SLOTS,
                block_tokens=BLOCK_TOKENS,
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
                step_s=STEP_S,
            ),
            clock=clock,
        )
        self.worker = Worker(self.mock, settings=WorkerSettings(name=url))
        self.state: WorkerState | None = None
        self.reachable = True
        self.requests = 0
        self._computed_at = computed_at
        self._listeners: list[Callable[[], None]] = []
        inner = self.mock.generate

        async def noted(request: GenerateRequest) -> AsyncGenerator[Event, None]:
            self.requests += 1
            async for event in inner(request):
                if isinstance(event, PromptEvent):
                    computed_at[request.request_id] = clock()
                yield event

        self.mock.generate = noted  # type: ignore[method-assign]

    @property
    def engine(self) -> Worker:
        return self.worker

    def follow(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)
        if self.state is not None:
            listener()

    def drop_requests(self, reason: str) -> int:
        return 0

    async def refresh(self) -> WorkerState:
        self.state = await self.worker.snapshot()
        for listener in self._listeners:
            listener()
        return self.state

    async def claim_key(self, key: str, keeper: str, *, number: int, limit_s: float) -> tuple[str, int]:
        return self.worker.keys.claim(key, keeper, number=number)

    async def close(self) -> None:
        await self.worker.close()


@dataclass
class Load:
    """Requests by arrival, seconds from the start; and the distinct prompt tokens in them."""

    requests: list[tuple[float, GenerateRequest]]
    distinct_tokens: int


@dataclass
class Result:
    first_token_s: list[float] = field(default_factory=list)
    makespan_s: float = 0.0
    load: float = 0.0
    prefilled: float = 0.0
    observed: str = ""


def request_of(tokens: np.ndarray, rng: np.random.Generator, *, group: str | None = None) -> GenerateRequest:
    """One sample."""
    return make_request(
        tokens,
        options={"group_id": group} if group is not None else {},
        max_tokens=int(rng.integers(SHORTEST, LONGEST + 1)),
        ignore_eos=True,
        temperature=1.0,
        seed=int(rng.integers(2**31)),
    )


def prompt(rng: np.random.Generator, tokens: int = PROMPT_TOKENS) -> np.ndarray:
    """Random token ids."""
    return rng.integers(3, 32_000, tokens).astype(np.int32)


def groups(rng: np.random.Generator) -> Load:
    """See the module."""
    found = []
    for group in range(64):
        tokens = prompt(rng)
        found += [(float(rng.uniform()), request_of(tokens, rng, group=f"g{group}")) for _ in range(16)]
    return Load(found, 64 * PROMPT_TOKENS)


def groups_without_ids(rng: np.random.Generator) -> Load:
    """As `groups`, but nothing says which requests belong together."""
    load = groups(rng)
    for _, request in load.requests:
        request.options.group_id = None
    return load


def unique(rng: np.random.Generator) -> Load:
    """See the module."""
    rate = 0.9 * WORKERS * PREFILL_TOKENS_PER_S / PROMPT_TOKENS
    at = np.cumsum(rng.exponential(1 / rate, 1024))
    return Load([(float(t), request_of(prompt(rng), rng)) for t in at], 1024 * PROMPT_TOKENS)


def shared(rng: np.random.Generator) -> Load:
    """See the module."""
    system = prompt(rng)
    found = [(float(rng.uniform()), request_of(np.concatenate([system, prompt(rng, 256)]), rng)) for _ in range(1024)]
    return Load(found, PROMPT_TOKENS + 1024 * 256)


WORKLOADS = {"groups": groups, "groups without ids": groups_without_ids, "unique": unique, "shared": shared}
POLICIES: dict[str, Callable[[FakeClock], Policy]] = {
    "round_robin": lambda clock: RoundRobin(),
    "least_loaded": lambda clock: LeastLoaded(),
    "prefix_aware": lambda clock: PrefixAware(clock=clock),
}


async def simulate(load: Load, make: Callable[[FakeClock], Policy]) -> Result:
    """One run."""
    clock = FakeClock()
    computed_at: dict[str, float] = {}
    fleet = Fleet(epoch=1)
    workers = [SimulatedWorker(f"http://w{i}", clock, computed_at) for i in range(WORKERS)]
    for worker in workers:
        await worker.worker.start()
        await worker.refresh()
        fleet.add(worker)
    router = Router(fleet, policy=make(clock), clock=clock)
    await router.start()
    await settle()
    result = Result()
    began = clock()
    failed: list[BaseException] = []

    async def serve(request: GenerateRequest, arrived: float) -> None:
        try:
            async for _ in router.generate(request):
                pass
        except RollplaneError as error:
            failed.append(error)
            return
        result.first_token_s.append(computed_at[request.request_id] - arrived)
        result.makespan_s = max(result.makespan_s, clock() - began)

    async def tell() -> None:
        while True:
            await clock.sleep(TOLD_EVERY_S)
            for worker in workers:
                await worker.refresh()

    telling = asyncio.create_task(tell())
    tasks = []
    for at, request in sorted(load.requests, key=lambda one: one[0]):
        await clock.advance(began + at - clock())
        tasks.append(asyncio.create_task(serve(request, clock())))
        await settle()
    while not all(task.done() for task in tasks):
        await clock.advance(0.5)
    telling.cancel()
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    counts = [worker.requests for worker in workers]
    computed = sum(worker.mock._core.counters["prompt_tokens_computed"] for worker in workers)
    result.load = max(counts) / (sum(counts) / WORKERS)
    result.prefilled = computed / load.distinct_tokens
    result.observed = repr(router.observed)
    await router.close()
    return result


async def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append")
    parser.add_argument("--policy", choices=list(POLICIES), action="append")
    parser.add_argument("--observed", action="store_true")
    args = parser.parse_args()
    print(f"{WORKERS} workers, {args.seeds} seeds; means over the seeds, simulated seconds")
    print(f"{'workload':20}{'policy':14}{'first token':>12}{'p95':>8}{'makespan':>10}{'load':>7}{'prefilled':>11}")
    for name in args.workload or WORKLOADS:
        for policy in args.policy or POLICIES:
            results = [
                await simulate(WORKLOADS[name](np.random.default_rng(seed)), POLICIES[policy])
                for seed in range(args.seeds)
            ]
            first = statistics.mean(statistics.mean(r.first_token_s) for r in results)
            p95 = statistics.mean(sorted(r.first_token_s)[int(len(r.first_token_s) * 0.95)] for r in results)
            makespan = statistics.mean(r.makespan_s for r in results)
            load = max(r.load for r in results)
            prefilled = statistics.mean(r.prefilled for r in results)
            print(
                f"{name:20}{policy:14}{first:12.3f}{p95:8.2f}{makespan:10.2f}{load:7.2f}{prefilled:11.2f}", flush=True
            )
            if args.observed:
                print("  " + results[-1].observed)


if __name__ == "__main__":
    asyncio.run(main())
