"""Messages of the engine core reach requests: plain tokens of folded ones directly, all else through vLLM's own code."""

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from rollplane.engines.vllm import core_reader
from rollplane.engines.vllm.core_reader import CoreApi, CoreReader, Wire
from rollplane.engines.vllm.folded import FoldedRequest
from rollplane.testing import settle

DEAD = b"DEAD"


class Output(msgspec.Struct, array_like=True):
    """As much of vLLM's as tells plain tokens from others."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finish_reason: int | None = None
    events: list[Any] | None = None
    num_nans: int = 0


class Outputs(msgspec.Struct, array_like=True):
    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: dict[str, int] | None = None
    timestamp: float = 0.0
    utility_output: Any = None
    finished_requests: list[str] | None = None


class Decoder:
    def __init__(self, kind: Any) -> None:
        self.decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, frames: Any) -> Any:
        return self.decoder.decode(frames[0] if isinstance(frames, list) else frames)


class DeadError(Exception):
    pass


class Stats:
    """Counts steps; hands out one record."""

    def __init__(self) -> None:
        self.iteration = SimpleNamespace(num_generation_tokens=0, inter_token_latencies_iter=[])
        self.ended: list[Any] = []

    def begin(self) -> Any:
        return self.iteration

    def end(self, scheduler: Any, *, outputs: bool, engine_index: int) -> None:
        self.ended.append((scheduler, outputs))


class Processor:
    """vLLM's output processor, as far as it is asked."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.processed: list[Any] = []
        self.errors: list[Exception] = []
        self.stopped: list[str] = []

    def process_outputs(self, outputs: list[Any], timestamp: float, stats: Any) -> Any:
        self.processed += outputs
        return SimpleNamespace(reqs_to_abort=self.stopped)

    def update_scheduler_stats(self, stats: Any) -> None:
        pass

    def propagate_error(self, error: Exception) -> None:
        self.errors.append(error)


