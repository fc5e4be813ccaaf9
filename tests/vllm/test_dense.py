"""A real dense engine beside vLLM's own server on the same weights, and the failures that such engines have shown."""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file
from tests.models.tiny import shared_model
from tests.vllm.own_server import own_answer, own_logprobs, own_server, own_tokens
from tests.vllm.reference import Reference
from tests.vllm.sampling_fields import FIELDS, REFUSED
from tests.vllm.support import ask, logprobs, prompt, running, tokens

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.errors import EngineDied, EngineFailed, InvalidRequest
from rollplane.protocol.admin import TensorMismatch
from rollplane.protocol.answer import encode_json
from rollplane.testing import make_request, watching

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config asks for top_k 1, as some do for 20: no rollout may follow it."""
    path = tmp_path_factory.mktemp("model") / "dense"
    shutil.copytree(shared_model("qwen3"), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 1, "temperature": 0.1}))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    async with running(model, "--max-logprobs", "-1") as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm_http(engine: VllmEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with own_server(engine) as client:
        yield client


def random_sampling(rng: np.random.Generator) -> dict[str, Any]:
    """Sampling parameters of a random request."""
    asked: dict[str, Any] = {"max_tokens": int(rng.integers(1, 20)), "logprobs": int(rng.integers(0, 4))}
    asked["temperature"] = float(rng.choice([0.0, 0.5, 1.0, 1.5]))
    asked["seed"] = int(rng.integers(0, 2**40))
    choices: dict[str, list[Any]] = {
        "top_p": [0.5, 0.9, 1.0],
        "top_k": [-1, 0, 5, 50],
        "min_p": [0.0, 0.05],
        "presence_penalty": [0.5, -0.5],
        "frequency_penalty": [0.7],
        "repetition_penalty": [1.2, 0.9],
        "ignore_eos": [True],
        "min_tokens": [1],
        "stop_token_ids": [rng.integers(0, 1024, 100).tolist()],
        "allowed_token_ids": [rng.choice(1024, 40, replace=False).tolist()],
        "logit_bias": [{str(i): 4.0 for i in rng.integers(0, 1024, 5).tolist()}],
        "stop": [["e"], ["the", "a"]],
        "skip_special_tokens": [False],
    }
    for name, values in choices.items():
        if rng.random() < 0.3:
            asked[name] = values[int(rng.integers(len(values)))]
    if asked["temperature"] > 0 and rng.random() < 0.2:
        asked["n"] = 2
    return asked


async def test_answers_are_those_of_vllms_own_server(engine: VllmEngine, vllm_http: httpx.AsyncClient) -> None:
    rng = np.random.default_rng(7)
    for i in range(REQUESTS):
        ids, asked = prompt(int(rng.integers(1, 60)), variant=1000 + i), random_sampling(rng)
        status, theirs = await own_answer(vllm_http, ids, **asked)
        assert status == 200, theirs

        ours = await ask(engine, ids, **asked)

        for index, choice in enumerate(ours.choices):
            assert tokens(ours, index) == own_tokens(theirs, index), asked
            assert choice.finish_reason == theirs["choices"][index]["finish_reason"], asked
            np.testing.assert_allclose(
                logprobs(ours, index), own_logprobs(theirs, index), atol=1e-5, err_msg=str(asked)
            )


@pytest.mark.parametrize("name", FIELDS)
async def test_a_sampling_field_means_what_it_says(engine: VllmEngine, vllm_http: httpx.AsyncClient, name: str) -> None:
    value, promise = FIELDS[name]
    asked = {"max_tokens": 12, "seed": 5, name: value}

    if promise == REFUSED:
        with pytest.raises(InvalidRequest, match="logprob" if name.startswith("logprob") else name):
            await ask(engine, **asked)
        return
    status, theirs = await own_answer(vllm_http, prompt(), **asked)
    ours = await ask(engine, **asked)

    assert status == 200, theirs
    assert [tokens(ours, i) for i in range(len(ours.choices))] == [c["token_ids"] for c in theirs["choices"]]
    if name == "logprobs":
        alternatives = ours.choices[0].logprobs
        assert alternatives is not None
        assert alternatives.alternatives is not None
        assert alternatives.alternatives.ranks.tolist() == [1, 2] * 12
    if name == "prompt_logprobs":
        assert ours.prompt_logprobs is not None
        wanted = [
            float(row[str(i)]["logprob"]) for row, i in zip(theirs["prompt_logprobs"][1:], prompt()[1:], strict=True)
        ]
        own = ours.prompt_logprobs.values[ours.prompt_logprobs.offsets[1:-1]]
        np.testing.assert_allclose(own, wanted, atol=1e-5)


async def test_the_generation_config_is_not_followed(engine: VllmEngine) -> None:
    """Though top_k 1 and temperature 0.1 stand in the model's directory."""
    answers = {tuple(tokens(await ask(engine, max_tokens=8))) for _ in range(4)}

    assert len(answers) == 4


