"""The response contract: every rule has one broken answer that is refused with its numbers."""

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.protocol.answers import broken_rule, float32, int32, responses

from rollplane.errors import EngineProtocolError
from rollplane.protocol.artifacts import Alternatives, PromptLogprobs, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.invariants import check_logprobs, check_response, is_one_each
from rollplane.protocol.response import Choice, GenerateResponse, Usage


def valid() -> GenerateResponse:
    """Two choices of 3 and 2 tokens after a prompt of 4, every side channel there; routes start at 1."""

    def choice(index: int, ids: list[int]) -> Choice:
        tokens = len(ids)
        rows = 4 + tokens - 1 - 1
        mask = [[token, token + 1] for token in ids]
        return Choice(
            index=index,
            token_ids=int32(ids),
            finish_reason="stop",
            logprobs=TokenLogprobs(
                values=float32([-0.5] * tokens),
                ranks=int32([1] * tokens),
                alternatives=Alternatives(
                    ids=int32([i for token in ids for i in (token, token + 7)]),
                    values=float32([-0.5, -1.5] * tokens),
                    ranks=int32([1, 2] * tokens),
                    offsets=int32(range(0, 2 * tokens + 1, 2)),
                ),
            ),
            routed_experts=RoutedExperts(array=np.tile(np.array([[3, 1], [0, 2]], np.uint8), (rows, 1, 1)), start=1),
            sampling_mask=SamplingMask(
                ids=int32([x for row in mask for x in row]), offsets=int32(range(0, 2 * tokens + 1, 2))
            ),
            policy_versions=[("v1", 0), ("v2", 1)],
        )

    return GenerateResponse(
        request_id="r",
        model="m",
        created=0,
        choices=[choice(0, [10, 20, 30]), choice(1, [40, 50])],
        usage=Usage(prompt_tokens=4, completion_tokens=5),
        prompt_token_ids=int32([1, 2, 3, 4]),
        prompt_logprobs=PromptLogprobs(
            ids=int32([2, 9, 3, 4]),
            values=float32([-1, -2, -1, -1]),
            ranks=int32([1, 2, 1, 1]),
            offsets=int32([0, 0, 2, 3, 4]),
        ),
    )


def check(response: GenerateResponse, **changes: Any) -> None:
    plan: dict[str, Any] = {"choices": 2, "prompt_tokens": 4, "logprobs": True, "routes": True, "mask": True}
    check_response(response, **(plan | {"prompt_logprobs": True, "routes_start": 1} | changes))


def put(response: GenerateResponse, path: str, value: Any) -> GenerateResponse:
    """The answer with one attribute replaced; frozen parts are made anew."""
    head, _, rest = path.partition(".")
    holder: Any = response
    if head.isdigit():
        response.choices[int(head)] = put(response.choices[int(head)], rest, value)
        return response
    new = put(getattr(holder, head), rest, value) if rest else value
    return msgspec.structs.replace(holder, **{head: new})


def test_a_valid_answer_passes_and_is_left_as_it_was() -> None:
    response = valid()
    before = copy.deepcopy(response)
    check(response)
    assert repr(response) == repr(before)


