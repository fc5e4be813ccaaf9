import asyncio
from typing import Any

import pytest
from tests.unit.dynamo.test_envelope import message
from tests.waiting import until

from rollplane.config import ServerSettings
from rollplane.dynamo.endpoint import Endpoint
from rollplane.errors import EngineFailed, RollplaneError, Unavailable
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.testing.scripted import ScriptedEngine, script_choice, script_of


class FakeContext:
    """A request's context; `leave` is the caller's hang-up."""

    def __init__(self) -> None:
        self.left: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def id(self) -> str:
        return "r-1"

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return self.left

    def leave(self) -> None:
        self.left.set_result(True)


class Told(Exception):
    """What the frontend would be told."""


def endpoint(engine: ScriptedEngine, **changes: Any) -> Endpoint:
    service = Service(
        role="worker", engine=engine, settings=ServerSettings(), keys=KeyRing(), metrics=Metrics(), **changes
    )
    return Endpoint(service, partial="refuse", as_dynamo=lambda error: Told(error.message))


async def chunks_of(serving: Endpoint, sent: dict[str, Any], context: FakeContext | None = None) -> list[Any]:
    return [chunk async for chunk in serving.generate(sent, context or FakeContext())]


async def test_a_generate_is_one_terminal_chunk() -> None:
    engine = ScriptedEngine()
    (chunk,) = await chunks_of(endpoint(engine), message())

    assert (chunk["token_ids"], chunk["finish_reason"]) == ([7, 8, 9], "length")
    assert [request.request_id for request in engine.requests] == ["r-1"]


async def test_a_completion_is_deltas_and_its_last_chunk_has_the_usage() -> None:
    prompt, _, end = script_of([1], prompt_tokens=3)
    last_delta = script_choice([8, 9], finish_reason="stop", policy_versions=[("initial", 0)])
    engine = ScriptedEngine([prompt, script_choice([7], finish_reason=None), last_delta, end])
    sent = {"model": "roll", "token_ids": [1, 2, 3]}
    first, last = await chunks_of(endpoint(engine), sent)

    assert first == {"index": 0, "token_ids": [7]}
    assert (last["token_ids"], last["finish_reason"]) == ([8, 9], "stop")
    assert last["completion_usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("sent", [message(), {"token_ids": [1, 2, 3]}], ids=["generate", "completion"])
async def test_a_caller_who_leaves_ends_the_engines_work(sent: dict[str, Any]) -> None:
    never = asyncio.Event()
    engine = ScriptedEngine([never])
    context = FakeContext()
    answering = asyncio.create_task(chunks_of(endpoint(engine), sent, context))
    await until(lambda: engine.requests)
    context.leave()

    assert await asyncio.wait_for(answering, 5) == []
    assert engine.closed_early == ["r-1"]


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (EngineFailed("the engine refused"), "the engine refused"),
        (Unavailable("busy"), "busy"),
        (RuntimeError("secret"), "the server failed on this request; its log has the reason"),
    ],
)
async def test_errors_are_said_in_dynamos_words(step: Exception, says: str) -> None:
    with pytest.raises(Told, match=says) as caught:
        await chunks_of(endpoint(ScriptedEngine([step])), message())
    assert isinstance(caught.value.__cause__, (RollplaneError, RuntimeError))


async def test_a_malformed_message_never_reaches_the_engine() -> None:
    engine = ScriptedEngine()
    with pytest.raises(Told, match="token_ids"):
        await chunks_of(endpoint(engine), {"token_ids": "x", "extra_args": {"vllm_tito": {"a": 1}}})
    assert engine.requests == []


async def test_an_answer_that_breaks_the_contract_is_no_answer() -> None:
    short = script_of([7, 8], prompt_tokens=99)
    with pytest.raises(Told):
        await chunks_of(endpoint(ScriptedEngine(short)), message())


async def test_a_draining_worker_is_busy() -> None:
    serving = endpoint(ScriptedEngine())
    serving._service.lifecycle.draining = True
    with pytest.raises(Told, match="on its way out"):
        await chunks_of(serving, message())
