"""The queue in front of a fleet: limits, shares, order, and nothing lost however a wait ends."""

import asyncio
import time

import pytest

from rollplane.errors import DeadlineExceeded, Overloaded
from rollplane.protocol.request import GenerateRequest
from rollplane.router.fair_queue import FairQueue, QueueSettings, Waiter
from rollplane.router.queue_counts import BUCKETS_S, MAX_LABELS, QueueCounts, Who
from rollplane.testing.clock import settle
from rollplane.testing.requests import make_request


def asked(traffic: str = "train", *, caller: str | None = None, n: int = 1, priority: int = 0) -> GenerateRequest:
    request = make_request([5], options={"traffic_class": traffic}, n=n)
    request.caller, request.priority = caller, priority
    return request


class Line:
    """Requests that ask for room, in the order in which they get it."""

    def __init__(self, settings: QueueSettings) -> None:
        self.queue = FairQueue(settings)
        self.let_in: list[tuple[str, Waiter]] = []
        self.ended: list[str] = []

    async def ask(self, name: str, request: GenerateRequest) -> "asyncio.Task[None]":
        async def enter() -> None:
            waiter = await self.queue.enter(request, ends=None, woken=asyncio.Event())
            assert waiter is not None
            self.let_in.append((name, waiter))

        task = asyncio.create_task(enter())
        await settle()
        return task

    async def end_one(self) -> None:
        self.queue.leave(self.let_in[len(self.ended)][1])
        self.ended.append(self.let_in[len(self.ended)][0])
        await settle()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.let_in]


async def test_without_limits_nothing_waits() -> None:
    line = Line(QueueSettings())
    for i in range(50):
        await line.ask(str(i), asked(caller="one"))
    assert len(line.names) == 50
    assert line.queue.running == 50


async def test_what_is_over_the_limit_waits_for_an_end() -> None:
    line = Line(QueueSettings(max_running=2))
    for name in "abcd":
        await line.ask(name, asked())
    assert line.names == ["a", "b"]
    assert line.queue.waiting == {"train": 2}
    await line.end_one()
    await line.end_one()
    assert line.names == ["a", "b", "c", "d"]


async def test_classes_get_their_shares_while_both_wait() -> None:
    line = Line(QueueSettings(max_running=1, shares={"train": 3.0, "eval": 1.0}))
    await line.ask("first", asked())
    for i in range(12):
        await line.ask(f"train{i}", asked("train"))
    for i in range(12):
        await line.ask(f"eval{i}", asked("eval"))
    for _ in range(9):
        await line.end_one()
    served = line.names[1:9]
    assert sum(name.startswith("train") for name in served) == 6
    assert sum(name.startswith("eval") for name in served) == 2


async def test_a_class_that_was_idle_has_no_claim_on_the_past() -> None:
    line = Line(QueueSettings(max_running=1))
    for i in range(8):
        await line.ask(f"train{i}", asked("train"))
    for _ in range(4):
        await line.end_one()
    for i in range(4):
        await line.ask(f"eval{i}", asked("eval"))
    for _ in range(4):
        await line.end_one()
    assert sorted(name[:4] for name in line.names[5:9]) == ["eval", "eval", "trai", "trai"]


async def test_in_a_class_the_lower_priority_goes_first_then_who_came_first() -> None:
    line = Line(QueueSettings(max_running=1))
    await line.ask("first", asked())
    for name, priority in (("late", 5), ("soon", -1), ("later", 5)):
        await line.ask(name, asked(priority=priority))
    for _ in range(3):
        await line.end_one()
    assert line.names == ["first", "soon", "late", "later"]


async def test_a_caller_at_its_own_limit_is_passed_over() -> None:
    line = Line(QueueSettings(max_running=3, max_running_per_key=1))
    for name, caller in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        await line.ask(name, asked(caller=caller))
    assert line.names == ["a1", "b1"]
    line.queue.leave(line.let_in[0][1])
    await settle()
    assert line.names == ["a1", "b1", "a2"]


async def test_a_large_request_is_not_overtaken_for_ever_and_one_larger_than_the_limit_runs_alone() -> None:
    line = Line(QueueSettings(max_running=4))
    await line.ask("small", asked(n=2))
    await line.ask("large", asked(n=8))
    await line.ask("next", asked(n=1))
    assert line.names == ["small"]
    await line.end_one()
    assert line.names == ["small", "large"]
    await line.end_one()
    assert line.names == ["small", "large", "next"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (QueueSettings(max_running=1, max_waiting=1), "1 requests wait already, the limit is 1"),
        (QueueSettings(max_running=1, max_waiting_per_key=1), "1 requests of this key wait already, the limit is 1"),
    ],
)
async def test_more_than_may_wait_is_refused_with_when_to_come_back(settings: QueueSettings, says: str) -> None:
    line = Line(settings)
    await line.ask("a", asked(caller="one"))
    waiting = await line.ask("b", asked(caller="one"))
    with pytest.raises(Overloaded, match=says) as refused:
        await line.queue.enter(asked(caller="one"), ends=None, woken=asyncio.Event())
    assert refused.value.status == 429
    assert refused.value.retry_after_s is not None
    assert line.queue.refused == 1
    waiting.cancel()