BROKEN: list[tuple[str, str, Any, str]] = [
    ("an index twice", "1.index", 0, r"asked for 2 choices, got the indices \[0, 0\]"),
    ("a missing index", "1.index", 2, r"got the indices \[0, 2\]"),
    ("another prompt length", "usage.prompt_tokens", 5, "prompt has 4 tokens, usage says 5"),
    ("another token count", "usage.completion_tokens", 6, "choices have 5 tokens, usage says 6"),
    ("no finish reason", "0.finish_reason", None, "choice 0 has the finish reason None"),
    ("another finish reason", "0.finish_reason", "eos", "finish reason 'eos'"),
    ("a negative id", "0.token_ids", int32([10, -1, 30]), "token id -1 is negative"),
    ("ids of another dtype", "0.token_ids", np.array([10, 20, 30]), r"int64\[3\], not int32"),
    ("ids of two dimensions", "1.token_ids", int32([[40, 50]]), r"int32\[1, 2\], not int32"),
    ("fewer logprobs", "0.logprobs.values", float32([-1, -1]), "2 logprobs for 3 tokens"),
    ("more logprobs", "0.logprobs.values", float32([-1] * 4), "4 logprobs for 3 tokens"),
    ("logprobs of another dtype", "0.logprobs.values", np.array([-1.0] * 3), r"float64\[3\], not float32"),
    ("a NaN", "0.logprobs.values", float32([-1, np.nan, -1]), "sampled token 1 is nan; the sample is unusable"),
    ("an infinity", "0.logprobs.values", float32([-1, -1, -np.inf]), "sampled token 2 is -inf"),
    ("logprobs missing", "1.logprobs", None, "choice 1: logprobs were asked for and are missing"),
    ("fewer ranks", "0.logprobs.ranks", int32([1, 1]), "2 ranks for 3 tokens"),
    ("fewer alternative rows", "0.logprobs.alternatives.offsets", int32([0, 3, 6]), "2 rows for 3 tokens"),
    ("offsets short", "0.logprobs.alternatives.offsets", int32([0, 2, 4, 5]), "from 0 to 5 over 6 entries"),
    ("offsets late", "0.logprobs.alternatives.offsets", int32([1, 2, 4, 6]), "from 1 to 6 over 6 entries"),
    ("offsets fall", "0.logprobs.alternatives.offsets", int32([0, 4, 2, 6]), "offsets fall"),
    ("fewer values", "0.logprobs.alternatives.values", float32([-1] * 5), "6 ids, 5 values, 6 ranks"),
    (
        "infinite alternative",
        "0.logprobs.alternatives.values",
        float32([-np.inf] * 6),
        "not finite and was not floored",
    ),
    ("an alternative twice", "0.logprobs.alternatives.ids", int32([5, 5, 1, 2, 1, 2]), "of token 0 holds id 5 twice"),
    ("mask missing", "0.sampling_mask", None, "the sampling mask was asked for and is missing"),
    ("fewer mask rows", "0.sampling_mask.offsets", int32([0, 2, 6]), "2 rows for 3 tokens"),
    ("an empty mask row", "0.sampling_mask.offsets", int32([0, 4, 4, 6]), "sampling mask of token 1 is empty"),
    (
        "a mask without its token",
        "0.sampling_mask.ids",
        int32([10, 11, 21, 22, 30, 31]),
        "of token 1 .2 ids. lacks .* 20",
    ),
    ("a mask with a repeat", "0.sampling_mask.ids", int32([10, 11, 20, 20, 30, 31]), "of token 1 holds id 20 twice"),
    ("a negative mask id", "0.sampling_mask.ids", int32([10, -3, 20, 21, 30, 31]), "id -3 is outside"),
    ("a mask of another dtype", "0.sampling_mask.ids", np.array([10, 11, 20, 21, 30, 31]), r"int64\[6\]"),
    ("one routed row more", "0.routed_experts.start", 0, "start at 0, asked for 1"),
    ("routes missing on one", "1.routed_experts", None, r"choices \[1\] lack routed experts"),
    ("a flat array", "0.routed_experts.array", np.ones(5, np.uint8), r"uint8\[5\]"),
    ("routes of another dtype", "0.routed_experts.array", np.ones((5, 2, 2), np.int64), r"int64\[5, 2, 2\]"),
    ("all zero", "0.routed_experts.array", np.zeros((5, 2, 2), np.uint8), "all 20 routed expert ids are zero"),
    ("no layer", "0.routed_experts.array", np.zeros((5, 0, 2), np.uint8), "no layer or no expert"),
    ("a negative expert", "0.routed_experts.array", np.tile(int32([[-1, 2]]), (5, 2, 1)), "expert id -1 is negative"),
    ("spans that start late", "0.policy_versions", [("v1", 1)], "do not start at output index 0"),
    ("spans that stand", "0.policy_versions", [("v1", 0), ("v2", 0)], "do not rise"),
    ("spans that fall behind a gap", "0.policy_versions", [("v1", 0), ("v2", None), ("v3", 0)], "do not rise"),
    ("spans past the end", "0.policy_versions", [("v1", 0), ("v2", 3)], "start past the 3 tokens"),
    ("a version twice", "0.policy_versions", [("v1", 0), ("v1", 1)], "name 'v1' twice in a row"),
    ("fewer prompt ids", "prompt_token_ids", int32([1, 2, 3]), "3 ids, the prompt 4 tokens"),
    ("prompt logprobs missing", "prompt_logprobs", None, "prompt logprobs were asked for and are missing"),
    ("a first row", "prompt_logprobs.offsets", int32([0, 1, 2, 3, 4]), "first position has 1 entries"),
    ("an empty position", "prompt_logprobs.offsets", int32([0, 0, 3, 3, 4]), "position 2 has no entry"),
    (
        "another token first",
        "prompt_logprobs.ids",
        int32([9, 2, 3, 4]),
        "position 1 begins with id 9, the prompt has 2",
    ),
    ("fewer prompt rows", "prompt_logprobs.offsets", int32([0, 0, 2, 4]), "3 rows for 4 tokens"),
]


