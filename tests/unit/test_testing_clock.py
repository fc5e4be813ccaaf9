import asyncio

from rollplane.testing import FakeClock, settle


async def test_calls_are_made_in_order_each_at_its_own_time() -> None:
    clock, seen = FakeClock(100.0), []
    for delay_s in (3.0, 1.0, 2.0):
        clock.call_later(delay_s, lambda: seen.append(clock()))
    await clock.advance(2.5)

    assert seen == [101.0, 102.0]
    assert clock() == 102.5
    assert repr(clock) == "<FakeClock 102.5 s, 1 calls put off>"


async def test_a_cancelled_call_is_not_made() -> None:
    clock, seen = FakeClock(), []
    clock.call_later(1.0, lambda: seen.append("no")).cancel()
    await clock.advance(5.0)

    assert seen == []
    assert clock.pending == 0


async def test_a_call_made_on_the_way_may_put_off_another() -> None:
    clock, seen = FakeClock(0.0), []

    def again() -> None:
        seen.append(clock())
        clock.call_later(1.0, again)

    clock.call_later(1.0, again)
    await clock.advance(3.5)

    assert seen == [1.0, 2.0, 3.0]


async def test_sleepers_wake_when_their_time_has_passed() -> None:
    clock = FakeClock()
    task = asyncio.create_task(clock.sleep(10.0))
    await clock.advance(9.9)
    assert not task.done()
    await clock.advance(0.2)

    assert task.done()


async def test_a_cancelled_sleeper_leaves_nothing_behind() -> None:
    clock = FakeClock()
    task = asyncio.create_task(clock.sleep(10.0))
    await settle()
    task.cancel()
    await settle()

    assert clock.pending == 0
