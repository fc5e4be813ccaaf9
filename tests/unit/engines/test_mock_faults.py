"""Scripted faults: each does what its name says, and every broken answer is caught where answers are folded."""

import asyncio
from typing import Any, get_args

import pytest

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import BREACHES, Fault, FaultKind, MockSettings
from rollplane.errors import EngineDied, EngineFailed, EngineProtocolError, InvalidRequest
from rollplane.protocol.info import MoeShape
from rollplane.testing import FakeClock, answer, make_request, settle, watching

CAUGHT = {
    "routes_row_missing": "routed rows, must be",
    "routes_zero": "the capture did not run",
    "routes_repeat": "repeats an expert",
    "routes_missing": "asked for and are missing",
    "nan_logprob": "the sample is unusable",
    "logprob_missing": r"\d+ logprobs for \d+ tokens",
    "mask_lacks_sampled": "lacks the sampled id",
    "mask_row_empty": "is empty",
    "negative_token": "is negative",
    "wrong_index": "of a request for 1",
    "no_terminal": "without a terminal event",
    "two_terminals": "after its terminal one",
    "wrong_prompt_count": "the engine says",
    "no_end": "stopped before the end",
}


async def faulty(*faults: Fault, clock: FakeClock | None = None, **settings: Any) -> MockEngine:
    shape = MoeShape(layers=2, top_k=2, num_experts=16)
    engine = MockEngine(MockSettings(moe=shape, sampling_mask=True, faults=faults, **settings), clock=clock)
    await engine.start()
    return engine


def whole(**fields: Any) -> Any:
    return make_request(max_tokens=6, logprobs=1, top_k=4, ignore_eos=True, **fields)


def test_every_breach_has_its_catch() -> None:
    assert set(CAUGHT) == BREACHES
    assert set(get_args(FaultKind)) >= BREACHES


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", sorted(BREACHES))
async def test_a_broken_answer_is_caught_with_its_numbers(kind: Any, stream: bool) -> None:
    engine = await faulty(Fault(kind=kind, at=2))
    await answer(engine, whole(stream=stream))

    with pytest.raises(EngineProtocolError, match=CAUGHT[kind]):
        await answer(engine, whole(stream=stream))

    await answer(engine, whole(stream=stream))


async def test_the_kth_request_fails_and_the_others_do_not() -> None:
    engine = await faulty(Fault(kind="fail", at=2, times=2))
    outcomes = []
    for _ in range(4):
        try:
            outcomes.append((await answer(engine, whole())).choices[0].finish_reason)
        except EngineFailed:
            outcomes.append("failed")

    assert outcomes == ["length", "failed", "failed", "length"]


async def test_a_stream_fails_after_its_tokens() -> None:
    engine = await faulty(Fault(kind="fail", request_id="doomed", after_tokens=3))
    async with watching(engine, whole(stream=True, request_id="doomed"), whole(stream=True)) as (doomed, other):
        with pytest.raises(EngineFailed):
            await doomed.answer()
        assert doomed.tokens == 3
        await other.answer()


async def test_a_hung_request_hangs_alone_and_can_be_aborted() -> None:
    clock = FakeClock()
    engine = await faulty(Fault(kind="hang", after_tokens=2), clock=clock, step_s=1.0)
    async with watching(engine, whole(request_id="stuck")) as (stuck,):
        await clock.advance(5.0)
        assert (await engine.health()).last_progress_s == 4.0
        async with watching(engine, whole()) as (other,):
            await clock.advance(10.0)
            assert (await other.answer()).usage.completion_tokens == 6
        assert not stuck.over
        assert await engine.abort("stuck") == 1
        assert (await stuck.answer()).usage.completion_tokens == 2
    assert (await engine.health()).last_progress_s == 0.0


async def test_an_instant_request_that_hangs_keeps_its_tokens() -> None:
    engine = await faulty(Fault(kind="hang", after_tokens=3))
    async with watching(engine, whole(request_id="stuck")) as (stuck,):
        await settle()
        await engine.abort("stuck")
        assert (await stuck.answer()).usage.completion_tokens == 3


async def test_a_dying_engine_takes_every_request_along() -> None:
    clock = FakeClock()
    engine = await faulty(Fault(kind="die", request_id="killer", after_tokens=2), clock=clock, step_s=1.0)
    requests = [whole(stream=True), whole(), whole(stream=True, request_id="killer")]
    async with watching(engine, *requests) as watches:
        await clock.advance(3.0)
        for watch in watches:
            with pytest.raises(EngineDied, match="scripted to die on request killer"):
                await watch.answer()
    health = await engine.health()
    assert (health.alive, health.state, health.running) == (False, "failed", 0)
    with pytest.raises(EngineDied):
        await answer(engine, whole())
    with pytest.raises(EngineDied):
        await engine.pause("keep")


async def test_errors_that_are_not_ours_can_be_scripted() -> None:
    engine = await faulty(Fault(kind="foreign_error"))

    with pytest.raises(RuntimeError, match="scripted foreign error"):
        await answer(engine, whole())


async def test_control_calls_have_faults_of_their_own() -> None:
    engine = await faulty(
        Fault(kind="fail", operation="pause"),
        Fault(kind="refuse", operation="stage_weights"),
        Fault(kind="die", operation="resume", at=2),
    )
    with pytest.raises(EngineFailed, match="in pause"):
        await engine.pause("keep")
    with pytest.raises(InvalidRequest, match="refuse stage_weights"):
        await engine.stage_weights("/nowhere")
    await engine.pause("keep")
    await engine.resume()
    with pytest.raises(EngineDied):
        await engine.resume()
    assert engine.calls("pause") == 2
    assert not (await engine.health()).alive


async def test_kv_subscriptions_end_with_the_engine() -> None:
    engine = await faulty(Fault(kind="die"))
    batches = engine.kv_events()
    assert await anext(batches) == []
    with pytest.raises(EngineDied):
        await answer(engine, whole())

    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(batches), 5.0)