@pytest.mark.parametrize(("path", "value", "says"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_answer_is_refused_with_its_numbers(path: str, value: Any, says: str) -> None:
    with pytest.raises(EngineProtocolError, match=says) as caught:
        check(put(valid(), path, value))
    assert caught.value.status == 502


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("rows", [4, 6])
def test_routed_rows_are_prompt_plus_completion_minus_one_minus_start(rows: int, dtype: Any) -> None:
    array = np.tile(np.array([[3, 1]], dtype), (rows, 2, 1))
    with pytest.raises(
        EngineProtocolError, match=rf"{rows} routed rows, must be 5 = prompt 4 \+ completion 3 - 1 - start 1"
    ):
        check(put(valid(), "0.routed_experts.array", array))


def test_a_repeated_expert_is_found_in_any_row_and_pair() -> None:
    rng = np.random.default_rng(0)
    array = np.argsort(rng.random((9000, 3, 8)), axis=2).astype(np.uint8)
    for row, layer, a, b in [(0, 0, 0, 7), (4095, 2, 3, 4), (4096, 0, 1, 5), (8999, 1, 6, 7)]:
        broken = array.copy()
        broken[row, layer, b] = broken[row, layer, a]
        choice = Choice(
            index=0, token_ids=int32([1]), finish_reason="stop", routed_experts=RoutedExperts(array=broken, start=0)
        )
        usage = Usage(prompt_tokens=9000, completion_tokens=1)
        response = GenerateResponse(request_id="r", model="m", created=0, choices=[choice], usage=usage)
        with pytest.raises(EngineProtocolError, match=f"routed row {row}, layer {layer} repeats an expert"):
            check_response(response, choices=1, prompt_tokens=9000, logprobs=False)


def test_what_was_not_asked_for_is_refused() -> None:
    with pytest.raises(EngineProtocolError, match="unasked routed experts"):
        check(valid(), routes=False)
    with pytest.raises(EngineProtocolError, match="a sampling mask was not asked for"):
        check(valid(), mask=False)


def test_logprobs_are_checked_even_where_they_were_not_asked_for() -> None:
    with pytest.raises(EngineProtocolError, match="2 logprobs for 3 tokens"):
        check(put(valid(), "0.logprobs.values", float32([-1, -1])), logprobs=False)


@pytest.mark.parametrize("count", [2, 5000])
def test_logprobs_are_finite_however_large_and_however_many(count: int) -> None:
    values = float32([-1e30] * count)
    check_logprobs(TokenLogprobs(values=values), tokens=count, where="choice 0")
    for bad in (-np.inf, np.inf, np.nan):
        values[count - 1] = bad
        with pytest.raises(EngineProtocolError, match=f"sampled token {count - 1} is"):
            check_logprobs(TokenLogprobs(values=values), tokens=count, where="choice 0")


@pytest.mark.parametrize("rows", [0, 1, 4095, 4096, 5000])
def test_one_entry_in_each_row_is_seen_at_any_height(rows: int) -> None:
    offsets = np.arange(rows + 1, dtype=np.int32)
    assert is_one_each(offsets)
    offsets[rows] += 1
    assert not is_one_each(offsets)


def test_a_choice_without_tokens_has_no_routed_rows() -> None:
    empty = Choice(
        index=0,
        token_ids=int32([]),
        finish_reason="abort",
        logprobs=TokenLogprobs(values=float32([])),
        routed_experts=RoutedExperts(array=np.empty((0, 2, 2), np.uint8), start=1),
        sampling_mask=SamplingMask(ids=int32([]), offsets=int32([0])),
        policy_versions=[("v1", 0)],
    )
    response = valid()
    response.choices[0] = empty
    response.usage.completion_tokens = 2
    check(response)
    broken = put(response, "0.routed_experts.array", np.ones((3, 2, 2), np.uint8))
    with pytest.raises(EngineProtocolError, match="3 routed rows, must be 0"):
        check(broken)


ARRAYS = [
    "token_ids",
    "logprobs.values",
    "logprobs.ranks",
    "logprobs.alternatives.ids",
    "logprobs.alternatives.values",
    "logprobs.alternatives.offsets",
    "sampling_mask.ids",
    "sampling_mask.offsets",
    "routed_experts.array",
]


@st.composite
def mutated(draw: Any) -> tuple[GenerateResponse, int, bool]:
    """A valid answer changed in one place: an entry of an array, its length, or a number."""
    response = draw(responses())
    count, logprobs = len(response.choices), response.choices[0].logprobs is not None
    index = draw(st.integers(0, count - 1))
    where = draw(
        st.sampled_from(
            [
                *ARRAYS,
                "routed_experts.start",
                "index",
                "policy_versions",
                "usage",
                "prompt_logprobs",
                "prompt_token_ids",
            ]
        )
    )
    if where == "usage":
        response.usage.completion_tokens += draw(st.integers(-1, 1))
    elif where == "index":
        response.choices[index].index += draw(st.integers(-1, 1))
    elif where == "policy_versions":
        response.choices[index].policy_versions = draw(
            st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.integers(-1, 4)), min_size=1, max_size=3)
        )
    elif where in ("prompt_logprobs", "prompt_token_ids"):
        path = where
        if where == "prompt_logprobs":
            path += "." + draw(st.sampled_from(["ids", "values", "ranks", "offsets"]))
        response = _mutate(draw, response, path)
    elif where == "routed_experts.start":
        choice = response.choices[index]
        if choice.routed_experts is not None:
            shift = draw(st.integers(-1, 1))
            response = put(response, f"{index}.{where}", choice.routed_experts.start + shift)
    else:
        response.choices[index] = _mutate(draw, response.choices[index], where)
    return response, count, logprobs


