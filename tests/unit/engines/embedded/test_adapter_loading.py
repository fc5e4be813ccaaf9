"""An adapter that loads beside running requests takes the step thread in slices, and the first step that uses it nothing."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
from tests.models import tiny

from rollplane.engines.embedded import lora, step_thread
from rollplane.engines.embedded.core import Core
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.errors import EngineFailed, InvalidRequest
from rollplane.fold import Fold
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import make_request, plan_of

BOUND_S = 20.0


@pytest.fixture(scope="module")
def adapters(moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("adapters")
    return [str(tiny.make_lora(root / str(i), base=moe_dir, seed=i)) for i in range(3)]


def ask(adapter: str | None, *, tokens: int = 400, stream: bool = True) -> GenerateRequest:
    request = make_request(
        list(range(30, 42)), stream=stream, max_tokens=tokens, ignore_eos=True, seed=1, temperature=0
    )
    request.adapter = adapter
    return request


async def answer(engine: EmbeddedEngine, request: GenerateRequest) -> GenerateResponse:
    fold = Fold(plan_of(request, engine.info))
    async for event in engine.generate(request):
        fold.add(event)
    return fold.response()


class Running:
    """A request that makes tokens until the block ends."""

    def __init__(self, engine: EmbeddedEngine, adapter: str | None = None) -> None:
        self._engine, self._adapter = engine, adapter

    async def __aenter__(self) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in self._engine.generate(ask(self._adapter)):
                begun.set()

        self._task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), BOUND_S)

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


async def test_a_load_takes_one_slice_between_two_steps_where_that_is_all_there_is_time_for(
    engine: EmbeddedEngine, adapters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step: list[int] = []
    run_slice = step_thread.StepThread._run_slice

    def count(self: step_thread.StepThread, work: step_thread._Sliced, core: Core) -> None:
        at_step.append(core.steps)
        run_slice(self, work, core)

    monkeypatch.setattr(step_thread, "SLICES_S", 0.0)
    monkeypatch.setattr(step_thread.StepThread, "_run_slice", count)
    async with Running(engine):
        await asyncio.wait_for(engine.load_adapter("a@1", adapters[0]), BOUND_S)
        during = list(at_step)
    assert len(during) > 10
    assert len(set(during)) == len(during), "two slices between the same two steps"


async def test_a_step_that_computed_a_prompt_is_not_made_longer_yet_a_load_ends_under_any_stream_of_prompts(
    engine: EmbeddedEngine, adapters: list[str]
) -> None:
    core = engine._core
    assert core is not None
    after_prompts: list[bool] = []
    step = core.step

    def always_prefilling() -> list[object]:
        out = step()
        core.prefilled = True
        after_prompts.append(True)
        return out  # type: ignore[return-value]

    core.step = always_prefilling  # type: ignore[method-assign, assignment]
    async with Running(engine):
        await asyncio.wait_for(engine.load_adapter("a@1", adapters[0]), BOUND_S)
    assert len(after_prompts) > step_thread.PUT_OFF_STEPS
    assert await engine.loaded_adapters() == ["a@1"]


async def test_the_first_step_of_a_new_generation_beside_an_old_one_puts_nothing_together(
    engine: EmbeddedEngine, adapters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.load_adapter("a@2", adapters[1])
    alone = await answer(engine, ask("a@2", tokens=8, stream=False))
    await engine.unload_adapter("a@2")
    await engine.load_adapter("a@1", adapters[0])
    async with Running(engine, "a@1"):
        await engine.load_adapter("a@2", adapters[1])
        built: list[int] = []
        monkeypatch.setattr(lora, "_stack", lambda pairs: built.append(len(pairs)))
        beside = await asyncio.wait_for(answer(engine, ask("a@2", tokens=8, stream=False)), BOUND_S)
    assert not built
    np.testing.assert_array_equal(beside.choices[0].token_ids, alone.choices[0].token_ids)


async def test_a_load_that_was_called_off_leaves_nothing(
    engine: EmbeddedEngine, adapters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_thread, "SLICES_S", 0.0)
    async with Running(engine):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.load_adapter("a@1", adapters[0]), 0.001)
        await engine.unload_adapter("a@1")
        await asyncio.wait_for(engine.load_adapter("a@2", adapters[1]), BOUND_S)
        assert await engine.loaded_adapters() == ["a@2"]


async def test_what_goes_wrong_in_a_slice_is_the_callers_error_and_the_engine_goes_on(
    engine: EmbeddedEngine, adapters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Running(engine):
        broken = tiny.make_lora(tmp_path / "rank", base=engine.settings.model, rank=128)
        with pytest.raises(InvalidRequest, match="rank"):
            await engine.load_adapter("a@1", str(broken))
        with monkeypatch.context() as patch:
            patch.setattr(lora, "pairs_of", lambda *_, **__: 1 / 0)
            with pytest.raises(EngineFailed, match="ZeroDivisionError"):
                await engine.load_adapter("a@1", adapters[0])
        await engine.load_adapter("a@1", adapters[0])
    assert len((await answer(engine, ask("a@1", tokens=4, stream=False))).choices[0].token_ids) == 4
