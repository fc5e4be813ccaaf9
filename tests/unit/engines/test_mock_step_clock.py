import asyncio
import math
import time

from rollplane.engines.mock.step_clock import LoopClock, StepClock


def test_steps_pass_at_the_rate_of_the_batch() -> None:
    clock = StepClock(step_s=0.01, step_per_sequence_s=0.001)
    clock.run(0.0, sequences=10)
    clock.move_to(0.2)
    assert clock.whole == 10
    clock.run(0.2, sequences=90)
    clock.move_to(0.4)
    assert clock.whole == 12
    assert math.isclose(clock.seconds_until(14), 0.2)


def test_a_stopped_clock_stands_still() -> None:
    clock = StepClock(step_s=0.01, step_per_sequence_s=0.0)
    clock.run(0.0, sequences=1)
    clock.stop(0.055)
    clock.move_to(9.0)

    assert clock.whole == 5
    assert clock.seconds_until(6) == math.inf
    assert "stopped" in repr(clock)


def test_an_idle_clock_stops_at_the_end_of_a_step() -> None:
    clock = StepClock(step_s=0.01, step_per_sequence_s=0.0)
    clock.run(0.0, sequences=1)
    clock.run(0.055, sequences=0)

    assert clock.steps == 5.0


def test_instant_steps_are_ticked() -> None:
    clock = StepClock(step_s=0.0, step_per_sequence_s=0.0)
    clock.run(0.0, sequences=3)
    clock.move_to(100.0)
    clock.tick()

    assert clock.instant
    assert clock.whole == 1


async def test_time_for_which_the_loop_is_held_up_while_a_call_is_put_off_does_not_count() -> None:
    clock = LoopClock()
    called = asyncio.Event()
    began = clock()
    clock.call_later(0.3, called.set)
    await asyncio.sleep(0.01)
    time.sleep(0.6)  # noqa: ASYNC251 - a process that stands still
    assert clock() - began < 0.2
    await asyncio.sleep(0)
    assert not called.is_set()
    async with asyncio.timeout(10):
        await called.wait()
    assert clock() - began >= 0.3 - 1e-4


async def test_time_without_a_call_put_off_counts() -> None:
    clock = LoopClock()
    began = clock()
    clock.call_later(9.0, lambda: None).cancel()
    time.sleep(0.2)  # noqa: ASYNC251 - a process that stands still
    assert clock() - began >= 0.2
    assert "0 calls put off, 0 s lost" in repr(clock)


async def test_calls_put_off_are_made_once_in_their_order_unless_they_are_cancelled() -> None:
    clock = LoopClock()
    made: list[float] = []
    done = asyncio.Event()
    clock.call_later(0.05, done.set)
    for delay_s in (0.03, 0.0, 0.025):
        clock.call_later(delay_s, lambda delay_s=delay_s: made.append(delay_s))
    clock.call_later(0.01, lambda: made.append(9.0)).cancel()
    async with asyncio.timeout(10):
        await done.wait()
    assert made == [0.0, 0.025, 0.03]
    assert "0 calls put off" in repr(clock)