def _mutate(draw: Any, holder: Any, path: str) -> Any:
    array = holder
    for part in path.split("."):
        array = getattr(array, part) if array is not None else None
    if array is None or array.size == 0:
        return holder
    array = array.copy()
    kind = draw(st.sampled_from(["entry", "drop", "twice", "swap"]))
    at = draw(st.integers(0, len(array) - 1))
    if kind == "entry":
        if array.dtype.kind == "f":
            new: Any = draw(st.sampled_from([np.nan, -np.inf, np.inf, -1.0]))
        else:
            new = draw(st.integers(0 if array.dtype.kind == "u" else -1, 5))
        array.reshape(len(array), -1)[at, -1] = new
    elif kind == "drop":
        array = np.delete(array, at, axis=0)
    elif kind == "twice":
        array = np.concatenate([array, array[at : at + 1]])
    else:
        other = draw(st.integers(0, len(array) - 1))
        array[[at, other]] = array[[other, at]]
    return put(holder, path, array)


@settings(max_examples=600, deadline=None)
@given(mutated())
def test_one_change_is_refused_exactly_where_a_naive_check_refuses_it(case: tuple[GenerateResponse, int, bool]) -> None:
    response, count, logprobs = case
    broken = broken_rule(response, choices=count, logprobs=logprobs)
    found = None
    try:
        check_response(response, choices=count, prompt_tokens=None, logprobs=logprobs)
    except EngineProtocolError as error:
        found = error.message
    assert (found is None) is (broken is None), (found, broken)


@settings(max_examples=100, deadline=None)
@given(responses())
def test_every_generated_answer_is_valid_by_both_checks(response: GenerateResponse) -> None:
    count, logprobs = len(response.choices), response.choices[0].logprobs is not None
    assert broken_rule(response, choices=count, logprobs=logprobs) is None
    check_response(response, choices=count, prompt_tokens=response.usage.prompt_tokens, logprobs=logprobs)