async def test_a_wait_that_ends_otherwise_leaves_nothing_behind() -> None:
    line = Line(QueueSettings(max_running=1))
    await line.ask("a", asked())
    hung_up = await line.ask("b", asked())
    hung_up.cancel()
    await settle()
    with pytest.raises(DeadlineExceeded):
        await line.queue.enter(asked(), ends=time.monotonic(), woken=asyncio.Event())
    aborted = asyncio.Event()
    aborted.set()
    assert await line.queue.enter(asked(), ends=None, woken=aborted) is None
    assert line.queue.waiting == {}
    line.queue.leave(line.let_in[0][1])
    assert repr(line.queue) == "<FairQueue 0 running, {} waiting, 0 refused>"


async def test_a_request_let_in_while_it_is_cancelled_gives_its_room_back() -> None:
    line = Line(QueueSettings(max_running=1))
    await line.ask("a", asked())
    second = await line.ask("b", asked())
    line.queue.leave(line.let_in[0][1])  # "b" is let in now, and does not know yet
    second.cancel()
    await settle()
    assert line.queue.running == 0


async def test_the_report_says_who_waits_how_long_and_who_was_turned_away() -> None:
    now = 0.0
    line = Line(QueueSettings(max_running=1, max_waiting=2, max_waiting_per_key=1))
    line.queue = FairQueue(line.queue.settings, clock=lambda: now)
    await line.ask("first", asked())
    await line.ask("eval", asked("eval", caller="0123456789abcdef"))
    with pytest.raises(Overloaded, match="of this key"):
        await line.queue.enter(asked("eval", caller="0123456789abcdef"), ends=None, woken=asyncio.Event())
    await line.ask("train", asked(caller="fedcba9876543210"))
    with pytest.raises(Overloaded, match="2 requests wait"):
        await line.queue.enter(asked(), ends=None, woken=asyncio.Event())
    evaluation, training = who("eval", "01234567"), who("train", "fedcba98")
    report = line.queue.report("policy")
    assert (report.fleet, report.running) == ("policy", 1)
    assert report.limits == {"max_running": 1, "max_waiting": 2, "max_waiting_per_key": 1}
    assert report.waiting == {evaluation: 1, training: 1}
    assert report.turned_away == {(evaluation, "key_full"): 1, (who("train", ""), "full"): 1}
    now = 2.0
    await line.end_one()
    await line.end_one()
    waited = line.queue.report("policy").waited
    assert (waited["train"].sum_s, sum(waited["train"].counts)) == (2.0, 2)
    assert (waited["eval"].sum_s, sum(waited["eval"].counts)) == (2.0, 1)
    assert waited["eval"].counts[BUCKETS_S.index(5.0)] == 1
    assert line.queue.refused == 2


def who(traffic: str, caller: str) -> Who:
    return Who(traffic=traffic, model="", caller=caller)


async def test_a_deadline_that_passes_in_the_queue_is_counted_and_no_refusal() -> None:
    line = Line(QueueSettings(max_running=1))
    await line.ask("first", asked())
    with pytest.raises(DeadlineExceeded):
        await line.queue.enter(asked(), ends=time.monotonic(), woken=asyncio.Event())
    assert line.queue.report("f").turned_away == {(who("train", ""), "deadline"): 1}
    assert line.queue.refused == 0


def test_what_is_told_apart_is_bounded_whatever_callers_send() -> None:
    counts = QueueCounts()
    for i in range(MAX_LABELS + 10):
        counts.turn_away(Who(traffic="train", model=f"m{i}", caller=""), "full")
    assert len(counts.turned_away) == MAX_LABELS + 1
    assert counts.turned_away[Who(traffic="other", model="other", caller="other"), "full"] == 10
    assert counts.refused == MAX_LABELS + 10


async def test_what_waits_for_something_else_than_room_counts_under_the_same_limits() -> None:
    queue = FairQueue(QueueSettings(max_waiting=1, max_waiting_per_key=1))
    with queue.outside(asked(caller="a").head):
        assert queue.waiting == {"train": 1}
        with pytest.raises(Overloaded), queue.outside(asked("eval", caller="b").head):
            pass
        # Room there is: nobody who can go is held up by those outside.
        assert await queue.enter(asked(), ends=None, woken=asyncio.Event()) is not None
    assert queue.waiting == {}
