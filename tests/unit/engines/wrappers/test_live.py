import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.engines.wrappers.live import KeepLimits, LiveRequests
from rollplane.errors import Conflict, EngineFailed, IdempotencyMismatch, PreconditionFailed, RollplaneError
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.sampling import SamplingParams


class Gated:
    """Yields one delta, waits for its gate, then ends; counts what runs."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.fault: RollplaneError | None = None

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(engine="gated", model="m", max_model_len=8, vocab_bound=8, max_num_seqs=8)

    async def start(self) -> None: ...

    async def close(self, *, grace_s: float = 0.0) -> None: ...

    async def abort(self, request_id: str) -> int:
        return 0

    async def health(self) -> EngineHealth:
        return EngineHealth(alive=True, state="ready")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        self.started.append(request.request_id)
        try:
            yield ChoiceEvent(index=0, token_ids=np.array([len(self.started)], dtype=np.int32))
            await self.gate.wait()
            if self.fault is not None:
                raise self.fault
            yield ChoiceEvent(index=0, token_ids=np.array([7], dtype=np.int32), finish_reason="stop")
            yield EndEvent()
        finally:
            self.stopped.append(request.request_id)


def request(request_id: str = "r", digest: str = "d") -> GenerateRequest:
    ids = np.array([1], dtype=np.int32)
    return GenerateRequest(request_id=request_id, token_ids=ids, sampling=SamplingParams(), body_digest=digest)


Collect = Callable[[LiveRequests, GenerateRequest], Coroutine[Any, Any, list[Event]]]


async def one_by_one(live: LiveRequests, wanted: GenerateRequest) -> list[Event]:
    return [event async for event in live.generate(wanted)]


@pytest.fixture(params=[one_by_one, LiveRequests.whole], ids=["generate", "whole"])
def collect(request: pytest.FixtureRequest) -> Collect:
    """Both ways to read a request that does not stream."""
    way: Collect = request.param
    return way


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_same_body_joins_the_running_request_and_hears_all_of_it(collect: Collect) -> None:
    engine = Gated()
    live = LiveRequests(engine)
    first = asyncio.create_task(collect(live, request()))
    await settle()
    second = asyncio.create_task(collect(live, request()))
    await settle()
    assert repr(live).startswith("<LiveRequests 1 live, 2 readers")
    engine.gate.set()
    a, b = await first, await second
    assert engine.started == ["r"]
    assert len(a) == len(b) == 3
    assert all(x is y for x, y in zip(a, b, strict=True))


async def test_another_body_under_a_live_id_is_a_conflict_and_changes_nothing(collect: Collect) -> None:
    engine = Gated()
    live = LiveRequests(engine)
    first = asyncio.create_task(collect(live, request()))
    await settle()
    with pytest.raises(Conflict, match="'r' is live with another body"):
        await collect(live, request(digest="other"))
    engine.gate.set()
    assert len(await first) == 3


async def test_an_id_may_be_used_again_once_it_is_not_live(collect: Collect) -> None:
    engine = Gated()
    engine.gate.set()
    live = LiveRequests(engine)
    await collect(live, request())
    await collect(live, request(digest="other"))
    assert engine.started == ["r", "r"]
    assert live.count == 0


async def test_the_work_stops_when_the_last_reader_leaves_and_not_before(collect: Collect) -> None:
    engine = Gated()
    live = LiveRequests(engine)
    readers = [asyncio.create_task(collect(live, request())) for _ in range(2)]
    await settle()
    readers[0].cancel()
    await settle()
    assert engine.stopped == []
    readers[1].cancel()
    await settle()
    assert engine.stopped == ["r"]
    assert live.count == 0


async def test_a_retry_after_the_first_caller_left_runs_anew(collect: Collect) -> None:
    engine = Gated()
    live = LiveRequests(engine)
    first = asyncio.create_task(collect(live, request()))
    await settle()
    first.cancel()
    await settle()
    engine.gate.set()
    assert len(await collect(live, request())) == 3
    assert engine.started == ["r", "r"]


async def test_every_reader_gets_the_error(collect: Collect) -> None:
    engine = Gated()
    engine.fault = EngineFailed("no")
    live = LiveRequests(engine)
    readers = [asyncio.create_task(collect(live, request())) for _ in range(2)]
    await settle()
    engine.gate.set()
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(result, EngineFailed) for result in results)
    assert live.count == 0


def keyed(key: str = "k", digest: str = "d", request_id: str = "r") -> GenerateRequest:
    wanted = request(request_id, digest)
    wanted.idempotency_key = key
    return wanted


async def test_a_key_gives_the_first_answer_again_after_it_ended(collect: Collect) -> None:
    engine = Gated()
    engine.gate.set()
    live = LiveRequests(engine, keep=KeepLimits())
    first = await collect(live, keyed())
    again = await collect(live, keyed(request_id="another id"))
    assert engine.started == ["r"]
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert live.kept_bytes > 0


async def test_a_request_that_is_only_to_join_begins_nothing(collect: Collect) -> None:
    engine = Gated()
    engine.gate.set()
    live = LiveRequests(engine, keep=KeepLimits())
    first = keyed()
    joining = msgspec.structs.replace(keyed(request_id="another id"), attach_only=True)
    with pytest.raises(PreconditionFailed):
        await collect(live, joining)
    assert engine.started == []
    answer = await collect(live, first)
    assert [type(event) for event in await collect(live, joining)] == [type(event) for event in answer]
    assert engine.started == ["r"]


async def test_a_request_with_a_key_runs_on_without_a_reader_and_a_retry_joins_it(collect: Collect) -> None:
    engine = Gated()
    live = LiveRequests(engine, keep=KeepLimits(linger_s=60.0))
    first = asyncio.create_task(collect(live, keyed()))
    await settle()
    first.cancel()
    await settle()
    assert engine.stopped == []
    retry = asyncio.create_task(collect(live, keyed()))
    await settle()
    engine.gate.set()
    assert len(await retry) == 3
    assert engine.started == ["r"]


async def test_a_request_with_a_key_is_stopped_once_nobody_came_back_for_it(collect: Collect) -> None:
    engine = Gated()
    live = LiveRequests(engine, keep=KeepLimits(linger_s=0.01))
    first = asyncio.create_task(collect(live, keyed()))
    await settle()
    first.cancel()
    async with asyncio.timeout(10):
        while not engine.stopped:  # noqa: ASYNC110 - the linger is time; the bound is above
            await asyncio.sleep(0.005)
    assert live.count == 0
    engine.gate.set()
    assert len(await collect(live, keyed())) == 3
    assert engine.started == ["r", "r"]


async def test_a_key_with_another_body_is_refused(collect: Collect) -> None:
    engine = Gated()
    engine.gate.set()
    live = LiveRequests(engine, keep=KeepLimits())
    await collect(live, keyed())
    with pytest.raises(IdempotencyMismatch, match="'k' was used with another body"):
        await collect(live, keyed(digest="other"))


async def test_a_failed_request_is_not_kept(collect: Collect) -> None:
    engine = Gated()
    engine.fault = EngineFailed("no")
    engine.gate.set()
    live = LiveRequests(engine, keep=KeepLimits())
    with pytest.raises(EngineFailed):
        await collect(live, keyed())
    engine.fault = None
    assert len(await collect(live, keyed())) == 3


async def test_kept_answers_are_bounded_in_bytes_the_oldest_go_first(collect: Collect) -> None:
    engine = Gated()
    engine.gate.set()
    live = LiveRequests(engine, keep=KeepLimits())
    await collect(live, keyed("a"))
    one = live.kept_bytes
    live = LiveRequests(engine, keep=KeepLimits(max_bytes=2 * one))
    for key in ("a", "b", "c"):
        await collect(live, keyed(key))
    assert live.kept_bytes == 2 * one
    runs = len(engine.started)
    await collect(live, keyed("c"))
    assert len(engine.started) == runs
    await collect(live, keyed("a"))
    assert len(engine.started) == runs + 1


async def test_kept_answers_are_bounded_in_time(collect: Collect) -> None:
    engine = Gated()
    engine.gate.set()
    now = [0.0]
    live = LiveRequests(engine, keep=KeepLimits(max_age_s=10.0), clock=lambda: now[0])
    await collect(live, keyed())
    now[0] = 9.0
    await collect(live, keyed())
    assert len(engine.started) == 1
    now[0] = 20.0
    await collect(live, keyed())
    assert len(engine.started) == 2


async def test_closing_stops_what_lingers_without_a_reader(collect: Collect) -> None:
    engine = Gated()
    live = LiveRequests(engine, keep=KeepLimits(linger_s=60.0))
    first = asyncio.create_task(collect(live, keyed()))
    await settle()
    first.cancel()
    await settle()
    await live.close()
    assert engine.stopped == ["r"]
