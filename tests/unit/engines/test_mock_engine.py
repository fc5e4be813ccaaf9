"""The mock as an engine: time, room, caches, media and adapters. What every engine promises is in tests/contract."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollplane.engines.base import AdapterHost, Engine, KvEventSource, WeightReceiver
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import Conflict, EngineDied, InvalidRequest, NotFound, Unavailable
from rollplane.protocol.features import MediaItem
from rollplane.protocol.info import MoeShape
from rollplane.protocol.request import parse_request
from rollplane.testing import FakeClock, answer, make_request, settle, watching


def engine_of(clock: FakeClock | None = None, **settings: Any) -> MockEngine:
    return MockEngine(MockSettings(**settings), clock=clock)


async def started(clock: FakeClock | None = None, **settings: Any) -> MockEngine:
    engine = engine_of(clock, **settings)
    await engine.start()
    return engine


def body(**fields: Any) -> bytes:
    return json.dumps({"token_ids": [5, 6, 7], "sampling_params": {}, **fields}).encode()


def image(payload: bytes, *, offset: int = 1) -> dict[str, Any]:
    return {"features": [MediaItem(modality="image", producer_hash="same", offset=offset, length=2, kwargs=payload)]}


def directory(path: Path, name: str, content: str) -> str:
    path.mkdir()
    (path / name).write_text(content)
    return str(path)


def overwrite(path: str, content: str) -> None:
    Path(path, "mock_weights.json").write_text(content)


def test_the_mock_answers_to_every_protocol() -> None:
    engine = engine_of()

    assert isinstance(engine, Engine)
    assert isinstance(engine, WeightReceiver)
    assert isinstance(engine, AdapterHost)
    assert isinstance(engine, KvEventSource)
    assert repr(engine) == "<MockEngine 'mock' starting, <Core stepping at 'initial', 0 running, 0 waiting>>"


async def test_two_engines_of_one_name_make_the_same_tokens() -> None:
    request = {"seed": 3, "max_tokens": 20}
    answers = [await answer(await started(weights=name), make_request(**request)) for name in ("a", "a", "b")]

    tokens = [a.choices[0].token_ids.tolist() for a in answers]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


async def test_unseeded_requests_differ_and_replay_with_the_engine() -> None:
    runs = []
    for _ in range(2):
        engine = await started()
        runs.append([(await answer(engine, make_request(max_tokens=12))).choices[0].token_ids.tolist() for _ in "abc"])

    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


async def test_a_unary_answer_takes_its_prefill_and_its_steps() -> None:
    clock = FakeClock()
    engine = await started(clock, prefill_tokens_per_s=100.0, step_s=0.01)
    async with watching(engine, make_request(range(50), max_tokens=11)) as (watch,):
        await clock.advance(0.49)
        assert not watch.events
        await clock.advance(0.02)
        assert [type(e).__name__ for e in watch.events] == ["PromptEvent"]
        await clock.advance(0.08)
        assert not watch.over
        await clock.advance(0.02)
        assert (await watch.answer()).usage.completion_tokens == 11


async def test_a_unary_answer_costs_one_wake_up_after_its_prefill() -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=0.01)
    async with watching(engine, make_request(max_tokens=4000, ignore_eos=True)) as (watch,):
        await settle()
        assert clock.pending == 1
        await clock.advance(39.98)
        assert not watch.over
        await clock.advance(0.02)
        assert watch.over


async def test_streams_get_a_token_per_step() -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0)
    async with watching(engine, make_request(max_tokens=5, stream=True, ignore_eos=True)) as (watch,):
        seen = []
        for _ in range(4):
            await clock.advance(1.0)
            seen.append(watch.tokens)
        assert seen == [2, 3, 4, 5]
        await watch.answer()


async def test_steps_slow_down_with_the_batch() -> None:
    clock = FakeClock()
    engine = await started(clock, step_per_sequence_s=0.1)
    requests = [make_request(max_tokens=11, ignore_eos=True) for _ in range(10)]
    async with watching(engine, *requests) as watches:
        await clock.advance(9.9)
        assert not any(w.over for w in watches)
        await clock.advance(0.2)
        assert all(w.over for w in watches)


async def test_what_does_not_fit_waits_by_priority_then_arrival() -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0, max_num_seqs=1)
    requests = [make_request(max_tokens=3, fields={"priority": p}, ignore_eos=True) for p in (0, 5, 5, -1)]
    async with watching(engine, *requests) as watches:
        await settle()
        health = await engine.health()
        assert (health.running, health.waiting) == (1, 3)
        order = []
        for _ in range(12):
            await clock.advance(1.0)
            order += [i for i, w in enumerate(watches) if w.over and i not in order]
        assert order == [3, 0, 1, 2]


async def test_two_thousand_requests_in_flight_all_end() -> None:
    engine = await started(step_s=0.001, max_num_seqs=4096)
    requests = [make_request([7, i], max_tokens=16, logprobs=0, ignore_eos=True) for i in range(2000)]

    answers = await asyncio.gather(*[answer(engine, r) for r in requests])

    assert sum(a.usage.completion_tokens for a in answers) == 32_000
    assert (await engine.health()).running == 0


async def test_cached_tokens_count_whole_blocks_and_leave_one_token_to_compute() -> None:
    engine = await started(block_tokens=4)
    prompt = list(range(10, 22))
    counts = [(await answer(engine, make_request(prompt, max_tokens=1))).usage.cached_tokens for _ in range(2)]
    longer = await answer(engine, make_request([*prompt, 1], max_tokens=1))

    assert counts == [0, 8]
    assert longer.usage.cached_tokens == 12


async def test_the_next_turn_finds_the_last_answer_cached() -> None:
    engine = await started(block_tokens=4)
    first = await answer(engine, make_request(range(10, 20), max_tokens=12, ignore_eos=True))
    turn = [*range(10, 20), *first.choices[0].token_ids.tolist(), 5, 6]

    assert (await answer(engine, make_request(turn, max_tokens=1))).usage.cached_tokens == 20


async def test_a_cached_prefix_shortens_the_prefill() -> None:
    clock = FakeClock()
    engine = await started(clock, prefill_tokens_per_s=100.0)
    prompt = list(range(100, 261))
    for wanted_s in (1.61, 0.01):
        async with watching(engine, make_request(prompt, max_tokens=1)) as (watch,):
            await clock.advance(wanted_s - 0.005)
            assert not watch.over
            await clock.advance(0.01)
            assert watch.over


async def test_the_cache_can_be_passed_by() -> None:
    engine = await started(block_tokens=4)
    prompt = list(range(10, 22))
    await answer(engine, make_request(prompt, max_tokens=1))

    asked: list[dict[str, Any]] = [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 0}]
    for sampling in asked:
        got = await answer(engine, make_request(prompt, max_tokens=1, **sampling))
        assert got.usage.cached_tokens == 0


async def test_adapters_do_not_share_blocks(tmp_path: Path) -> None:
    engine = await started(block_tokens=4)
    await engine.load_adapter("a@1", directory(tmp_path / "a", "adapter_config.json", '{"r": 4}'))
    prompt = list(range(10, 22))
    counts = []
    for adapter in (None, "a@1", "a@1", None):
        got = await answer(engine, make_request(prompt, max_tokens=1, fields={"adapter": adapter}))
        counts.append(got.usage.cached_tokens)

    assert counts == [0, 0, 8, 8]


async def test_an_adapter_is_its_content_not_its_name(tmp_path: Path) -> None:
    engine = await started()
    paths = [directory(tmp_path / n, "adapter_config.json", f'{{"r": 4, "seed": {s}}}') for n, s in ("a1", "b1", "c2")]
    for i, path in enumerate(paths):
        await engine.load_adapter(f"x@{i}", path)

    made = [
        (await answer(engine, make_request(seed=1, max_tokens=9, fields={"adapter": f"x@{i}"}))).choices[0]
        for i in range(3)
    ]
    assert made[0].token_ids.tolist() == made[1].token_ids.tolist()
    assert made[0].token_ids.tolist() != made[2].token_ids.tolist()


async def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    engine = await started(max_adapters=1, max_adapter_rank=8)
    small = directory(tmp_path / "small", "adapter_config.json", '{"r": 8}')
    with pytest.raises(InvalidRequest, match=r"rank is 16, must be an integer in \[1, 8\]"):
        await engine.load_adapter("x@1", directory(tmp_path / "large", "adapter_config.json", '{"r": 16}'))
    with pytest.raises(NotFound, match=r"no adapter_config\.json"):
        await engine.load_adapter("x@1", directory(tmp_path / "none", "readme", ""))
    await engine.load_adapter("x@1", small)
    await engine.load_adapter("x@1", small)
    with pytest.raises(Conflict, match="all 1 adapter slots are taken"):
        await engine.load_adapter("x@2", small)


async def test_an_adapter_in_use_is_not_unloaded(tmp_path: Path) -> None:
    engine = await started()
    await engine.load_adapter("x@1", directory(tmp_path / "a", "adapter_config.json", "{}"))
    request = make_request(stream=True, max_tokens=500, ignore_eos=True, fields={"adapter": "x@1"})
    async with watching(engine, request) as (watch,):
        await watch.until_tokens(1)
        with pytest.raises(Conflict, match="is used by 1 requests"):
            await engine.unload_adapter("x@1")
    await engine.unload_adapter("x@1")
    assert await engine.loaded_adapters() == []


async def test_media_content_changes_the_tokens_and_the_producers_hash_does_not() -> None:
    engine = await started()
    made = [
        (await answer(engine, make_request([5, 6, 6, 7], seed=1, max_tokens=9, fields=fields))).choices[0]
        for fields in (image(b"cat"), image(b"cat"), image(b"dog"), image(b"cat", offset=0), {})
    ]

    tokens = [tuple(choice.token_ids.tolist()) for choice in made]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 4


async def test_media_without_content_are_refused() -> None:
    engine = await started()
    item = MediaItem(modality="image", producer_hash="a", offset=0, length=1)

    with pytest.raises(InvalidRequest, match="caches no media"):
        await answer(engine, make_request(fields={"features": [item]}))


async def test_the_prompt_comes_back_with_its_placeholders_when_asked() -> None:
    engine = await started()
    request = make_request([5, 6, 6, 7], max_tokens=1, fields={**image(b"cat"), "return_token_ids": True})

    got = await answer(engine, request)

    assert got.prompt_token_ids is not None
    assert got.prompt_token_ids.tolist() == [5, 6, 6, 7]
    assert got.mm_placeholders == {"image": [{"offset": 1, "length": 2}]}


@pytest.mark.parametrize("ids", [[99_999_999], [-1], [], [True], ["1"], [1.5], [2**40], None])
async def test_bad_prompt_ids_are_refused_and_the_engine_lives(ids: Any) -> None:
    engine = await started()

    with pytest.raises(InvalidRequest, match="token_ids"):
        await answer(engine, parse_request(body(token_ids=ids)))

    assert (await answer(engine, parse_request(body(sampling_params={"max_tokens": 2})))).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"stop": ["."]}, "use stop_token_ids instead"),
        ({"stop_token_ids": [2_000_000_000], "min_tokens": 1}, "outside the vocabulary"),
        ({"allowed_token_ids": list(range(2000))}, "has 2000 entries, the limit is 1024"),
        ({"stop_token_ids": list(range(200))}, "has 200 entries, the limit is 128"),
        ({"logit_bias": {str(i): 1.0 for i in range(1500)}}, "has 1500 entries, the limit is 1024"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is not available on the mock engine"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs is not available"),
    ],
)
async def test_what_would_be_ignored_or_kill_an_engine_is_refused_by_name(sampling: Any, says: str) -> None:
    engine = await started()

    with pytest.raises(InvalidRequest, match=says) as refused:
        await answer(engine, parse_request(body(sampling_params=sampling)))

    assert refused.value.param in {f"sampling_params.{name}" for name in sampling}


async def test_omitted_max_tokens_runs_to_the_end_of_the_context() -> None:
    engine = await started(max_model_len=50)

    lengths = []
    for sampling in ({"ignore_eos": True}, {"ignore_eos": True, "max_tokens": 16}):
        got = await answer(engine, parse_request(body(sampling_params=sampling)))
        lengths.append((got.usage.completion_tokens, got.choices[0].finish_reason))
    assert lengths == [(47, "length"), (16, "length")]


async def test_eos_ends_a_choice_without_a_stop_reason_unless_ignored() -> None:
    engine = await started(ending_rate=0.05, eos_token_id=2)
    ended = (await answer(engine, make_request(temperature=0.0))).choices[0]
    ignored = (await answer(engine, make_request(temperature=0.0, ignore_eos=True, max_tokens=200))).choices[0]

    assert (ended.finish_reason, ended.stop_reason, int(ended.token_ids[-1])) == ("stop", None, 2)
    assert ignored.token_ids.size == 200
    assert 2 in ignored.token_ids.tolist()


async def test_routes_of_a_dense_model_are_refused_at_once() -> None:
    engine = await started()

    with pytest.raises(InvalidRequest, match="the model has no MoE layers"):
        await answer(engine, make_request(options={"routed_experts": True}))


async def test_expert_ids_over_255_arrive_whole() -> None:
    engine = await started(moe=MoeShape(layers=2, top_k=8, num_experts=512))

    routes = (await answer(engine, make_request(range(64), max_tokens=64, ignore_eos=True))).choices[0].routed_experts

    assert routes is not None
    assert routes.array.dtype == np.uint16
    assert {255, 256, 511} <= set(routes.array.reshape(-1).tolist())


async def test_an_abort_in_the_queue_carries_empty_side_channels() -> None:
    engine = await started(
        FakeClock(), moe=MoeShape(layers=2, top_k=3, num_experts=512), step_s=1.0, sampling_mask=True
    )
    request = make_request(
        max_tokens=9, logprobs=1, options={"routed_experts": True, "sampling_mask": True}, top_k=3, prompt_logprobs=0
    )
    async with watching(engine, request) as (watch,):
        await asyncio.sleep(0)
        assert await engine.abort(request.request_id) == 1
        got = await watch.answer()

    choice = got.choices[0]
    assert choice.finish_reason == "abort"
    assert choice.routed_experts is not None
    assert choice.routed_experts.array.shape == (0, 2, 3)
    assert choice.routed_experts.array.dtype == np.uint16
    assert choice.sampling_mask is not None
    assert choice.sampling_mask.rows() == []
    assert choice.logprobs is not None
    assert choice.logprobs.values.size == 0
    assert choice.policy_versions == [("initial", 0)]


async def test_one_abort_ends_every_live_request_of_its_id() -> None:
    """Two live requests of one id are the caller's to prevent; the mock keeps them apart all the same."""
    engine = await started(FakeClock(), step_s=1.0)
    twins = [make_request([i], request_id="twin", max_tokens=50, ignore_eos=True) for i in (5, 6)]
    async with watching(engine, *twins) as watches:
        await settle()
        assert await engine.abort("twin") == 2
        assert [(await w.answer()).choices[0].finish_reason for w in watches] == ["abort", "abort"]


