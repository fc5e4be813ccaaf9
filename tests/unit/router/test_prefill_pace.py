"""How much uncached prompt a worker gets at a time: cached siblings pass, long prompts wait, and nothing waits for ever."""

import asyncio

from rollplane.router.prefill_pace import STUCK_S, PaceSettings, PrefillPace
from rollplane.testing.clock import FakeClock

WINDOW = PaceSettings(window_tokens=64, small_tokens=16)
BLOCK = 16


def pace(clock: FakeClock | None = None) -> PrefillPace:
    return PrefillPace(WINDOW, clock=clock or FakeClock())


def report(paced: PrefillPace, *keys: int) -> None:
    paced.learned("w", lambda sent: [key for key in sent if key in keys], block_tokens=BLOCK)


def test_long_prompts_wait_while_a_worker_has_enough_and_go_in_order() -> None:
    paced = pace()
    first, second, third = (paced.ask("w", range(at, at + 4), block_tokens=BLOCK) for at in (0, 10, 20))
    assert [t.sent for t in (first, second, third)] == [True, False, False]
    report(paced, 0, 1, 2, 3)
    assert [t.sent for t in (first, second, third)] == [True, True, False]
    paced.done("w", second, block_tokens=BLOCK)  # failed, or went elsewhere
    assert third.sent


def test_what_is_cached_or_just_being_computed_passes_those_that_wait() -> None:
    paced = pace()
    paced.ask("w", range(4), block_tokens=BLOCK)
    waiting = paced.ask("w", range(10, 14), block_tokens=BLOCK)
    sibling = paced.ask("w", range(4), block_tokens=BLOCK)
    cached = paced.ask("w", (), block_tokens=BLOCK)
    assert [t.sent for t in (waiting, sibling, cached)] == [False, True, True]


def test_the_siblings_of_one_that_waits_go_with_it() -> None:
    paced = pace()
    paced.ask("w", range(4), block_tokens=BLOCK)
    first, sibling = (paced.ask("w", range(10, 14), block_tokens=BLOCK) for _ in range(2))
    assert not sibling.sent
    report(paced, 0, 1, 2, 3)
    assert first.sent
    assert sibling.sent


def test_workers_do_not_wait_for_each_other_and_nothing_is_kept_of_idle_ones() -> None:
    paced = pace()
    here = paced.ask("w", range(8), block_tokens=BLOCK)
    there = paced.ask("x", range(8), block_tokens=BLOCK)
    assert here.sent
    assert there.sent
    for worker, ticket in (("w", here), ("x", there)):
        paced.done(worker, ticket, block_tokens=BLOCK)
        paced.done(worker, ticket, block_tokens=BLOCK)
    assert paced._lines == {}


async def test_a_worker_that_reports_nothing_is_not_waited_for() -> None:
    clock = FakeClock()
    paced = pace(clock)
    paced.ask("w", range(4), block_tokens=BLOCK)
    waiting = paced.ask("w", range(10, 14), block_tokens=BLOCK)
    await clock.advance(STUCK_S)
    async with asyncio.timeout(STUCK_S + 20):
        await paced.wait("w", waiting, block_tokens=BLOCK)
    assert waiting.sent


async def test_an_abort_ends_the_wait() -> None:
    paced = pace()
    paced.ask("w", range(4), block_tokens=BLOCK)
    waiting = paced.ask("w", range(10, 14), block_tokens=BLOCK)
    task = asyncio.create_task(paced.wait("w", waiting, block_tokens=BLOCK))
    await asyncio.sleep(0)
    waiting.wake()
    async with asyncio.timeout(20):
        await task
    assert not waiting.sent
