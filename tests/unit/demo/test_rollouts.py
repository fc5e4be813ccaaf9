"""Facts about the arrays that a rollout is kept as."""

from dataclasses import fields

import numpy as np
import pytest

from rollplane.client.replay import UNRECORDED, ReplayError
from rollplane.demo.rollouts import Rollouts, collect
from rollplane.protocol.artifacts import RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.response import Choice


def choice(token_ids, rows, spans=(("v0", 0),)):
    tokens = np.array(token_ids, np.int32)
    return Choice(
        index=0,
        token_ids=tokens,
        finish_reason="stop",
        logprobs=TokenLogprobs(values=-np.arange(1, len(tokens) + 1, dtype=np.float32)),
        routed_experts=RoutedExperts(array=np.tile(np.array([[5, 2], [0, 7]], np.uint8), (rows, 1, 1))),
        sampling_mask=SamplingMask(
            ids=np.stack([tokens, tokens + 1], 1).reshape(-1), offsets=np.arange(0, 2 * len(tokens) + 1, 2, np.int32)
        ),
        policy_versions=list(spans),
    )


@pytest.fixture
def rollouts():
    return collect(
        [[1, 2, 3], [4]],
        [choice([8, 9], 4, [("v1", 0), ("v2", 1)]), choice([6], 1)],
        experts=8,
        vocabulary=16,
    )


def test_sequences_are_padded_and_outputs_lie_flat(rollouts):
    assert rollouts.token_ids.tolist() == [[1, 2, 3, 8, 9], [4, 6, 0, 0, 0]]
    assert rollouts.choice_of_token.tolist() == [0, 0, 1]
    assert rollouts.position_of_token.tolist() == [3, 4, 1]
    assert rollouts.sampled.tolist() == [8, 9, 6]
    assert rollouts.logprobs.tolist() == [-1, -2, -1]
    assert rollouts.version_of_token.tolist() == ["v1", "v2", "v0"]


def test_masks_are_rebased_on_each_other(rollouts):
    assert rollouts.mask_ids.tolist() == [8, 9, 9, 10, 6, 7]
    assert rollouts.mask_offsets.tolist() == [0, 2, 4, 6]


def test_positions_without_a_row_are_unrecorded(rollouts):
    assert (rollouts.routes == UNRECORDED).all(axis=(2, 3)).tolist() == [[False] * 4 + [True], [False] + [True] * 4]


def test_saved_rollouts_come_back_unchanged(rollouts, tmp_path):
    rollouts.save(tmp_path / "r.npz")
    loaded = Rollouts.load(tmp_path / "r.npz")
    for field in fields(Rollouts):
        before, after = getattr(rollouts, field.name), getattr(loaded, field.name)
        assert np.array_equal(before, after), field.name
        assert before.dtype == after.dtype, field.name


def test_a_broken_choice_is_refused():
    with pytest.raises(ReplayError, match="3 routed rows, must be 4"):
        collect([[1, 2, 3]], [choice([8, 9], 3)], experts=8, vocabulary=16)
    with pytest.raises(ReplayError, match="must be at least 0 and below 6"):
        collect([[1, 2, 3]], [choice([8, 9], 4)], experts=6, vocabulary=16)
    with pytest.raises(ReplayError, match="sampling mask ids range from 8 to 10; must be at least 0 and below 9"):
        collect([[1, 2, 3]], [choice([8, 9], 4)], experts=8, vocabulary=9)
