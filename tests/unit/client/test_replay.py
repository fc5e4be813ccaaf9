"""Facts about the numpy replay arithmetic."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplane.client.replay import (
    UNRECORDED,
    ReplayError,
    RoutedTurn,
    check_mask,
    check_routes,
    masked_logprobs,
    mismatch,
    mismatch_by_version,
    pad_routes,
    renormalise,
    routed_row_count,
    span_ranges,
    stitch_routes,
    support_log_mass,
)
from rollplane.errors import InvalidRequest


def distinct_rows(rows, layers=2, top_k=2, experts=8, seed=0, dtype=np.uint8):
    rng = np.random.default_rng(seed)
    return rng.random((rows, layers, experts)).argsort(-1)[..., :top_k].astype(dtype)


def test_replay_errors_are_value_errors_and_the_callers_fault():
    with pytest.raises(ValueError, match="start at 4") as caught:
        routed_row_count(4, 1, start=4)
    assert isinstance(caught.value, ReplayError)
    assert isinstance(caught.value, InvalidRequest)


class TestRoutes:
    def test_the_last_sampled_token_has_no_row(self):
        assert routed_row_count(5, 3) == 7
        assert routed_row_count(5, 3, start=4) == 3
        assert routed_row_count(5, 0) == 0

    def test_valid_routes_pass_for_every_dtype(self):
        for dtype in (np.uint8, np.uint16, np.int32):
            check_routes(distinct_rows(7, dtype=dtype), prompt_tokens=5, completion_tokens=3, experts=8)

    def test_an_answer_without_tokens_has_an_empty_array(self):
        check_routes(np.empty((0, 2, 2), np.uint8), prompt_tokens=5, completion_tokens=0)

    @pytest.mark.parametrize(
        ("rows", "says"),
        [
            (distinct_rows(8), "8 routed rows, must be 7 = prompt 5 \\+ completion 3 - 1 - start 0"),
            (distinct_rows(7).astype(np.float32), "float32"),
            (distinct_rows(7)[0], "uint8"),
            (np.zeros((7, 2, 2), np.uint8), "all 28 routed expert ids are zero"),
            (np.zeros((7, 2, 1), np.uint8), "all 14 routed expert ids are zero"),
            (distinct_rows(7).astype(np.int32) - 9, "is negative"),
            (distinct_rows(7) + np.uint8(200), "and below 8"),
        ],
    )
    def test_broken_routes_are_refused_with_their_numbers(self, rows, says):
        with pytest.raises(ReplayError, match=says):
            check_routes(rows, prompt_tokens=5, completion_tokens=3, experts=8)

    def test_a_repeat_names_its_row_and_layer(self):
        rows = distinct_rows(7)
        rows[3, 1] = 6
        with pytest.raises(ReplayError, match=r"row 3, layer 1 repeats an expert: \[6, 6\]"):
            check_routes(rows, prompt_tokens=5, completion_tokens=3)

    def test_stitching_takes_a_turns_last_row_from_the_next_turn(self):
        whole = distinct_rows(11)  # 4 prompt, 3 out, 2 observed, 3 out: 12 tokens, 11 forwarded
        turns = [
            RoutedTurn(whole[:6], prompt_tokens=4, completion_tokens=3),
            RoutedTurn(whole[6:], prompt_tokens=9, completion_tokens=3, start=6),
        ]
        stitched = stitch_routes(turns)
        assert stitched.dtype == np.int16
        assert np.array_equal(stitched, whole)

    def test_a_turn_that_starts_later_leaves_unrecorded_rows(self):
        whole = distinct_rows(11)
        turns = [
            RoutedTurn(whole[:6], prompt_tokens=4, completion_tokens=3),
            RoutedTurn(whole[8:], prompt_tokens=9, completion_tokens=3, start=8),
        ]
        stitched = stitch_routes(turns)
        assert (stitched[6:8] == UNRECORDED).all()
        assert np.array_equal(stitched[8:], whole[8:])

    def test_overlapping_turns_keep_the_earlier_rows(self):
        first, second = distinct_rows(6, seed=1), distinct_rows(11, seed=2)
        stitched = stitch_routes([RoutedTurn(first, 4, 3), RoutedTurn(second, 9, 3)])
        assert np.array_equal(stitched[:6], first)
        assert np.array_equal(stitched[6:], second[6:])

    def test_a_prompt_that_does_not_extend_the_turn_before_is_refused(self):
        with pytest.raises(ReplayError, match="turn 1 has 6 prompt tokens; must hold the 7 tokens before it"):
            stitch_routes([RoutedTurn(distinct_rows(6), 4, 3), RoutedTurn(distinct_rows(8), 6, 3)])

    def test_turns_of_another_model_are_refused(self):
        with pytest.raises(ReplayError, match=r"turn 1 has \[layers, top_k\] \(3, 2\)"):
            stitch_routes([RoutedTurn(distinct_rows(6), 4, 3), RoutedTurn(distinct_rows(9, layers=3), 7, 3)])

    def test_padding_marks_the_tail_as_unrecorded(self):
        short, long = distinct_rows(3), distinct_rows(5)
        padded = pad_routes([short, long], tokens=6)
        assert padded.shape == (2, 6, 2, 2)
        assert np.array_equal(padded[0, :3], short)
        assert (padded[0, 3:] == UNRECORDED).all()
        assert np.array_equal(padded[1, :5], long)

    def test_padding_widens_only_where_ids_need_it(self):
        assert pad_routes([distinct_rows(3)], tokens=3).dtype == np.int16
        assert pad_routes([distinct_rows(3, dtype=np.uint16) + np.uint16(40_000)], tokens=3).dtype == np.int32

    def test_more_rows_than_tokens_are_refused(self):
        with pytest.raises(ReplayError, match="5 routed rows; the forward pass has 4 tokens"):
            pad_routes([distinct_rows(5)], tokens=4)

    def test_sequences_of_different_models_are_refused(self):
        with pytest.raises(ReplayError, match=r"sequence 1 has \[layers, top_k\] \(2, 4\)"):
            pad_routes([distinct_rows(5), distinct_rows(5, top_k=4)], tokens=5)


class TestMasks:
    ids = np.array([1, 3, 0, 2, 3], np.int32)
    offsets = np.array([0, 2, 3, 5], np.int32)
    tokens = np.array([3, 0, 2], np.int32)

    def test_a_valid_mask_passes(self):
        check_mask(self.ids, self.offsets, self.tokens, vocabulary=4)
        check_mask(np.empty(0, np.int32), np.zeros(1, np.int32), np.empty(0, np.int32))

    @pytest.mark.parametrize(
        ("ids", "offsets", "tokens", "says"),
        [
            (ids, offsets[:-1], tokens, "2 rows for 3 tokens"),
            (ids[:-1], offsets, tokens, "run from 0 to 5 over 4 entries"),
            (ids, np.array([0, 2, 2, 5]), tokens, "of token 1 is empty"),
            (ids, np.array([0, 4, 3, 5]), tokens, "offsets fall"),
            (ids, offsets, np.array([3, 1, 2]), r"of token 1 \(1 ids\) lacks the sampled id 1"),
            (np.array([3, 3, 0, 2, 3]), offsets, tokens, "of token 0 holds id 3 twice"),
            (ids + 1, offsets, tokens + 1, "from 1 to 4; must be at least 0 and below 4"),
        ],
    )
    def test_broken_masks_are_refused_with_their_numbers(self, ids, offsets, tokens, says):
        with pytest.raises(ReplayError, match=says):
            check_mask(ids, offsets, tokens, vocabulary=4)

    def test_the_same_id_in_two_rows_is_no_repeat(self):
        check_mask(np.array([3, 3]), np.array([0, 1, 2]), np.array([3, 3]))

    def test_a_support_of_everything_cuts_nothing(self):
        logprobs = np.log([0.5, 0.25, 0.25])
        assert support_log_mass(logprobs, np.array([0, 3])) == pytest.approx([0.0], abs=1e-15)

    def test_renormalising_divides_by_the_kept_mass(self):
        kept = np.log([0.5, 0.3])
        assert np.exp(renormalise([kept[1]], kept, np.array([0, 2]))) == pytest.approx([0.375])

    def test_lengths_that_do_not_fit_are_refused(self):
        with pytest.raises(ReplayError, match="2 values"):
            support_log_mass(np.log([0.5, 0.3]), np.array([0, 3]))
        with pytest.raises(ReplayError, match=r"\(2,\) log-probabilities .* \(1,\) tokens"):
            renormalise([0.0, 0.0], np.log([0.5, 0.3]), np.array([0, 2]))

    @given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 6), temperature=st.floats(0.2, 3.0))
    def test_masked_logprobs_are_a_softmax_over_the_kept_logits(self, seed, tokens, temperature):
        rng = np.random.default_rng(seed)
        logits = rng.normal(scale=5, size=(tokens, 9)).astype(np.float32)
        sampled = rng.integers(0, 9, tokens)
        keep = rng.random((tokens, 9)) < 0.4
        keep[np.arange(tokens), sampled] = True
        offsets = np.concatenate([[0], keep.sum(1).cumsum()]).astype(np.int32)
        got = masked_logprobs(logits, sampled, np.nonzero(keep)[1].astype(np.int32), offsets, temperature=temperature)
        for row in range(tokens):
            weights = np.exp(logits[row].astype(np.float64) / temperature)
            assert got[row] == pytest.approx(math.log(weights[sampled[row]] / weights[keep[row]].sum()), abs=1e-9)

    def test_temperature_zero_is_refused(self):
        with pytest.raises(ReplayError, match="temperature must be above 0, got 0"):
            masked_logprobs(np.zeros((3, 4)), self.tokens, self.ids, self.offsets, temperature=0)


class TestMismatch:
    def test_equal_arrays_have_none(self):
        found = mismatch([-1.0, -2.0], [-1.0, -2.0])
        assert (found.kl, found.mean_abs, found.max_abs, found.tokens) == (0.0, 0.0, 0.0, 2)

    def test_it_is_the_k3_estimator_of_trainer_minus_rollout(self):
        found = mismatch([-1.0, -2.0], [-1.5, -2.0])
        assert found.kl == pytest.approx((math.exp(0.5) - 0.5 - 1) / 2)
        assert (found.mean_abs, found.max_abs) == (0.25, 0.5)

    def test_tiny_differences_are_not_cancelled_away(self):
        assert mismatch([1e-9], [0.0]).kl == pytest.approx(5e-19, rel=1e-3)

    def test_padding_is_left_out(self):
        found = mismatch([[-1.0, 9.0]], [[-1.0, 0.0]], where=[[True, False]])
        assert (found.kl, found.tokens) == (0.0, 1)

    @pytest.mark.parametrize(
        ("trainer", "rollout", "says"),
        [([0.0], [0.0, 0.0], r"\[1\], rollout ones \[2\]"), ([], [], "no token"), ([-np.inf], [0.0], "1 of 1")],
    )
    def test_what_cannot_be_compared_is_refused(self, trainer, rollout, says):
        with pytest.raises(ReplayError, match=says):
            mismatch(trainer, rollout)

    def test_spans_cover_the_output(self):
        assert span_ranges([["v7", 0], ["v8", 3]], tokens=5) == [("v7", 0, 3), ("v8", 3, 5)]
        assert span_ranges([("v7", 0)], tokens=0) == [("v7", 0, 0)]

    def test_an_unknown_boundary_makes_its_tokens_unknown(self):
        assert span_ranges([["v7", 0], ["v8", None]], tokens=5) == [(None, 0, 5)]
        assert span_ranges([["v7", 0], ["v8", 2], ["v9", None]], tokens=5) == [("v7", 0, 2), (None, 2, 5)]

    @pytest.mark.parametrize(
        ("spans", "says"),
        [
            ([], "empty for a choice of 5 tokens"),
            ([["v7", 1]], "do not start at output index 0"),
            ([["v7", None]], "do not start at output index 0"),
            ([["v7", 0], ["v8", 0]], "do not rise"),
            ([["v7", 0], ["v8", 5]], "start past the 5 tokens"),
            ([["v7", 0], ["v8", 3], ["v9", 2]], "do not rise"),
        ],
    )
    def test_broken_spans_are_refused(self, spans, says):
        with pytest.raises(ReplayError, match=says):
            span_ranges(spans, tokens=5)

    def test_each_version_is_measured_on_its_own_tokens(self):
        found = mismatch_by_version(
            [
                ([-1.0, -1.0, -1.0], [-1.0, -1.5, -1.5], [["v7", 0], ["v8", 1]]),
                ([-2.0, -2.0], [-2.0, -2.0], [["v7", 0], ["v8", None]]),
            ]
        )
        assert {version: (one.tokens, one.mean_abs) for version, one in found.items()} == {
            "v7": (1, 0.0),
            "v8": (2, 0.5),
            None: (2, 0.0),
        }
