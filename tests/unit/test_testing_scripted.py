import asyncio

import numpy as np
import pytest

from rollplane.engines.base import Engine
from rollplane.errors import EngineDied, Overloaded
from rollplane.protocol.events import EndEvent, PromptEvent
from rollplane.protocol.info import EngineHealth
from rollplane.testing import (
    ScriptedEngine,
    answer,
    collect,
    make_request,
    script_choice,
    script_error,
    script_of,
    scripted_info,
    watching,
)


async def test_without_a_script_every_request_gets_an_answer() -> None:
    engine = ScriptedEngine()
    assert isinstance(engine, Engine)

    got = await answer(engine, make_request(range(9)))

    assert got.choices[0].token_ids.tolist() == [7, 8, 9]
    assert got.usage.prompt_tokens == 9


async def test_scripts_are_played_in_order_and_the_last_one_again() -> None:
    engine = ScriptedEngine(script_error(Overloaded("busy")), script_of([1]))

    with pytest.raises(Overloaded):
        await answer(engine, make_request(request_id="a"))
    for _ in range(2):
        assert (await answer(engine, make_request())).choices[0].token_ids.tolist() == [1]
    assert engine.requests[0].request_id == "a"
    assert repr(engine) == "<ScriptedEngine 3 requests, 0 live>"
    assert engine.closed_early == []


async def test_a_script_waits_for_its_events() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([PromptEvent(prompt_tokens=3), gate, script_choice([4]), EndEvent()])
    async with watching(engine, make_request()) as (watch,):
        await watch.until(lambda: len(watch.events) == 1, "the prompt event")
        assert not watch.over
        gate.set()
        assert (await watch.answer()).choices[0].token_ids.tolist() == [4]


async def test_an_abort_ends_a_script_that_waits() -> None:
    engine = ScriptedEngine([script_choice([4], finish_reason=None), asyncio.Event()])
    async with watching(engine, make_request(request_id="a", n=1)) as (watch,):
        await watch.until_tokens(1)
        assert await engine.abort("a") == 1
        assert (await watch.answer()).choices[0].finish_reason == "abort"
    assert await engine.abort("a") == 0


async def test_a_reader_that_leaves_is_noted() -> None:
    engine = ScriptedEngine([asyncio.Event()])
    async with watching(engine, make_request(request_id="gone")) as (watch,):
        await asyncio.sleep(0)
        await watch.leave()

    assert engine.closed_early == ["gone"]


async def test_an_error_after_tokens_comes_after_them() -> None:
    engine = ScriptedEngine(script_error(EngineDied("gone"), after=[1, 2]))
    async with watching(engine, make_request(stream=True)) as (watch,):
        with pytest.raises(EngineDied):
            await watch.answer()
        assert watch.tokens == 2


async def test_side_channels_are_written_as_plain_lists() -> None:
    choice = script_choice(
        [4, 5],
        logprobs=[-0.5, -0.25],
        mask_rows=[[4, 9], [5]],
        routed_experts=np.ones((4, 1, 1), dtype=np.uint8),
        policy_versions=[("v1", 0)],
    )
    engine = ScriptedEngine([choice, EndEvent()], info=scripted_info(model="m"))

    (event, _) = await collect(engine, make_request(logprobs=0))

    assert event is choice
    assert choice.sampling_mask is not None
    assert choice.sampling_mask.rows() == [[4, 9], [5]]
    assert engine.info.model == "m"


async def test_health_is_what_the_test_says() -> None:
    engine = ScriptedEngine()
    await engine.start()
    assert (await engine.health()).state == "ready"
    engine.set_health(EngineHealth(alive=False, state="failed"))
    await engine.close()

    assert not (await engine.health()).alive
    assert (engine.started, engine.closed) == (True, True)
