"""The closed-form language model against a plain one that walks token by token over the whole vocabulary."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplane.engines.mock.controls import DECAY, Controls
from rollplane.engines.mock.draws import Draws
from rollplane.engines.mock.language import Language, largest_prime
from rollplane.protocol.artifacts import LOGPROB_FLOOR

VOCAB = 101
PROMPT = np.array([5, 6, 7], dtype=np.int32)
SCOPE = 1234


@pytest.fixture(scope="module")
def language() -> Language:
    return Language(vocab_tokens=VOCAB, max_positions=512, eos_token_id=2, ending_rate=0.0)


def draw(language: Language, *, count: int = 40, seed: int = 9, prompt: Any = PROMPT, **controls: Any) -> Draws:
    state = int(language.states(prompt)[-1])
    return language.draw(SCOPE, state, position=len(prompt), first=0, count=count, seed=seed, by=Controls(**controls))


def reference_support(*, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    weights = np.exp(-DECAY / temperature * np.arange(VOCAB))
    kept = min(VOCAB, top_k) if top_k else VOCAB
    kept = min(kept, int((weights >= min_p).sum())) if min_p else kept
    share = np.cumsum(weights[:kept]) / weights[:kept].sum()
    return kept if top_p == 1 else min(kept, int(np.searchsorted(share, top_p - 1e-9)) + 1)


@given(
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 3, 20, 500]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_truncation_keeps_what_a_plain_softmax_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    by = Controls(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    assert by.support(VOCAB) == reference_support(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def test_logprobs_are_the_log_softmax_of_the_kept_ranks(language: Language) -> None:
    drawn = draw(language, temperature=0.5, top_k=6, logprobs=True)

    logits = -DECAY / 0.5 * np.arange(6)
    wanted = logits - math.log(np.exp(logits).sum())
    np.testing.assert_allclose(drawn.values, wanted[drawn.ranks - 1], rtol=1e-5)


def test_ranks_come_as_often_as_their_probability_says(language: Language) -> None:
    ranks = np.concatenate([draw(language, count=400, seed=s).ranks for s in range(50)])

    shares = np.bincount(ranks, minlength=5)[1:5] / ranks.size
    wanted = np.exp(-DECAY * np.arange(4)) * (1 - math.exp(-DECAY))
    np.testing.assert_allclose(shares, wanted, atol=0.01)


def test_a_prompt_that_holds_an_output_is_scored_as_that_output_was(language: Language) -> None:
    drawn = draw(language)

    scored = language.score(SCOPE, np.concatenate([PROMPT, drawn.ids]), alternatives=0)

    np.testing.assert_array_equal(scored.values[len(PROMPT) - 1 :], drawn.values)
    np.testing.assert_array_equal(scored.ranks[len(PROMPT) - 1 :], drawn.ranks)


def test_greedy_decoding_goes_on_where_a_prompt_ends(language: Language) -> None:
    whole = draw(language, temperature=0.0)

    rest = draw(language, temperature=0.0, count=30, prompt=np.concatenate([PROMPT, whole.ids[:10]]))

    np.testing.assert_array_equal(rest.ids, whole.ids[10:])


@given(cut=st.integers(1, 39), seed=st.integers(0, 2**63))
def test_drawing_in_pieces_is_drawing_at_once(language: Language, cut: int, seed: int) -> None:
    by = Controls(top_k=7)
    state = int(language.states(PROMPT)[-1])
    whole = language.draw(SCOPE, state, position=3, first=0, count=40, seed=seed, by=by)
    middle = int(language.states(whole.ids[:cut], state=state)[-1])

    rest = language.draw(SCOPE, middle, position=3 + cut, first=cut, count=40 - cut, seed=seed, by=by)

    np.testing.assert_array_equal(rest.ids, whole.ids[cut:])
    np.testing.assert_array_equal(rest.values, whole.values[cut:])


@pytest.mark.parametrize("controls", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}])
def test_a_bias_of_nothing_changes_nothing(language: Language, controls: dict[str, Any]) -> None:
    """Every token goes the slow way over explicit candidates, and comes out as the closed form says."""
    asked = {"logprobs": True, "alternatives": 3, "mask": True, **controls}
    plain, biased = draw(language, **asked), draw(language, bias={50: 0.0}, **asked)

    np.testing.assert_array_equal(plain.ids, biased.ids)
    np.testing.assert_allclose(plain.values, biased.values, atol=1e-5)
    np.testing.assert_array_equal(plain.alternative_ids, biased.alternative_ids)
    np.testing.assert_array_equal(plain.mask_counts, biased.mask_counts)
    assert plain.mask_ids is not None
    assert biased.mask_ids is not None
    assert [set(r) for r in plain.mask().rows()] == [set(r) for r in biased.mask().rows()]  # type: ignore[union-attr]


def test_a_large_bias_wins_and_is_in_the_logprob(language: Language) -> None:
    drawn = draw(language, count=6, bias={50: 100.0}, logprobs=True)

    assert drawn.ids.tolist() == [50] * 6
    np.testing.assert_allclose(drawn.values, 0.0, atol=1e-6)


def test_only_allowed_ids_are_sampled_and_others_are_floored(language: Language) -> None:
    drawn = draw(language, allowed_ids=(7, 9), logprobs=True, alternatives=4)

    assert set(drawn.ids.tolist()) == {7, 9}
    assert drawn.alternative_values is not None
    assert (drawn.alternative_values[:, 2:] == LOGPROB_FLOOR).all()
    assert drawn.floored() == 2 * 40
    np.testing.assert_allclose(np.exp(drawn.alternative_values[:, :2]).sum(axis=1), 1.0, rtol=1e-5)


def test_held_ids_wait_for_min_tokens_and_the_rest_is_renormalised(language: Language) -> None:
    held = frozenset(range(0, VOCAB, 2))

    drawn = draw(language, min_tokens=30, stop_ids=held, logprobs=True)

    assert held.isdisjoint(drawn.ids[:30].tolist())
    assert not held.isdisjoint(drawn.ids[30:].tolist())
    held_back, free = draw(language, min_tokens=30, stop_ids=held, mask=True).mask_counts[[0, 35]]  # type: ignore[index]
    assert (held_back, free) == (VOCAB - len(held), VOCAB)


def test_held_ids_are_held_the_same_at_once_and_one_by_one(language: Language) -> None:
    asked: dict[str, Any] = {"min_tokens": 40, "eos_ids": frozenset({11, 12, 13})}

    np.testing.assert_array_equal(draw(language, **asked).ids, draw(language, bias={50: 0.0}, **asked).ids)


def test_no_distribution_left_is_not_a_number(language: Language) -> None:
    drawn = draw(language, count=1, allowed_ids=(7,), stop_ids=frozenset({7}), min_tokens=1)

    assert np.isnan(drawn.values).all()


def test_endings_come_at_their_rate() -> None:
    language = Language(vocab_tokens=VOCAB, max_positions=20_100, eos_token_id=2, ending_rate=0.1)

    ids = draw(language, count=20_000, temperature=0.0).ids

    assert 0.08 < (ids == 2).mean() < 0.14


@pytest.mark.parametrize("change", ["scope", "first token", "last token", "order"])
def test_everything_before_decides_the_next_token(language: Language, change: str) -> None:
    by, scope, prompt = Controls(temperature=0.0), SCOPE, PROMPT.copy()
    if change == "scope":
        scope += 1
    elif change == "order":
        prompt = prompt[::-1].copy()
    else:
        prompt[0 if change == "first token" else -1] += 1
    state = int(language.states(prompt)[-1])

    other = language.draw(scope, state, position=3, first=0, count=8, seed=0, by=by)

    assert other.ids.tobytes() != draw(language, count=8, temperature=0.0).ids.tobytes()


@pytest.mark.parametrize("temperature", [1e-320, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_give_finite_logprobs(language: Language, temperature: float) -> None:
    drawn = draw(language, temperature=temperature, logprobs=True)

    assert np.isfinite(drawn.values).all()
    assert ((drawn.ids >= 0) & (drawn.ids < VOCAB)).all()


@pytest.mark.parametrize(("limit", "prime"), [(8, 7), (101, 101), (1024, 1021), (151_936, 151_909)])
def test_the_largest_prime_in_a_vocabulary(limit: int, prime: int) -> None:
    assert largest_prime(limit) == prime
