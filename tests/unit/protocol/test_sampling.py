"""Sampling parameters: each field's limits, what is merged, what is taken out, what is refused by name."""

import math
from typing import Any

import pytest

from rollplane.errors import InvalidRequest
from rollplane.protocol.sampling import FIELD_NAMES, parse_sampling

VLLM_FIELDS = [
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "stream_interval",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "extra_args",
    "bad_words",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "repetition_detection",
    "routed_experts_prompt_start",
    "watermarking",
]


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_sampling(fields)
    return caught.value


def test_the_names_are_vllms() -> None:
    assert set(FIELD_NAMES) == set(VLLM_FIELDS)


@pytest.mark.parametrize("name", VLLM_FIELDS)
def test_null_is_omitted_to_the_engine_and_kept_apart_from_it(name: str) -> None:
    params = parse_sampling({name: None})
    assert getattr(params, name) is None
    assert params.given() == {}
    assert params.get(name, "default") == "default"


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, -0.0, 1, 1e300], [-1e-9, math.inf, math.nan, "1", True]),
        ("top_p", [1e-9, 1, 1.0], [0, -0.1, 1.0001, math.nan, True]),
        ("min_p", [0, 1, -0.0], [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [1e-9, 1, 5], [0, -1, math.inf, math.nan]),
        ("n", [1, 100], [0, -1, 1.0, True, "1"]),
        ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 1.0, True, 2**31]),
        ("seed", [0, -1, -(2**63), 2**63 - 1], [2**63, 1.5, -(2**63) - 1]),
        ("max_tokens", [1, 16], [0, -1, 1.0, True]),
        ("min_tokens", [0, 5], [-1, 0.0]),
        ("logprobs", [-1, 0, 5], [-2, 1.0, True]),
        ("prompt_logprobs", [-1, 0, 5], [-2, True]),
        ("prompt_logprob_start", [0, 9], [-1]),
        ("stream_interval", [1], [0]),
        ("routed_experts_prompt_start", [0, 5], [-1, 1.0, True]),
        ("stop", ["a", ["a", "b"], []], ["", [""], [1], "x" * 1025, ["x"] * 65, {"a": 1}]),
        ("stop_token_ids", [[], [0, 2**31 - 1]], [[-1], [2**31], [10**40], [True], [1.0], ["1"], 5]),
        ("allowed_token_ids", [[1]], [[], [-1], [2**31], 1]),
        ("logprob_token_ids", [[1]], [[-1], [10**30]]),
        ("logit_bias", [{"5": 1}, {5: 1.5}, {}], [{"-3": 1}, {"05": 1}, {"+5": 1}, {"5.0": 1}, {"5": math.nan}]),
        ("bad_words", [["a"], []], [[""], "a", [1]]),
        ("ignore_eos", [True, False], [1, "true"]),
        ("extra_args", [{}, {"a": [1, {"b": None}]}], [5, [], {"a": math.nan}, {"a": b"1"}, {"a": 10**40}]),
        ("structured_outputs", [{"json": "{}"}], ["json", {"a": math.inf}]),
        ("watermarking", [{"a": 1}, "x", True], [math.nan, b"1"]),
        ("output_kind", [2], [0, 1, 2.0, True, "2"]),
        ("return_token_ids", [True], [False, 1, "true"]),
    ],
)
def test_each_field_has_its_limits(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        parse_sampling({name: value})
    for value in bad:
        error = refused(**{name: value})
        assert str(error.param).startswith(f"sampling_params.{name}"), value
        assert name in error.message


def test_unknown_fields_are_refused_by_name_or_dropped_by_setting() -> None:
    assert refused(foo=1).param == "sampling_params.foo"
    assert parse_sampling({"foo": 1, "n": 2}, drop_unknown=True).given() == {"n": 2}


def test_xargs_are_merged_and_a_repeat_is_an_error() -> None:
    assert parse_sampling({"vllm_xargs": {"a": 1}, "extra_args": {"b": 2}}).extra_args == {"a": 1, "b": 2}
    assert parse_sampling({"vllm_xargs": {"a": 1}, "extra_args": None}).extra_args == {"a": 1}
    assert refused(vllm_xargs={"a": 1}, extra_args={"a": 1}).param == "sampling_params.vllm_xargs"
    assert refused(vllm_xargs=[1]).param == "sampling_params.vllm_xargs"
    assert refused(vllm_xargs={"a": 1}, extra_args=5).param == "sampling_params.extra_args"


def test_null_xargs_change_nothing() -> None:
    assert parse_sampling({"vllm_xargs": None}) == parse_sampling({})
    assert refused(vllm_xargs=None, extra_args=5).param == "sampling_params.extra_args"


@pytest.mark.parametrize("top_k", [{}, {"top_k": None}, {"top_k": 0}, {"top_k": -1}])
def test_no_top_k_has_four_spellings(top_k: dict[str, Any]) -> None:
    params = parse_sampling(top_k)
    assert params.top_k_limit == 0
    assert not params.truncates


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_truncation_is_seen(fields: dict[str, Any]) -> None:
    assert parse_sampling(fields).truncates


def test_min_tokens_over_max_tokens_is_refused_with_both() -> None:
    error = refused(min_tokens=5, max_tokens=4)
    assert (error.param, "5" in error.message, "4" in error.message) == ("sampling_params.min_tokens", True, True)


def test_every_child_has_a_64_bit_seed() -> None:
    parse_sampling({"seed": 2**63 - 2, "n": 2})
    assert refused(seed=2**63 - 1, n=2).param == "sampling_params.seed"


def test_opaque_objects_are_bounded_in_depth() -> None:
    def nested(levels: int) -> dict[str, Any]:
        tree: Any = 1
        for _ in range(levels):
            tree = {"a": tree}
        return tree

    parse_sampling({"structured_outputs": nested(64)})
    error = refused(structured_outputs=nested(65))
    assert error.message == "sampling_params.structured_outputs is nested more than 64 levels deep"


def test_the_callers_object_is_left_as_it_was() -> None:
    obj = {"vllm_xargs": {"a": 1}, "output_kind": 2, "return_token_ids": True}
    parse_sampling(obj)
    assert obj == {"vllm_xargs": {"a": 1}, "output_kind": 2, "return_token_ids": True}
