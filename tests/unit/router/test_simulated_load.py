"""Placement under load: the real router over real workers and mock engines, whose time is a simulation's."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from tests.unit.rl.local_workers import LocalWorker

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.response import GenerateResponse
from rollplane.rl.fleet import Fleet
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.router import Router
from rollplane.testing import answer, make_request
from rollplane.testing.clock import FakeClock, settle


def settings(*, slots: int = 128, slower: float = 1.0) -> MockSettings:
    return MockSettings(
        max_model_len=16_384,
        max_num_seqs=slots,
        block_tokens=16,
        prefill_tokens_per_s=20_000.0 / slower,
        step_s=0.02 * slower,
    )


class Simulation:
    """A router, its engines, and the clock of all of them."""

    def __init__(self, router: Router, engines: list[MockEngine], clock: FakeClock) -> None:
        self.router = router
        self.engines = engines
        self.clock = clock
        self.asked: list[asyncio.Task[GenerateResponse]] = []

    def ask(self, request: GenerateRequest) -> asyncio.Task[GenerateResponse]:
        self.asked.append(asyncio.create_task(answer(self.router, request)))
        return self.asked[-1]

    async def answers(self) -> list[GenerateResponse]:
        """Let time pass until all is answered; the first error is raised."""
        while not all(task.done() for task in self.asked):
            await self.clock.advance(0.5)
        return [task.result() for task in self.asked]

    @property
    def computed(self) -> int:
        """Prompt tokens that the engines have computed."""
        return sum(engine._core.counters["prompt_tokens_computed"] for engine in self.engines)


@asynccontextmanager
async def simulated(*workers: MockSettings) -> AsyncIterator[Simulation]:
    clock = FakeClock()
    fleet = Fleet(epoch=1)
    engines = [MockEngine(one, clock=clock) for one in workers]
    for i, engine in enumerate(engines):
        worker = LocalWorker(f"http://w{i}", engine=engine)
        await worker.start()
        fleet.add(worker)
    router = Router(fleet, policy=PrefixAware(clock=clock), clock=clock)
    await router.start()
    assert len(router.workers) == len(workers)  # their caches are followed from here on
    await settle(100)
    try:
        yield Simulation(router, engines, clock)
    finally:
        await router.close()


def prompt(seed: int, tokens: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(3, 30_000, tokens).astype(np.int32)


def asks(tokens: np.ndarray[Any, Any], *, seed: int = 0, max_tokens: int = 32, **options: Any) -> GenerateRequest:
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0, "seed": seed}
    return make_request(tokens, options=options, **sampling)


async def test_a_burst_of_one_long_prompt_is_computed_about_once() -> None:
    """16 requests for the same 8k tokens within 5 ms, over 4 workers: before any of them told that it has a block."""
    async with simulated(*[settings()] * 4) as simulation:
        for i in range(16):
            simulation.ask(asks(prompt(0, 8192), seed=i))
            await simulation.clock.advance(0.005 / 16)
        answers = await simulation.answers()

        assert len({one.served_by.instance for one in answers}) == 1
        assert 8192 <= simulation.computed < 1.05 * 8192


async def test_sessions_that_share_a_long_system_prompt_are_spread() -> None:
    async with simulated(*[settings()] * 4) as simulation:
        system = prompt(0, 4096)
        for i in range(256):
            simulation.ask(asks(np.concatenate([system, prompt(i + 1, 64)]), seed=i, session_id=f"s{i}"))
        answers = await simulation.answers()

        load = Counter(one.served_by.instance for one in answers)
        assert len(load) == 4
        assert max(load.values()) / (256 / 4) < 1.5
        assert simulation.computed < 2 * (4 * 4096 + 256 * 80)


async def test_sessions_leave_a_worker_that_is_five_times_slower() -> None:
    """A closed loop: each session asks again when it was answered, its conversation as the prompt."""
    async with simulated(*[settings()] * 3, settings(slower=5.0)) as simulation:
        turns: list[Counter[str]] = [Counter() for _ in range(8)]

        async def converse(session: int) -> None:
            tokens = prompt(session, 64)
            for turn in range(len(turns)):
                found = await simulation.ask(asks(tokens, seed=turn, max_tokens=64, session_id=f"s{session}"))
                turns[turn][found.served_by.instance] += 1
                tokens = np.concatenate([tokens, found.choices[0].token_ids, prompt(session + turn, 16)])

        talking = [asyncio.create_task(converse(session)) for session in range(32)]
        while not all(task.done() for task in talking):
            await simulation.clock.advance(0.5)
        await asyncio.gather(*talking)

        slow = simulation.router.workers[3].member.worker.state
        assert slow is not None
        assert turns[0][slow.instance] == 8  # nobody knew
        assert all(turn[slow.instance] <= 2 for turn in turns[-3:])
        quick = [count for name, count in turns[-1].items() if name != slow.instance]
        assert max(quick) / (sum(quick) / 3) < 1.5


async def test_twice_the_load_for_a_minute_is_answered_in_full_and_without_a_refusal() -> None:
    """8 slots make 6.25 answers of 64 tokens a second, and 12.5 are asked for."""
    async with simulated(*[settings(slots=4)] * 2) as simulation:
        for i in range(750):
            simulation.ask(asks(prompt(i, 32), seed=i, max_tokens=64))
            await simulation.clock.advance(60 / 750)
        assert not all(task.done() for task in simulation.asked)
        answers = await simulation.answers()

        assert len(answers) == 750
        assert {one.choices[0].token_ids.size for one in answers} == {64}
        assert {one.served_by.attempt for one in answers} == {1}
