import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models import tiny

from rollplane.engines.base import AdapterHost, Engine, WeightReceiver
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.errors import (
    Conflict,
    ContextOverflow,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    NotFound,
)
from rollplane.fold import Fold
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, PromptEvent
from rollplane.protocol.request import GenerateRequest, RequestOptions
from rollplane.protocol.response import GenerateResponse
from rollplane.protocol.sampling import parse_sampling
from rollplane.testing import plan_of

Ask = Callable[..., GenerateRequest]
BOUND_S = 20.0


@pytest.fixture
def ask() -> Ask:
    def make(request_id: str = "r", prompt: int = 12, *, stream: bool = False, **sampling: Any) -> GenerateRequest:
        options = sampling.pop("options", None) or RequestOptions(sampling_mask=True)
        adapter = sampling.pop("adapter", None)
        ids = np.random.default_rng(prompt).integers(7, tiny.VOCABULARY, prompt).astype(np.int32)
        params = {"max_tokens": 8, "seed": 1, "ignore_eos": True, "logprobs": 1, **sampling}
        return GenerateRequest(
            request_id=request_id,
            token_ids=ids,
            sampling=parse_sampling({k: v for k, v in params.items() if v is not ...}),
            stream=stream,
            options=options,
            adapter=adapter,
        )

    return make


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_moe(tmp_path_factory.mktemp("other"), layers=2, experts=8, seed=1)


async def events_of(engine: EmbeddedEngine, request: GenerateRequest) -> list[Event]:
    async with asyncio.timeout(BOUND_S):
        return [event async for event in engine.generate(request)]


def fold(events: list[Event], request: GenerateRequest, engine: EmbeddedEngine) -> GenerateResponse:
    """The answer as the server checks it."""
    folding = Fold(plan_of(request, engine.info))
    for event in events:
        folding.add(event)
    return folding.response(created=0)


async def answer(engine: EmbeddedEngine, request: GenerateRequest) -> GenerateResponse:
    return fold(await events_of(engine, request), request, engine)


async def started(engine: EmbeddedEngine, request: GenerateRequest, tokens: int = 3) -> "asyncio.Task[list[Event]]":
    """A streamed request that has made some tokens and goes on."""
    reached = asyncio.Event()

    async def read() -> list[Event]:
        seen: list[Event] = []
        async for event in engine.generate(request):
            seen.append(event)
            if sum(e.token_ids.size for e in seen if isinstance(e, ChoiceEvent)) >= tokens:
                reached.set()
        return seen

    task = asyncio.create_task(read())
    async with asyncio.timeout(BOUND_S):
        await reached.wait()
    return task


async def test_it_answers_to_all_three_protocols(engine: EmbeddedEngine) -> None:
    assert isinstance(engine, Engine)
    assert isinstance(engine, WeightReceiver)
    assert isinstance(engine, AdapterHost)


def test_the_first_version_is_the_directorys_name(moe_dir: Path) -> None:
    assert EmbeddedEngine(EmbeddedSettings(model=str(moe_dir))).policy_version == moe_dir.name


async def test_its_facts_are_those_of_the_model(engine: EmbeddedEngine) -> None:
    info = engine.info
    assert (info.engine, info.vocab_bound, info.max_model_len) == ("embedded", tiny.VOCABULARY, 4096)
    assert info.moe is not None
    assert (info.moe.layers, info.moe.top_k, info.moe.num_experts) == (2, 2, 8)
    assert info.capabilities.routed_experts
    assert info.capabilities.stop_strings
    health = await engine.health()
    assert (health.alive, health.state, health.running, health.last_progress_s) == (True, "ready", 0, 0.0)


async def test_a_unary_request_costs_one_terminal_event_per_choice(engine: EmbeddedEngine, ask: Ask) -> None:
    request = ask(n=3, prompt_logprobs=1)
    events = await events_of(engine, request)
    assert [type(e) for e in events] == [PromptEvent, ChoiceEvent, ChoiceEvent, ChoiceEvent, EndEvent]
    response = fold(events, request, engine)
    assert len({tuple(c.token_ids) for c in response.choices}) == 3
    assert response.usage.cached_tokens == 0
    assert response.served_by.logprobs_mode == "sampling"
    assert all(c.policy_versions == [("v0", 0)] for c in response.choices)


