"""Facts about the figures, with the demo's own model in place of an engine."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollplane.client.replay_torch import moe_routers
from rollplane.demo.figures import in_flight_figures, measure, mismatch_kl, pooled_kl, score
from rollplane.demo.models import EXPERTS, LAYERS, load_model, make_model, save_model
from rollplane.demo.recompute import recompute
from rollplane.demo.rollouts import Rollouts
from rollplane.errors import NotFound


@pytest.fixture(scope="module")
def model():
    return make_model(vocabulary=16, top_k=2, seed=0, eos=1, pad=0)


@pytest.fixture(scope="module")
def other_model():
    return make_model(vocabulary=16, top_k=2, seed=1, eos=1, pad=0)


@pytest.fixture(scope="module")
def rollouts(model):
    """Two answers of 3 and 2 tokens whose log-probabilities are the model's own, over masks of two ids."""
    seen = []
    hooks = [
        router.register_forward_hook(lambda module, args, output: seen.append(output[2]))
        for _, router in moe_routers(model)
    ]
    ids = np.array([[2, 5, 6, 3, 7, 8], [2, 9, 3, 4, 11, 0]], np.int32)
    with torch.no_grad():
        model(torch.from_numpy(ids[:, :-1]).long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    routes = np.full((2, 6, LAYERS, 2), -1, np.int16)
    routes[:, :-1] = torch.stack(seen, 1).view(2, 5, LAYERS, 2).numpy()
    routes[1, 4:] = -1
    sampled = np.array([3, 7, 8, 4, 11], np.int32)
    bare = Rollouts(
        token_ids=ids,
        prompt_tokens=np.array([3, 3], np.int32),
        output_tokens=np.array([3, 2], np.int32),
        logprobs=np.zeros(5, np.float32),
        routes=routes,
        mask_ids=np.stack([sampled, (sampled + 1) % 16], 1).reshape(-1),
        mask_offsets=np.arange(0, 11, 2, dtype=np.int32),
        spans=np.array([json.dumps([["v1", 0], ["v2", 2]]), json.dumps([["v1", 0]])]),
        rewards=np.zeros(2, np.float32),
    )
    with torch.no_grad():
        return replace(bare, logprobs=score(model, bare, routes=True, mask=True).numpy())


def test_a_model_has_no_mismatch_with_itself_when_both_are_replayed(model, rollouts):
    found = mismatch_kl(model, rollouts)
    assert found["both"] < 1e-12
    assert found["none"] > 1e-3, "the masks cut most of the vocabulary off"


def test_another_model_has_one(model, other_model, rollouts):
    assert measure(other_model, rollouts).kl > 1e3 * max(measure(model, rollouts).kl, 1e-12)


def test_tokens_after_a_boundary_stand_apart(model, other_model, rollouts, tmp_path):
    found = in_flight_figures(rollouts, {"v1": model, "v2": save_model(other_model, tmp_path / "v2")})
    assert found["mixed_answers"] == 1
    assert found["versions"]["v1"]["tokens"] == 4
    assert found["versions"]["v1"]["kl"] < 1e-12
    assert found["versions"]["v1"]["kl_after_boundary"] is None
    assert found["versions"]["v2"]["tokens"] == 1
    assert found["versions"]["v2"]["kl"] is None
    assert found["versions"]["v2"]["kl_after_boundary"] > 1e-9


def test_pooling_weighs_by_tokens(model, rollouts):
    one = measure(model, rollouts)
    parts = [replace(one, kl=1.0, tokens=1), replace(one, kl=4.0, tokens=2)]
    assert pooled_kl(parts) == pytest.approx(3.0)


def test_a_saved_model_is_the_same_model(model, rollouts, tmp_path):
    save_model(model, tmp_path / "m")
    loaded = load_model(tmp_path / "m")
    assert loaded.config.num_experts == EXPERTS
    for (name, ours), (_, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_recomputing_an_unfinished_run_names_what_is_missing(tmp_path):
    with pytest.raises(NotFound, match=r"v0 is missing: .* does not hold a finished run"):
        recompute(tmp_path)