async def test_logprobs_are_those_of_the_sampling_distribution(engine: VllmEngine) -> None:
    whole = await ask(engine, max_tokens=1, seed=1, logprobs=-1)
    sharp = await ask(engine, max_tokens=1, seed=1, logprobs=-1, temperature=0.5)

    def by_id(response: Any) -> np.ndarray[Any, Any]:
        top = response.choices[0].logprobs.alternatives
        values = np.empty(1024)
        values[top.ids] = top.values
        return values

    scaled = by_id(whole) * 2
    np.testing.assert_allclose(by_id(sharp), scaled - np.log(np.exp(scaled).sum()), atol=1e-4)
    assert sharp.served_by.logprobs_mode == "sampling"


async def test_infinite_alternatives_are_floored_and_counted(engine: VllmEngine) -> None:
    got = await ask(engine, max_tokens=3, allowed_token_ids=[7], logprobs=5)

    json.loads(encode_json(got), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))
    assert tokens(got) == [7, 7, 7]
    assert got.served_by.floored_logprobs == 12


async def test_stop_strings_end_a_choice_and_are_named(engine: VllmEngine) -> None:
    got = await ask(engine, max_tokens=400, seed=3, stop=["e"])

    assert (got.choices[0].finish_reason, got.choices[0].stop_reason) == ("stop", "e")
    assert len(tokens(got)) < 400


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"temperature": 0.001}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": -2, "n": 2}, "seed"),
        ({"structured_outputs": {"regex": "(", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "regex|grammar|structured"),
        ({"structured_outputs": {"shape": "round"}}, "structured_outputs.shape"),
        ({"repetition_detection": {"max_pattern_size": -3}}, "repetition_detection"),
        ({"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}}, "kv_transfer_params"),
        ({"logprob_token_ids": [5, 5], "logprobs": 2}, "logprob_token_ids"),
        ({"watermarking": "yes"}, "watermarking"),
    ],
)
async def test_what_vllm_would_bend_is_refused_by_name(engine: VllmEngine, asked: dict[str, Any], word: str) -> None:
    control = await ask(engine, max_tokens=6, seed=4)

    with pytest.raises(InvalidRequest, match=word):
        await ask(engine, **asked)

    assert tokens(await ask(engine, max_tokens=6, seed=4)) == tokens(control)


async def test_a_unary_request_knows_the_boundary_of_an_update(engine: VllmEngine) -> None:
    """The first token whose logprob the old weights do not give is the first of the new version."""
    asked: dict[str, Any] = {"seed": 8, "max_tokens": 400, "ignore_eos": True, "logprobs": 0}
    old = await ask(engine, **asked)
    before = engine.policy_version
    staged = await engine.stage_weights(str(shared_model("qwen3", seed=1)))
    pace = make_request(prompt(variant=3), seed=1, max_tokens=400, ignore_eos=True, stream=True)
    request = make_request(prompt(), **asked)
    async with watching(engine, request, pace) as (unary, paced):
        await paced.until_tokens(20)
        await engine.pause("keep")
        await engine.apply_weights(staged, version="v1")
        await engine.resume()
        got = (await unary.answer()).choices[0]

    (first, zero), (second, boundary) = got.policy_versions
    assert (first, zero, second) == (before, 0, "v1")
    assert got.logprobs is not None
    differs = np.flatnonzero(np.abs(got.logprobs.values - logprobs(old)) > 1e-4)
    assert boundary == differs[0] > 0


async def test_a_prompt_in_flight_without_tokens_is_wholly_the_new_versions(engine: VllmEngine) -> None:
    """Requests beyond max_num_seqs wait in vLLM; an update finds them without tokens."""
    requests = [make_request(prompt(64, variant=i), seed=i, max_tokens=60, ignore_eos=True) for i in range(24)]
    staged = await engine.stage_weights(str(shared_model("qwen3", seed=2)))
    pace = make_request(prompt(variant=99), max_tokens=60, ignore_eos=True, stream=True)
    async with watching(engine, pace, *requests) as (paced, *watches):
        await paced.until_tokens(5)
        await engine.pause("keep")
        await engine.apply_weights(staged, version="v2")
        await engine.resume()
        answers = [await watch.answer() for watch in watches]

    fresh = [a for a in answers if a.choices[0].policy_versions == [("v2", 0)]]
    assert len(fresh) >= 8
    again = await ask(engine, prompt(64, variant=23), seed=23, max_tokens=60, ignore_eos=True)
    assert tokens(again) == tokens(answers[23])


async def test_nothing_cached_survives_an_update(engine: VllmEngine) -> None:
    ids = prompt(200, variant=5)
    await ask(engine, ids, max_tokens=2)
    assert (await ask(engine, ids, max_tokens=2)).usage.cached_tokens

    staged = await engine.stage_weights(str(shared_model("qwen3", seed=1)))
    await engine.pause("wait")
    await engine.apply_weights(staged, version="v3")
    await engine.resume()

    anew = await ask(engine, ids, max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
    assert anew.usage.cached_tokens == 0
    Reference(shared_model("qwen3", seed=1)).check(ids, anew)


async def test_a_version_name_that_comes_back_finds_nothing_of_its_first_use(engine: VllmEngine) -> None:
    """Blocks of a kept request survive every update; none serves the second use of its version's name."""
    ids = prompt(200, variant=6)

    async def update(seed: int, version: str) -> None:
        staged = await engine.stage_weights(str(shared_model("qwen3", seed=seed)))
        await engine.pause("keep")
        await engine.apply_weights(staged, version=version)
        await engine.resume()

    await update(1, "back")
    kept = make_request(ids, max_tokens=1500, ignore_eos=True, stream=True)
    async with watching(engine, kept) as (watch,):
        await watch.until_tokens(2)
        assert (await ask(engine, ids, max_tokens=2)).usage.cached_tokens
        await update(2, "forth")
        await update(0, "back")

        assert (await ask(engine, ids, max_tokens=2)).usage.cached_tokens == 0
        assert not watch.over
        cached = await ask(engine, ids, max_tokens=8, temperature=0.0, logprobs=0)
        assert cached.usage.cached_tokens
        assert cached.served_by.recomputed == []
    await engine.flush_cache()
    fresh = await ask(engine, ids, max_tokens=8, temperature=0.0, logprobs=0)
    assert tokens(fresh) == tokens(cached)
    np.testing.assert_allclose(logprobs(fresh), logprobs(cached), atol=1e-4)


async def test_a_reload_serves_the_files_now_on_disk(engine: VllmEngine, tmp_path: Path) -> None:
    """One path, other contents."""
    path, answers, digests = tmp_path / "step", [], set()
    path.mkdir()
    for seed in (1, 2):
        shutil.copy(shared_model("qwen3", seed=seed) / "model.safetensors", path / "model.safetensors")
        staged = await engine.stage_weights(str(path))
        await engine.pause("keep")
        await engine.apply_weights(staged, version=f"same-path-{seed}")
        await engine.resume()
        answers.append(tokens(await ask(engine, temperature=0.0, max_tokens=8)))
        digests.add(staged.digest)

    assert answers[0] != answers[1]
    assert len(digests) == 2


async def test_a_checkpoint_that_does_not_fit_touches_nothing(engine: VllmEngine, tmp_path: Path) -> None:
    """Also the fused tensors that vLLM loads in part without an error."""
    control = tokens(await ask(engine, temperature=0.0, max_tokens=8))
    whole = load_file(shared_model("qwen3", seed=2) / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    spoiled = {
        "missing": {k: v for k, v in whole.items() if k != name},
        "unexpected": {**whole, "model.layers.9.surprise": whole[name]},
        "shape": {**whole, name: whole[name][:-1]},
        "dtype": {**whole, name: whole[name].astype(np.int32)},
    }
    for word, tensors in spoiled.items():
        path = tmp_path / word
        path.mkdir()
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path / "model.safetensors")
        with pytest.raises(InvalidRequest, match=word):
            await engine.stage_weights(str(path))

    assert tokens(await ask(engine, temperature=0.0, max_tokens=8)) == control


async def test_unexpected_tensors_are_left_unread_where_they_are_allowed_and_missing_ones_never_are(
    engine: VllmEngine, tmp_path: Path
) -> None:
    before, first = engine.policy_version, await engine.stage_weights(str(shared_model("qwen3")))
    await engine.pause("keep")
    await engine.apply_weights(first, version="first")
    await engine.resume()
    control = tokens(await ask(engine, temperature=0.0, max_tokens=8))
    whole = load_file(shared_model("qwen3", seed=2) / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file({**whole, "model.layers.9.surprise": whole[name]}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="missing tensors cannot be allowed on vLLM"):
        await engine.stage_weights(str(tmp_path), allow_tensors=("missing",))
    staged = await engine.stage_weights(str(tmp_path), allow_tensors=("unexpected",))
    assert staged.ignored == TensorMismatch(unexpected=1, unexpected_names=["model.layers.9.surprise"])
    plain = await engine.stage_weights(str(shared_model("qwen3", seed=2)))
    assert (staged.digest, staged.tensors) == (plain.digest, len(whole))
    await engine.pause("keep")
    await engine.apply_weights(plain, version="plain")
    await engine.resume()
    wanted = tokens(await ask(engine, temperature=0.0, max_tokens=8))
    assert wanted != control
    await engine.pause("keep")
    await engine.apply_weights(first, version="first again")
    await engine.apply_weights(staged, version="more")
    await engine.resume()
    assert tokens(await ask(engine, temperature=0.0, max_tokens=8)) == wanted
    await engine.pause("keep")
    await engine.apply_weights(first, version=before)
    await engine.resume()
    assert tokens(await ask(engine, temperature=0.0, max_tokens=8)) == control


async def test_files_that_change_after_staging_are_refused(engine: VllmEngine, tmp_path: Path) -> None:
    control = tokens(await ask(engine, temperature=0.0, max_tokens=8))
    path, version = tmp_path / "step", engine.policy_version
    path.mkdir()
    shutil.copy(shared_model("qwen3", seed=1) / "model.safetensors", path / "model.safetensors")
    staged = await engine.stage_weights(str(path))
    shutil.copy(shared_model("qwen3") / "model.safetensors", path / "model.safetensors")
    await engine.pause("keep")
    with pytest.raises(EngineFailed, match="changed after it was checked"):
        await engine.apply_weights(staged, version="never")
    await engine.resume()

    assert engine.policy_version == version
    assert tokens(await ask(engine, temperature=0.0, max_tokens=8)) == control


async def test_a_lower_priority_number_goes_first(engine: VllmEngine) -> None:
    """More requests than run at once; the urgent one came last."""
    asked: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    crowd = [make_request(prompt(variant=i), fields={"priority": 5}, **asked) for i in range(40)]
    order: list[int] = []

    async def run(i: int, request: Any) -> None:
        async for _ in engine.generate(request):
            pass
        order.append(i)

    tasks = [asyncio.create_task(run(i, request)) for i, request in enumerate(crowd)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(run(40, make_request(prompt(variant=40), fields={"priority": -5}, **asked))))
    await asyncio.gather(*tasks)

    assert order.index(40) < 34


async def test_an_engine_that_does_not_move_says_so(engine: VllmEngine) -> None:
    core = _engine_core()
    request = make_request(prompt(), max_tokens=500, ignore_eos=True, stream=True)
    async with watching(engine, request) as (watch,):
        await watch.until_tokens(3)
        os.kill(core, signal.SIGSTOP)
        try:
            await asyncio.wait([watch.task], timeout=1.0)
            stuck = await engine.health()
        finally:
            os.kill(core, signal.SIGCONT)
        await watch.answer()

    assert stuck.alive
    assert stuck.last_progress_s > 0.7
    assert (await engine.health()).last_progress_s == 0.0


async def test_a_dead_engine_ends_its_requests_and_says_that_it_is_gone(engine: VllmEngine) -> None:
    """Last in this module: nothing works afterwards."""
    requests = [make_request(prompt(variant=i), max_tokens=1500, ignore_eos=True, stream=i == 0) for i in range(2)]
    async with watching(engine, *requests) as (first, second):
        await first.until_tokens(3)
        os.kill(_engine_core(), signal.SIGKILL)
        for watch in (first, second):
            with pytest.raises(EngineDied):
                await watch.answer()

    assert not (await engine.health()).alive
    with pytest.raises(EngineDied):
        await ask(engine, max_tokens=1)
    with pytest.raises(EngineDied):
        await engine.pause("keep")


def _engine_core() -> int:
    """The process id of vLLM's engine core."""
    found = [child.pid for child in multiprocessing.active_children() if "EngineCore" in child.name]
    assert len(found) == 1, multiprocessing.active_children()
    assert found[0] is not None
    return found[0]
