"""Pause, resume, abort and weight updates between steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models import tiny

from rollplane.engines.embedded.model import CausalModel, load_model
from rollplane.engines.embedded.sequence import Generation
from rollplane.errors import Conflict

Make = Callable[..., Any]
Ask = Callable[..., Generation]

ALL = {"logprobs": 0, "sampling_mask": True, "routed_experts": True}


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_moe(tmp_path_factory.mktemp("other"), layers=2, experts=8, seed=1)


@pytest.fixture
def own_moe(moe_dir: Path) -> CausalModel:
    """A model that a test may change."""
    return load_model(moe_dir)


def test_an_abort_before_the_first_token_leaves_typed_empty_arrays(make_runner: Make, ask: Ask) -> None:
    runner = make_runner().submit(ask(n=2, **ALL))
    runner.take(runner.core.abort("r"))
    for found in runner.finish().values():
        assert (found.tokens, found.logprobs, found.end.finish_reason) == ([], [], "abort")
        assert found.end.routes.array.shape == (0, 2, 2)
        assert found.end.routes.array.dtype == np.uint8
        assert found.end.mask.offsets.tolist() == [0]
        assert found.end.spans == [("v0", 0)]
    assert len(runner.done) == 2


def test_an_abort_in_the_middle_of_a_prompt_frees_its_slot(make_runner: Make, ask: Ask) -> None:
    runner = make_runner(chunk_tokens=8).submit(ask("long", 60, **ALL)).steps(3)
    runner.take(runner.core.abort("long"))
    assert runner.done["long", 0].end.routes.array.shape == (0, 2, 2)
    assert not runner.core.scheduler.busy
    assert len(runner.submit(ask("next")).finish()["next", 0].tokens) == 8


def test_an_abort_keeps_every_token_so_far(make_runner: Make, ask: Ask) -> None:
    runner = make_runner().submit(ask("a", max_tokens=50, **ALL), ask("b", max_tokens=9)).steps(5)
    runner.take(runner.core.abort("a"))
    found = runner.done["a", 0]
    assert len(found.tokens) == len(found.logprobs) == 5
    assert found.end.routes.array.shape[0] == 12 + 5 - 1
    assert found.end.mask.offsets.size == 6
    assert found.tokens == make_runner().submit(ask("a", max_tokens=5)).only().tokens
    assert runner.finish()["b", 0].tokens == make_runner().submit(ask("b", max_tokens=9)).only().tokens


def test_an_unknown_id_aborts_nothing(make_runner: Make) -> None:
    assert make_runner().core.abort("nobody") == []


def test_keep_freezes_and_goes_on_as_if_nothing_happened(make_runner: Make, ask: Ask) -> None:
    runner = make_runner().submit(ask("a", max_tokens=12)).steps(4)
    runner.core.pause("keep")
    runner.submit(ask("b"))
    before = runner.core.steps
    assert runner.core.idle
    assert runner.steps(3).core.steps == before
    runner.core.resume()
    assert runner.finish()["a", 0].tokens == make_runner().submit(ask("a", max_tokens=12)).only().tokens
    assert len(runner.done["b", 0].tokens) == 8


def test_wait_drains_the_running_and_holds_the_new(make_runner: Make, ask: Ask) -> None:
    runner = make_runner().submit(ask("a")).steps(2)
    runner.core.pause("wait")
    runner.submit(ask("b"))
    assert not runner.core.idle
    assert list(runner.finish()) == [("a", 0)]
    runner.core.resume()
    assert set(runner.finish()) == {("a", 0), ("b", 0)}


def test_abort_mode_ends_all_and_holds_the_new(make_runner: Make, ask: Ask) -> None:
    runner = make_runner(max_slots=1).submit(ask("a"), ask("b")).steps(3)
    runner.take(runner.core.pause("abort"))
    assert {k: (len(f.tokens), f.end.finish_reason) for k, f in runner.done.items()} == {
        ("a", 0): (3, "abort"),
        ("b", 0): (0, "abort"),
    }
    runner.submit(ask("c"))
    assert runner.core.idle
    runner.core.resume()
    assert len(runner.finish()["c", 0].tokens) == 8


def test_weights_change_only_while_paused_and_idle(
    make_runner: Make, ask: Ask, own_moe: CausalModel, other_dir: Path
) -> None:
    runner = make_runner(own_moe).submit(ask()).steps(2)
    staged = runner.core.layout.read(other_dir)
    with pytest.raises(Conflict, match="stepping"):
        runner.core.apply_weights(staged, version="v1")
    runner.core.pause("wait")
    with pytest.raises(Conflict, match="1 running"):
        runner.core.apply_weights(staged, version="v1")
    assert runner.core.version == "v0"


def test_a_kept_request_says_exactly_which_version_made_which_token(
    make_runner: Make, ask: Ask, own_moe: CausalModel, other_dir: Path
) -> None:
    runner = make_runner(own_moe).submit(ask(max_tokens=12, **ALL)).steps(5)
    core = runner.core
    core.pause("keep")
    core.apply_weights(core.layout.read(other_dir), version="v1")
    core.resume()
    found = runner.only()
    assert found.end.spans == [("v0", 0), ("v1", 5)]
    assert found.end.recomputed_rows == 0
    old = make_runner().submit(ask(max_tokens=12, **ALL)).only()
    assert found.tokens[:5] == old.tokens[:5]
    assert np.allclose(found.logprobs[:5], old.logprobs[:5], atol=1e-5)
    assert found.logprobs[5] != pytest.approx(old.logprobs[5], abs=1e-3)
    assert np.array_equal(found.end.routes.array[:16], old.end.routes.array[:16])


def test_no_span_names_a_version_that_made_no_token(
    make_runner: Make, ask: Ask, own_moe: CausalModel, other_dir: Path
) -> None:
    runner = make_runner(own_moe).submit(ask(max_tokens=12)).steps(5)
    runner.core.pause("keep")
    runner.core.apply_weights(runner.core.layout.read(other_dir), version="v1")
    runner.take(runner.core.abort("r"))
    assert runner.only().end.spans == [("v0", 0)]


def test_cleared_caches_are_recomputed_under_the_new_weights_and_marked(
    make_runner: Make, ask: Ask, own_moe: CausalModel, other_dir: Path
) -> None:
    request = ask(max_tokens=12, **ALL)
    runner = make_runner(own_moe, chunk_tokens=5).submit(request)
    while runner.core.scheduler.running == [] or runner.core.scheduler.running[0].generated < 5:
        runner.steps(1)
    core = runner.core
    core.pause("keep")
    assert core.clear_cache() == 1
    core.apply_weights(core.layout.read(other_dir), version="v1")
    core.resume()
    found = runner.only()
    assert found.end.spans == [("v0", 0), ("v1", 5)]
    assert found.end.recomputed_rows == 12 + 5 - 1
    old = make_runner().submit(request).only()
    # Routes of tokens before the pause stay those captured with the tokens.
    assert np.array_equal(found.end.routes.array[:16], old.end.routes.array[:16])
    # What comes after is what the new weights say of the whole text so far.
    fresh = ask("fresh", request.prompt.tolist() + found.tokens[:5], max_tokens=1, logprobs=tiny.VOCABULARY)
    new = make_runner(load_model(other_dir)).submit(fresh).only()
    where = new.alternatives.ids.tolist().index(found.tokens[5])
    assert new.alternatives.values[where] == pytest.approx(found.logprobs[5], abs=1e-4)


def test_what_was_recomputed_under_weights_that_made_no_token_is_recomputed_again(
    make_runner: Make, ask: Ask, own_moe: CausalModel, moe_dir: Path, other_dir: Path
) -> None:
    request = ask(max_tokens=12, **ALL)
    runner = make_runner(own_moe, chunk_tokens=20).submit(request).steps(5)
    core, (sequence,) = runner.core, runner.core.scheduler.running
    made = sequence.generated
    core.pause("keep")
    core.clear_cache()
    core.apply_weights(core.layout.read(other_dir), version="v1")
    core.resume()
    runner.steps(1)
    assert (sequence.generated, sequence.computed) == (made, sequence.total - 1)
    core.pause("keep")
    core.apply_weights(core.layout.read(moe_dir), version="v0")
    core.resume()

    found, whole = runner.only(), make_runner().submit(request).only()
    assert found.end.spans == [("v0", 0)]
    assert found.end.recomputed_rows == 12 + made - 1
    assert found.tokens == whole.tokens
    assert np.allclose(found.logprobs, whole.logprobs, atol=1e-5)


def test_recomputing_under_the_same_weights_changes_no_number(make_runner: Make, ask: Ask) -> None:
    requests = [ask("a", 30, max_tokens=12, **ALL), ask("b", max_tokens=12, **ALL)]
    runner = make_runner(chunk_tokens=6).submit(*requests).steps(9)
    rows = {s.request.request_id: s.total - 1 for s in runner.core.scheduler.running}
    assert runner.core.clear_cache() == 2
    done = runner.finish()
    for request in requests:
        found = done[request.request_id, 0]
        alone = make_runner().submit(request).only()
        assert found.tokens == alone.tokens
        assert np.allclose(found.logprobs, alone.logprobs, atol=1e-5)
        assert found.end.recomputed_rows == rows[request.request_id]


def test_a_half_computed_prompt_starts_again_under_new_weights(
    make_runner: Make, ask: Ask, own_moe: CausalModel, other_dir: Path
) -> None:
    request = ask("long", 40, prompt_logprobs=0, **ALL)
    runner = make_runner(own_moe, chunk_tokens=8).submit(request).steps(3)
    core = runner.core
    core.pause("keep")
    core.apply_weights(core.layout.read(other_dir), version="v1")
    core.resume()
    found = runner.only()
    fresh = make_runner(load_model(other_dir)).submit(request).only()
    assert found.tokens == fresh.tokens
    assert found.end.spans == [("v1", 0)]
    assert np.array_equal(found.end.routes.array, fresh.end.routes.array)
    assert np.allclose(found.prompt_logprobs.values, fresh.prompt_logprobs.values, atol=1e-4)


def test_after_an_update_the_engine_is_the_new_model(
    make_runner: Make, ask: Ask, own_moe: CausalModel, other_dir: Path, moe_dir: Path
) -> None:
    runner = make_runner(own_moe)
    core = runner.core
    storages = {n: p.data_ptr() for n, p in own_moe.module.named_parameters()}
    for directory, version in ((other_dir, "v1"), (moe_dir, "v2")):
        core.pause("wait")
        core.apply_weights(core.layout.read(directory), version=version)
        core.resume()
        found = runner.submit(ask(version, prompt=[9, 10, 11], logprobs=0)).finish()[version, 0]
        fresh = make_runner(load_model(directory)).submit(ask(version, prompt=[9, 10, 11], logprobs=0)).only()
        assert found.tokens == fresh.tokens
        assert found.logprobs == fresh.logprobs
    assert {n: p.data_ptr() for n, p in own_moe.module.named_parameters()} == storages