async def test_weights_are_their_bytes(tmp_path: Path) -> None:
    engine = await started()
    a, b = (directory(tmp_path / n, "mock_weights.json", f'{{"seed": "{n}"}}') for n in "ab")

    staged = [await engine.stage_weights(p) for p in (a, a, b)]
    overwrite(a, '{"seed": "overwritten"}')
    again = await engine.stage_weights(a)

    assert staged[0].digest == staged[1].digest
    assert len({s.digest for s in (*staged, again)}) == 3
    assert len(staged[0].digest) == 64


async def test_a_choice_keeps_its_own_boundary_through_two_updates(tmp_path: Path) -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0)
    paths = [directory(tmp_path / n, "mock_weights.json", f'{{"seed": "{n}"}}') for n in "ab"]
    request = make_request(max_tokens=30, ignore_eos=True, n=2, seed=4)
    async with watching(engine, request) as (watch,):
        for i, path in enumerate(paths):
            await clock.advance(10.0)
            await engine.pause("keep")
            await engine.apply_weights(await engine.stage_weights(path), version=f"v{i}")
            await clock.advance(100.0)
            await engine.resume()
        await clock.advance(30.0)
        got = await watch.answer()
    for choice in got.choices:
        assert choice.policy_versions == [("initial", 0), ("v0", 11), ("v1", 21)]