async def test_a_stream_folds_to_the_unary_answer(engine: EmbeddedEngine, ask: Ask) -> None:
    unary = await answer(engine, ask(top_p=0.9, n=2))
    request = ask(top_p=0.9, n=2, stream=True)
    events = await events_of(engine, request)
    assert sum(isinstance(e, ChoiceEvent) for e in events) > 4
    streamed = fold(events, request, engine)
    for a, b in zip(unary.choices, streamed.choices, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert np.allclose(a.logprobs.values, b.logprobs.values, atol=1e-5)  # type: ignore[union-attr]
        assert np.array_equal(a.routed_experts.array, b.routed_experts.array)  # type: ignore[union-attr]
        assert np.array_equal(a.sampling_mask.ids, b.sampling_mask.ids)  # type: ignore[union-attr]


async def test_what_prime_rl_sends_by_default_works(engine: EmbeddedEngine, ask: Ask) -> None:
    request = ask(top_k=-1, min_p=0.0, return_token_ids=True, stop_token_ids=[2], skip_special_tokens=False)
    assert (await answer(engine, request)).choices[0].token_ids.size == 8


async def test_omitted_max_tokens_runs_to_the_end_of_the_context(moe_dir: Path, ask: Ask) -> None:
    made = EmbeddedEngine(EmbeddedSettings(model=str(moe_dir), max_model_len=40, threads=1))
    await made.start()
    try:
        for max_tokens in (..., 100):
            choice = (await answer(made, ask(max_tokens=max_tokens))).choices[0]
            assert (choice.token_ids.size, choice.finish_reason) == (28, "length")
        assert (await answer(made, ask(max_tokens=16))).choices[0].token_ids.size == 16
        with pytest.raises(ContextOverflow, match="maximum context length"):
            await events_of(made, ask(prompt=40))
    finally:
        await made.close()


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temperature": 1e-7}, "temperature"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"logprobs": ..., "logprob_token_ids": [5]}, "needs logprobs"),
        ({"logprobs": 2, "logprob_token_ids": [5]}, "must be 0"),
        ({"logprobs": 65}, "limit is 64"),
        ({"stop_token_ids": [tiny.VOCABULARY]}, "outside the vocabulary"),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 2}, "min_tokens holds back"),
        ({"n": 33}, "at most 32"),
        ({"routed_experts_prompt_start": 12}, "below the prompt length"),
    ],
)
async def test_what_cannot_be_served_exactly_is_refused(
    sampling: dict[str, Any], says: str, engine: EmbeddedEngine, ask: Ask
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await events_of(engine, ask(**sampling))
    assert (await answer(engine, ask())).choices[0].finish_reason == "length"


async def test_routes_and_masks_are_left_out_when_not_wanted(engine: EmbeddedEngine, ask: Ask) -> None:
    request = ask(options=RequestOptions(routed_experts=False, sampling_mask=False))
    choice = (await answer(engine, request)).choices[0]
    assert choice.routed_experts is None
    assert choice.sampling_mask is None


async def test_a_greedy_answer_says_so(engine: EmbeddedEngine, ask: Ask) -> None:
    response = await answer(engine, ask(temperature=0))
    assert response.served_by.logprobs_mode == response.served_by.sampling_mask_mode == "greedy"
    assert response.choices[0].sampling_mask.ids.tolist() == response.choices[0].token_ids.tolist()  # type: ignore[union-attr]


async def test_floored_alternatives_are_counted(engine: EmbeddedEngine, ask: Ask) -> None:
    response = await answer(engine, ask(allowed_token_ids=[7], logprobs=5, max_tokens=3))
    assert response.served_by.floored_logprobs == 12


async def test_an_abort_returns_all_tokens_so_far(engine: EmbeddedEngine, ask: Ask) -> None:
    request = ask(max_tokens=4000, stream=True)
    task = await started(engine, request)
    assert await engine.abort("r") == 1
    response = fold(await task, request, engine)
    choice = response.choices[0]
    assert choice.finish_reason == "abort"
    assert 3 <= choice.token_ids.size < 4000
    assert await engine.abort("r") == 0


async def test_an_abort_of_a_held_request_is_a_whole_answer_without_tokens(engine: EmbeddedEngine, ask: Ask) -> None:
    await engine.pause("keep")
    request = ask(options=RequestOptions(routed_experts=True))
    task = asyncio.create_task(events_of(engine, request))
    await until(engine, waiting=1)
    assert await engine.abort("r") == 1
    choice = fold(await task, request, engine).choices[0]
    assert (choice.finish_reason, choice.token_ids.size) == ("abort", 0)
    assert choice.routed_experts.array.shape == (0, 2, 2)  # type: ignore[union-attr]


async def test_a_cancelled_reader_stops_the_work_within_one_step(engine: EmbeddedEngine, ask: Ask) -> None:
    task = await started(engine, ask(max_tokens=4000, stream=True))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    steps = (await engine.health()).counters["steps"]
    await until(engine, running=0)
    assert (await engine.health()).counters["steps"] <= steps + 2


async def test_a_closed_iterator_stops_the_work(engine: EmbeddedEngine, ask: Ask) -> None:
    events = engine.generate(ask(max_tokens=4000, stream=True))
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    await until(engine, running=0)


async def test_an_update_under_keep_gives_exact_spans(engine: EmbeddedEngine, ask: Ask, other_dir: Path) -> None:
    request = ask(max_tokens=400, stream=True)
    task = await started(engine, request)
    report = await engine.pause("keep")
    assert (report.kept, report.already_paused, report.cleared) == (1, False, None)
    assert (await engine.health()).state == "paused"
    staged = await engine.stage_weights(str(other_dir))
    await engine.apply_weights(staged, version="v1")
    assert engine.policy_version == "v1"
    assert (await engine.resume()).was_paused
    choice = fold(await task, request, engine).choices[0]
    [first, (version, at)] = choice.policy_versions
    assert first == ("v0", 0)
    assert version == "v1"
    assert at is not None
    assert 3 <= at < 400


async def test_recomputed_rows_are_reported(engine: EmbeddedEngine, ask: Ask, other_dir: Path) -> None:
    request = ask(max_tokens=400, stream=True)
    task = await started(engine, request)
    assert (await engine.pause("keep", clear_cache=True)).cleared is True
    await engine.apply_weights(await engine.stage_weights(str(other_dir)), version="v1")
    await engine.resume()
    response = fold(await task, request, engine)
    [[first, end]] = response.served_by.recomputed
    boundary = response.choices[0].policy_versions[1][1]
    assert (first, end) == (0, 12 + boundary - 1)  # type: ignore[operator]


async def test_wait_returns_when_the_running_have_finished(engine: EmbeddedEngine, ask: Ask) -> None:
    task = await started(engine, ask(max_tokens=60, stream=True))
    report = await engine.pause("wait")
    assert report.drained == 1
    assert len(await task) > 3
    held = asyncio.create_task(events_of(engine, ask("held")))
    await until(engine, waiting=1)
    await engine.resume()
    assert isinstance((await held)[-1], EndEvent)


async def test_a_stricter_pause_ends_a_milder_one(engine: EmbeddedEngine, ask: Ask) -> None:
    request = ask(max_tokens=4000, stream=True)
    task = await started(engine, request)
    waiting = asyncio.create_task(engine.pause("wait"))
    while (await engine.health()).state != "paused":
        await engine.loaded_adapters()
    report = await engine.pause("abort")
    assert (report.already_paused, report.aborted) == (True, 1)
    await waiting
    assert fold(await task, request, engine).choices[0].finish_reason == "abort"


async def test_resume_when_running_changes_nothing(engine: EmbeddedEngine) -> None:
    assert not (await engine.resume()).was_paused


async def test_weights_that_do_not_fit_leave_the_old_ones_serving(
    engine: EmbeddedEngine, ask: Ask, tmp_path: Path, other_dir: Path
) -> None:
    before = await answer(engine, ask())
    with pytest.raises(NotFound):
        await engine.stage_weights(str(tmp_path))
    dense = tiny.make_dense(tmp_path / "dense", layers=2)
    with pytest.raises(InvalidRequest, match="unexpected"):
        await engine.stage_weights(str(dense))
    staged = await engine.stage_weights(str(other_dir))
    with pytest.raises(EngineFailed, match="only while paused"):
        await engine.apply_weights(staged, version="v1")
    after = await answer(engine, ask())
    assert np.array_equal(before.choices[0].token_ids, after.choices[0].token_ids)
    assert engine.policy_version == "v0"


async def test_staged_weights_without_a_handle_are_read_again_and_must_be_the_same(
    engine: EmbeddedEngine, other_dir: Path
) -> None:
    staged = await engine.stage_weights(str(other_dir))
    staged.handle = None
    await engine.pause("keep")
    await engine.apply_weights(staged, version="v1")
    staged.digest = "0" * 64
    with pytest.raises(EngineFailed, match="the files changed"):
        await engine.apply_weights(staged, version="v2")
    assert engine.policy_version == "v1"


async def test_a_label_touches_no_request(engine: EmbeddedEngine, ask: Ask) -> None:
    request = ask(max_tokens=50, stream=True)
    task = await started(engine, request)
    await engine.set_policy_version("v0b")
    choice = fold(await task, request, engine).choices[0]
    assert (choice.finish_reason, choice.token_ids.size) == ("length", 50)


async def test_a_flush_says_what_it_did(engine: EmbeddedEngine, ask: Ask) -> None:
    assert (await engine.flush_cache()).reset
    task = await started(engine, ask(max_tokens=100, stream=True))
    report = await engine.flush_cache()
    assert (report.reset, report.reason) == (False, "1 running request(s) hold their own KV")
    report = await engine.flush_cache(preempt=True)
    assert (report.reset, report.preempted) == (True, 1)
    assert len(await task) > 3


async def test_adapters_load_serve_and_stay_while_used(
    engine: EmbeddedEngine, ask: Ask, moe_dir: Path, tmp_path: Path
) -> None:
    path = tiny.make_lora(tmp_path / "a", base=moe_dir)
    base = await answer(engine, ask())
    await engine.load_adapter("a@1", str(path))
    assert await engine.loaded_adapters() == ["a@1"]
    adapted = await answer(engine, ask(adapter="a@1"))
    assert not np.array_equal(base.choices[0].token_ids, adapted.choices[0].token_ids)
    request = ask(adapter="a@1", max_tokens=4000, stream=True)
    task = await started(engine, request)
    with pytest.raises(Conflict, match="used by 1"):
        await engine.unload_adapter("a@1")
    await engine.abort("r")
    await task
    await engine.unload_adapter("a@1")
    await engine.unload_adapter("a@1")
    with pytest.raises(NotFound, match="not loaded"):
        await events_of(engine, ask(adapter="a@1"))


async def test_a_failed_step_ends_every_request_and_the_engine(engine: EmbeddedEngine, ask: Ask) -> None:
    task = await started(engine, ask(max_tokens=4000, stream=True))

    def explode(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    engine._core.model.forward = explode  # type: ignore[union-attr, method-assign]
    with pytest.raises(EngineDied, match="out of memory"):
        await task
    health = await engine.health()
    assert (health.alive, health.state) == (False, "failed")
    assert "out of memory" in (health.reason or "")
    with pytest.raises(EngineDied):
        await events_of(engine, ask())
    with pytest.raises(EngineDied):
        await engine.pause("keep")


async def test_closing_ends_what_runs(moe_dir: Path, ask: Ask) -> None:
    made = EmbeddedEngine(EmbeddedSettings(model=str(moe_dir), threads=1))
    await made.start()
    task = await started(made, ask(max_tokens=4000, stream=True))
    await made.close()
    with pytest.raises(EngineDied, match="closed"):
        await task
    await made.close()
    assert (await made.health()).state == "stopped"
    with pytest.raises(EngineDied):
        await events_of(made, ask())


async def test_closing_with_grace_lets_requests_finish(moe_dir: Path, ask: Ask) -> None:
    made = EmbeddedEngine(EmbeddedSettings(model=str(moe_dir), threads=1))
    await made.start()
    request = ask(max_tokens=30, stream=True)
    task = await started(made, request)
    await made.close(grace_s=BOUND_S)
    assert fold(await task, request, made).choices[0].token_ids.size == 30


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"dtype": "int4"}, "int4"), ({"max_num_seqs": 0}, "max_num_seqs"), ({"max_model_len": 1}, "at least 2")],
)
async def test_bad_settings_are_refused_by_name(settings: dict[str, Any], says: str, moe_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await EmbeddedEngine(EmbeddedSettings(model=str(moe_dir), **settings)).start()


async def test_a_missing_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await EmbeddedEngine(EmbeddedSettings(model=str(tmp_path))).start()


async def test_an_engine_seed_makes_unseeded_requests_repeatable_and_different(moe_dir: Path, ask: Ask) -> None:
    seen = []
    for _ in range(2):
        made = EmbeddedEngine(EmbeddedSettings(model=str(moe_dir), seed=3, threads=1))
        await made.start()
        seen.append([(await answer(made, ask(seed=...))).choices[0].token_ids.tolist() for _ in range(2)])
        await made.close()
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]


async def until(engine: EmbeddedEngine, **wanted: int) -> None:
    """Let the thread work until its health says so."""
    async with asyncio.timeout(BOUND_S):
        while True:
            health = await engine.health()
            if all(getattr(health, name) == value for name, value in wanted.items()):
                return
            await engine.loaded_adapters()  # one round trip through the step thread