class Socket:
    """A ZMQ socket whose messages are there at once."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.messages: list[list[bytes]] = []
        self._rest: list[bytes] = []

    def get(self, option: int) -> int:
        if option == core_reader._EVENTS:
            return core_reader._POLLIN if self.messages else 0
        if option == core_reader._MORE:
            return bool(self._rest)
        return self.descriptor

    def recv(self, flags: int, *, copy: bool = True) -> bytes:
        if not self._rest:
            self._rest = list(self.messages.pop(0))
        return self._rest.pop(0)


class Rig:
    def __init__(self, descriptor: int) -> None:
        self.processor = Processor()
        self.aborted: list[str] = []
        self.answers: list[Any] = []
        self.ends = 0

        async def abort(request_ids: list[str]) -> None:
            self.aborted += request_ids

        core = SimpleNamespace(
            resources=SimpleNamespace(engine_dead=False), utility_results={5: "a call"}, abort_requests_async=abort
        )
        self.engine = SimpleNamespace(
            output_processor=self.processor, engine_core=core, renderer=SimpleNamespace(mm_processor_cache=None)
        )
        api = CoreApi(
            Output=Output,
            Outputs=Outputs,
            SchedulerStats=dict[str, int],
            IterationStats=None,
            Decoder=Decoder,
            DeadError=DeadError,
            dead_message=DEAD,
            finish_utility=lambda answer, waiting: self.answers.append(answer),
        )
        self.stats = Stats()
        self.socket = Socket(descriptor)
        self.reader = CoreReader(self.engine, self.socket, api, stats=self.stats, on_end=self.end)  # type: ignore[arg-type]

    def end(self) -> None:
        self.ends += 1

    def add(self, name: str, *, folded: bool = True, prefilling: bool = False) -> list[int]:
        """A request; the ids that it has got."""
        ids: list[int] = []
        kept = FoldedRequest(0, take_ids=ids.extend) if folded else "vLLM's"
        self.processor.request_states[name] = SimpleNamespace(
            logprobs_processor=kept,
            is_prefilling=prefilling,
            stats=SimpleNamespace(num_generation_tokens=1, last_token_ts=1.0),
        )
        return ids

    def take(self, *outputs: Output, **fields: Any) -> None:
        self.reader.take([msgspec.msgpack.encode(Outputs(outputs=list(outputs), timestamp=3.0, **fields))])


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    near, far = socket.socketpair()
    with near, far:
        yield Rig(near.fileno())


def logprobs(value: float) -> Any:
    given = (np.array([[5]], np.int32), np.array([[value]], np.float32), np.array([1], np.int64))
    wire: list[Any] = [[a.dtype.str, list(a.shape), msgspec.msgpack.Ext(3, a.tobytes())] for a in given]
    return [*wire, None]


async def test_a_plain_token_of_a_folded_request_is_taken_here(rig: Rig) -> None:
    ids = rig.add("a")

    rig.take(Output("a", [7], logprobs(-1.5)), scheduler_stats={"running": 1})
    rig.take(Output("a", [8, 9], logprobs(-2.5)))

    assert ids == [7, 8, 9]
    state = rig.processor.request_states["a"]
    assert state.logprobs_processor.logprobs.logprobs.tolist() == [-1.5, -2.5]
    assert rig.processor.processed == []
    assert rig.stats.iteration.num_generation_tokens == 3
    assert rig.stats.iteration.inter_token_latencies_iter == [2.0, 0.0]
    assert (state.stats.num_generation_tokens, state.stats.last_token_ts) == (4, 3.0)
    assert rig.stats.ended == [({"running": 1}, True), (None, True)]


@pytest.mark.parametrize("says", [{"finish_reason": 0}, {"events": [[1, 2.0]]}, {"num_nans": 1}])
async def test_whatever_says_more_goes_vllms_way_and_its_neighbours_do_not(rig: Rig, says: dict[str, Any]) -> None:
    first, second = rig.add("a"), rig.add("b")

    rig.take(Output("a", [7], None, **says), Output("b", [8]))

    assert rig.processor.processed == [Output("a", [7], None, **says)]
    assert (first, second) == ([], [8])


async def test_first_tokens_and_other_requests_go_vllms_way(rig: Rig) -> None:
    rig.add("first", prefilling=True)
    rig.add("stream", folded=False)

    rig.take(Output("first", [1]), Output("stream", [2]), Output("aborted", [3]))

    assert [output.request_id for output in rig.processor.processed] == ["first", "stream"]


async def test_arrays_beside_a_message_go_vllms_way(rig: Rig) -> None:
    ids = rig.add("a")
    rig.socket.messages = [[msgspec.msgpack.encode(Outputs(outputs=[Output("a", [7])])), b"an array"]]

    rig.reader.start()
    await settle()
    await rig.reader.stop()

    assert ids == []
    assert len(rig.processor.processed) == 1


async def test_a_stop_string_ends_the_request_in_the_engine_core(rig: Rig) -> None:
    rig.add("a", folded=False)
    rig.processor.stopped = ["a"]

    rig.take(Output("a", [7]))
    await settle()

    assert rig.aborted == ["a"]


async def test_answers_to_calls_are_handed_on_once(rig: Rig) -> None:
    for call_id in (5, 6):  # nobody waits for 6
        answer = Outputs(utility_output={"call_id": call_id})
        rig.reader._wire.whole = SimpleNamespace(  # type: ignore[misc]
            decode=lambda _, c=call_id: SimpleNamespace(utility_output=SimpleNamespace(call_id=c))
        )
        rig.reader.take([msgspec.msgpack.encode(answer)])

    assert [answer.call_id for answer in rig.answers] == [5]
    assert rig.stats.ended == []


async def test_the_socket_is_drained_from_the_start_and_in_turns(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_reader, "BUDGET_S", 0.0)
    ids = rig.add("a")
    rig.socket.messages = [[msgspec.msgpack.encode(Outputs(outputs=[Output("a", [i])]))] for i in range(3)]

    rig.reader.start()
    await settle()

    assert ids == [0, 1, 2]
    await rig.reader.stop()
    assert rig.ends == 1
    assert isinstance(rig.processor.errors[0], DeadError)


async def test_a_core_that_says_it_dies_ends_the_reading(rig: Rig) -> None:
    rig.socket.messages = [[DEAD]]

    await asyncio.wait_for(rig.reader.start(), 5)

    assert rig.engine.engine_core.resources.engine_dead
    assert isinstance(rig.processor.errors[0], DeadError)
    assert rig.ends == 1


async def test_a_message_that_cannot_be_read_ends_all_requests_with_the_reason(rig: Rig) -> None:
    rig.socket.messages = [[b"\xc1"]]

    await asyncio.wait_for(rig.reader.start(), 5)

    assert isinstance(rig.processor.errors[0], msgspec.DecodeError)


async def test_messages_of_another_shape_are_refused_by_the_field(rig: Rig) -> None:
    class Other(msgspec.Struct, array_like=True):
        request_id: str
        new_logprobs: Any = None

    with pytest.raises(ValueError, match=r"Other\.new_token_ids"):
        Wire(SimpleNamespace(Output=Other, Outputs=Outputs))  # type: ignore[arg-type]