async def test_an_update_before_the_first_token_leaves_one_version(tmp_path: Path) -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0, prefill_tokens_per_s=1.0)
    path = directory(tmp_path / "a", "mock_weights.json", "{}")
    async with watching(engine, make_request(max_tokens=4, ignore_eos=True)) as (watch,):
        await clock.advance(1.0)
        await engine.pause("keep")
        await engine.apply_weights(await engine.stage_weights(path), version="v1")
        await engine.resume()
        await clock.advance(20.0)
        assert (await watch.answer()).choices[0].policy_versions == [("v1", 0)]


async def test_a_version_that_made_no_token_is_in_no_span() -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0)
    async with watching(engine, make_request(max_tokens=9, ignore_eos=True)) as (watch,):
        await clock.advance(3.0)
        for label in ("skipped", "v2"):
            await engine.set_policy_version(label)
        await clock.advance(2.0)
        for label in ("skipped", "v2"):
            await engine.set_policy_version(label)
        await clock.advance(20.0)
        assert (await watch.answer()).choices[0].policy_versions == [("initial", 0), ("v2", 4)]


async def test_a_pause_hands_on_every_token_though_time_passes_while_it_is_made() -> None:
    class Hurried(FakeClock):
        """Time passes at every look."""

        hurry_s = 0.0

        def __call__(self) -> float:
            self._now += self.hurry_s
            return super().__call__()

    clock = Hurried()
    engine = await started(clock, step_s=1.0)
    async with watching(engine, make_request(max_tokens=9, stream=True, ignore_eos=True)) as (watch,):
        await clock.advance(1.0)
        clock.hurry_s = 0.7
        await engine.pause("keep")
        clock.hurry_s = 0.0
        await settle()
        seen = watch.tokens
        await engine.set_policy_version("v2")
        await engine.resume()
        await clock.advance(20.0)
        assert (await watch.answer()).choices[0].policy_versions == [("initial", 0), ("v2", seen)]


