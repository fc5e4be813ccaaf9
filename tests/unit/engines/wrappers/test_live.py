import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from rollplane.engines.wrappers.live import LiveRequests
from rollplane.errors import Conflict, EngineFailed, RollplaneError
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


async def collect(live: LiveRequests, wanted: GenerateRequest) -> list[Event]:
    return [event async for event in live.generate(wanted)]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_same_body_joins_the_running_request_and_hears_all_of_it() -> None:
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


async def test_another_body_under_a_live_id_is_a_conflict_and_changes_nothing() -> None:
    engine = Gated()
    live = LiveRequests(engine)
    first = asyncio.create_task(collect(live, request()))
    await settle()
    with pytest.raises(Conflict, match="'r' is live with another body"):
        await collect(live, request(digest="other"))
    engine.gate.set()
    assert len(await first) == 3


async def test_an_id_may_be_used_again_once_it_is_not_live() -> None:
    engine = Gated()
    engine.gate.set()
    live = LiveRequests(engine)
    await collect(live, request())
    await collect(live, request(digest="other"))
    assert engine.started == ["r", "r"]
    assert live.count == 0


async def test_the_work_stops_when_the_last_reader_leaves_and_not_before() -> None:
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


async def test_a_retry_after_the_first_caller_left_runs_anew() -> None:
    engine = Gated()
    live = LiveRequests(engine)
    first = asyncio.create_task(collect(live, request()))
    await settle()
    first.cancel()
    await settle()
    engine.gate.set()
    assert len(await collect(live, request())) == 3
    assert engine.started == ["r", "r"]


async def test_every_reader_gets_the_error() -> None:
    engine = Gated()
    engine.fault = EngineFailed("no")
    live = LiveRequests(engine)
    readers = [asyncio.create_task(collect(live, request())) for _ in range(2)]
    await settle()
    engine.gate.set()
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(result, EngineFailed) for result in results)
    assert live.count == 0