async def test_a_stream_gets_each_token_at_its_step_where_more_are_drawn() -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0, max_model_len=8192)
    async with watching(engine, make_request(max_tokens=4100, stream=True, ignore_eos=True)) as (watch,):
        await clock.advance(4095.0)
        assert watch.tokens == 4096
        await clock.advance(1.0)
        assert watch.tokens == 4097


async def test_output_of_mixed_weights_is_not_cached(tmp_path: Path) -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0, block_tokens=4)
    path = directory(tmp_path / "a", "mock_weights.json", "{}")
    prompt = [10, 11, 12, 13]
    async with watching(engine, make_request(prompt, max_tokens=12, ignore_eos=True)) as (watch,):
        await clock.advance(5.0)
        await engine.pause("keep")
        await engine.apply_weights(await engine.stage_weights(path), version="v1")
        await engine.resume()
        await clock.advance(20.0)
        made = (await watch.answer()).choices[0].token_ids.tolist()
    async with watching(engine, make_request([*prompt, *made], max_tokens=1)) as (watch,):
        await clock.advance(1.0)
        assert (await watch.answer()).usage.cached_tokens == 4


async def test_resume_during_a_drain_ends_the_pause_with_a_conflict() -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0)
    async with watching(engine, make_request(max_tokens=30, ignore_eos=True)) as (watch,):
        await settle()
        pausing = asyncio.create_task(engine.pause("wait"))
        await settle()
        assert (await engine.health()).state == "pausing"
        await engine.resume()
        with pytest.raises(Conflict, match="was resumed while it was pausing"):
            await pausing
        await clock.advance(40.0)
        assert (await watch.answer()).usage.completion_tokens == 30


async def test_closing_lets_requests_finish_within_the_grace() -> None:
    clock = FakeClock()
    engine = await started(clock, step_s=1.0)
    short, long = (make_request(max_tokens=n, ignore_eos=True) for n in (20, 4000))
    async with watching(engine, short, long) as watches:
        await settle()
        closing = asyncio.create_task(engine.close(grace_s=100.0))
        await clock.advance(99.0)
        assert not closing.done()
        with pytest.raises(EngineDied):
            await answer(engine, make_request())
        await clock.advance(1.0)
        await closing
        assert (await watches[0].answer()).usage.completion_tokens == 20
        with pytest.raises(EngineDied, match="was closed"):
            await watches[1].answer()
    with pytest.raises(EngineDied):
        await answer(engine, make_request())
    await engine.close()


async def test_an_engine_that_was_not_started_serves_nobody() -> None:
    engine = engine_of()

    with pytest.raises(Unavailable, match="was not started"):
        await answer(engine, make_request())


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"vocab_tokens": 2}, "vocab_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"eos_token_id": 40_000}, "eos_token_id"),
        ({"ending_rate": 1.5}, "ending_rate"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s"),
        ({"step_s": -1.0}, "step_s"),
        ({"moe": MoeShape(layers=1, top_k=8, num_experts=8)}, "moe"),
    ],
)
def test_settings_that_make_no_engine_are_refused_by_name(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine_of(**settings)

    assert refused.value.param == param
