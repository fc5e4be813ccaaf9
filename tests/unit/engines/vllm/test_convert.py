"""Requests as vLLM's fields and vLLM's outputs as events, on objects shaped like vLLM's."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.engines.vllm import convert
from rollplane.engines.vllm.convert import ChoicePlan
from rollplane.errors import EngineFailed, EngineProtocolError, InvalidRequest
from rollplane.protocol.info import Capabilities, EngineInfo, MoeShape
from rollplane.protocol.sampling import FIELD_NAMES
from rollplane.testing import make_request


@dataclass
class FlatLogprobs:
    """The shape of vLLM's class of this name."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)

    def position(self, *entries: tuple[int, float, int | None]) -> "FlatLogprobs":
        self.start_indices.append(len(self.token_ids))
        for token_id, logprob, rank in entries:
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
        self.end_indices.append(len(self.token_ids))
        return self


@dataclass
class Mask:
    token_ids: list[list[int]]


@dataclass
class Output:
    """The shape of vLLM's CompletionOutput."""

    token_ids: list[int]
    index: int = 0
    logprobs: Any = None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sampling_mask: Any = None


def info(**changes: Any) -> EngineInfo:
    caps = changes.pop("caps", {})
    return EngineInfo(
        engine="vllm",
        model="m",
        max_model_len=100,
        vocab_bound=1000,
        max_num_seqs=8,
        capabilities=Capabilities(sampling_fields=list(FIELD_NAMES), stop_strings=True, **caps),
        **changes,
    )


def plan(**changes: Any) -> ChoicePlan:
    defaults: dict[str, Any] = {
        "prompt_tokens": 3,
        "logprobs": False,
        "alternatives": 0,
        "fixed_ids": False,
        "routes": False,
        "routes_start": 0,
        "mask": False,
        "moe": None,
    }
    return ChoicePlan(**{**defaults, **changes})


def fields_of(*, at: EngineInfo | None = None, index: int = 0, **asked: Any) -> dict[str, Any]:
    stream = asked.pop("stream", False)
    fields = asked.pop("fields", None)
    request = make_request([5, 6, 7], stream=stream, fields=fields, **asked)
    return convert.sampling_fields(request, at or info(), index=index, vocab_tokens=1024)


# Requests ------------------------------------------------------------------------------------------------------------


def test_what_is_omitted_is_sent_neutral_and_unlimited() -> None:
    assert fields_of() == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "max_tokens": 97,
        "detokenize": False,
        "output_kind": "FINAL_ONLY",
        "flat_logprobs": True,
        "skip_clone": True,
    }


def test_null_is_omitted() -> None:
    names = {name: None for name in FIELD_NAMES if name != "n"}

    assert fields_of(**names) == fields_of()


def test_an_explicit_16_stays_16() -> None:
    assert fields_of(max_tokens=16)["max_tokens"] == 16


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_no_top_k_is_zero_however_it_is_said(top_k: int | None) -> None:
    assert fields_of(top_k=top_k)["top_k"] == 0


def test_where_masks_are_on_no_top_k_is_the_vocabulary() -> None:
    masks = info(caps={"sampling_mask": True, "mask_needs_truncation": True})

    assert fields_of(at=masks, top_p=0.9)["top_k"] == 1024
    assert fields_of(at=masks, top_k=7)["top_k"] == 7


def test_text_is_made_for_stop_strings_only() -> None:
    with_stop = fields_of(stop="x", include_stop_str_in_output=True, skip_special_tokens=False)
    without = fields_of(include_stop_str_in_output=True, skip_special_tokens=False, detokenize=True)

    assert (with_stop["stop"], with_stop["detokenize"]) == (["x"], True)
    assert (with_stop["include_stop_str_in_output"], with_stop["skip_special_tokens"]) == (True, False)
    assert without["detokenize"] is False
    assert not {"stop", "include_stop_str_in_output", "skip_special_tokens"} & set(without)


def test_choices_are_single_requests_with_seed_plus_index_and_one_scores_the_prompt() -> None:
    first, third = (fields_of(n=4, seed=7, prompt_logprobs=2, index=i) for i in (0, 2))

    assert (first["n"], first["seed"], first["prompt_logprobs"]) == (1, 7, 2)
    assert (third["n"], third["seed"]) == (1, 9)
    assert "prompt_logprobs" not in third


def test_streams_are_cumulative() -> None:
    assert fields_of(stream=True)["output_kind"] == "CUMULATIVE"


def test_transfer_params_go_where_vllm_looks_for_them() -> None:
    made = fields_of(extra_args={"a": 1}, fields={"kv_transfer_params": {"k": 2}, "ec_transfer_params": {"e": 3}})

    assert made["extra_args"] == {"a": 1, "kv_transfer_params": {"k": 2}, "ec_transfer_params": {"e": 3}}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": 0.0099}, "sampling_params.temperature"),
        ({"seed": -1}, "sampling_params.seed"),
        ({"seed": -3, "n": 3}, "sampling_params.seed"),
        ({"logprob_token_ids": [1, 2]}, "sampling_params.logprob_token_ids"),
        ({"logprob_token_ids": [1, 1], "logprobs": 2}, "sampling_params.logprob_token_ids"),
        ({"logprob_token_ids": [1, 2], "logprobs": 1}, "sampling_params.logprobs"),
        ({"watermarking": 1}, "sampling_params.watermarking"),
        ({"extra_args": {"ec_transfer_params": {}}}, "sampling_params.extra_args.ec_transfer_params"),
    ],
)
def test_what_vllm_would_bend_is_refused(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        convert.check_for_vllm(make_request(**asked), info())

    assert refusal.value.param == param


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 0.01}, {"seed": 0}, {"seed": -5, "n": 3}])
def test_what_vllm_takes_as_it_is_passes(asked: dict[str, Any]) -> None:
    convert.check_for_vllm(make_request(**asked), info())


def test_fields_that_need_something_are_served_where_it_is() -> None:
    everything = convert.served_fields(FIELD_NAMES, tokenizer=True, seeds=True, v2_runner=True, reasoning=True)
    nothing = convert.served_fields(FIELD_NAMES, tokenizer=False, seeds=False, v2_runner=False, reasoning=False)

    assert everything == list(FIELD_NAMES)
    assert set(FIELD_NAMES) - set(nothing) == {
        "stop",
        "seed",
        "bad_words",
        "structured_outputs",
        "thinking_token_budget",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
    }
    assert convert.served_fields(["n"], tokenizer=True, seeds=True, v2_runner=True, reasoning=True) == ["n"]


# Logprobs ------------------------------------------------------------------------------------------------------------


def test_sampled_logprobs_come_first_and_alternatives_are_the_most_likely() -> None:
    flat = (
        FlatLogprobs()
        .position((9, -2.0, 5), (1, -0.1, 1), (2, -0.5, 2))
        .position((1, -0.2, 1), (1, -0.2, 1), (3, -1.0, 2))
    )

    got, floored = convert.read_logprobs(flat, plan(logprobs=True, alternatives=2))

    assert (got.values.tolist(), floored) == (np.float32([-2.0, -0.2]).tolist(), 0)
    assert got.ranks is not None
    assert got.ranks.tolist() == [5, 1]
    top = got.alternatives
    assert top is not None
    assert (top.ids.tolist(), top.ranks.tolist(), top.offsets.tolist()) == ([1, 2, 1, 3], [1, 2, 1, 2], [0, 2, 4])


def test_the_tail_of_growing_logprobs_is_read() -> None:
    flat = FlatLogprobs()
    for i in range(4):
        flat.position((i, -float(i), i + 1))

    got, _ = convert.read_logprobs(flat, plan(logprobs=True), sent=3)
    none, _ = convert.read_logprobs(flat, plan(logprobs=True), sent=4)

    assert (got.values.tolist(), got.alternatives) == ([-3.0], None)
    assert none.values.size == 0


def test_infinite_alternatives_are_floored_and_counted_and_the_sampled_value_never_is() -> None:
    flat = FlatLogprobs().position((9, float("nan"), 1), (1, -np.inf, 1), (2, -0.5, 2))

    got, floored = convert.read_logprobs(flat, plan(logprobs=True, alternatives=2))

    assert np.isnan(got.values[0])
    assert got.alternatives is not None
    assert (got.alternatives.values.tolist(), floored) == ([-9999.0, -0.5], 1)


def test_named_ids_have_no_rank() -> None:
    flat = FlatLogprobs().position((9, -1.0, 4), (5, -2.0, 1), (6, -3.0, 2))

    got, _ = convert.read_logprobs(flat, plan(logprobs=True, alternatives=2, fixed_ids=True))

    assert got.alternatives is not None
    assert (got.alternatives.ids.tolist(), got.alternatives.ranks.tolist()) == ([5, 6], [0, 0])


def test_the_prompts_own_token_comes_first_and_once() -> None:
    flat = (
        FlatLogprobs()
        .position()
        .position((7, -0.1, 1), (7, -0.1, 1), (8, -3.0, 2))
        .position((9, -4.0, 9), (1, -np.inf, 1), (2, -1.0, 2))
    )

    got, floored = convert.read_prompt_logprobs(flat, prompt_tokens=3)

    assert got.ids.tolist() == [7, 8, 9, 1, 2]
    assert got.offsets.tolist() == [0, 0, 2, 5]
    assert (got.ranks.tolist(), floored) == ([1, 2, 9, 1, 2], 1)


def test_prompt_logprobs_of_another_length_are_an_engine_error() -> None:
    with pytest.raises(EngineProtocolError, match="1 prompt logprobs for 2"):
        convert.read_prompt_logprobs(FlatLogprobs().position(), prompt_tokens=2)


def test_scores_of_named_ids_are_json() -> None:
    assert convert.read_fixed_scores(np.array([[-1.5, -np.inf]])) == [[-1.5, -9999.0]]
    assert convert.read_fixed_scores(None) is None


# Choices -------------------------------------------------------------------------------------------------------------


def test_a_delta_is_what_was_not_sent() -> None:
    event, _ = convert.read_delta(Output([4, 5, 6]), plan(), index=2, sent=1)

    assert event is not None
    assert (event.index, event.token_ids.tolist(), event.finish_reason) == (2, [5, 6], None)
    assert convert.read_delta(Output([4]), plan(), index=0, sent=1) == (None, 0)


@pytest.mark.parametrize(
    ("said", "reason", "finish", "stop"),
    [
        ("stop", 17, "stop", 17),
        ("stop", "x", "stop", "x"),
        ("stop", None, "stop", None),
        ("length", None, "length", None),
        ("abort", None, "abort", None),
        ("repetition", "repetition_detected", "repetition", None),
    ],
)
def test_endings_are_named(said: str, reason: Any, finish: str, stop: Any) -> None:
    output = Output([4], finish_reason=said, stop_reason=reason)

    event, _ = convert.read_ending(output, plan(), index=0, sent=0, spans=[("v", 0)])

    assert (event.finish_reason, event.stop_reason, event.policy_versions) == (finish, stop, [("v", 0)])


def test_an_ending_without_new_tokens_still_ends_the_choice() -> None:
    """The last event is there, and side payloads cover the whole choice."""
    output = Output(
        [4, 5], finish_reason="abort", logprobs=FlatLogprobs().position((4, -1.0, 1)).position((5, -1.0, 1))
    )

    event, _ = convert.read_ending(output, plan(logprobs=True), index=0, sent=2, spans=[])

    assert event.token_ids.size == 0
    assert event.logprobs is not None
    assert event.finish_reason == "abort"


def test_an_error_of_vllm_is_an_error_of_the_request() -> None:
    with pytest.raises(EngineFailed):
        convert.finish_reason(Output([], finish_reason="error"))
    with pytest.raises(EngineProtocolError, match="'tired'"):
        convert.finish_reason(Output([], finish_reason="tired"))


def test_missing_logprobs_are_an_engine_error() -> None:
    with pytest.raises(EngineProtocolError, match="returned none"):
        convert.read_ending(Output([4], finish_reason="stop"), plan(logprobs=True), index=0, sent=0, spans=[])


# Routes and masks ----------------------------------------------------------------------------------------------------

MOE = MoeShape(layers=2, top_k=2, num_experts=512)


@pytest.mark.parametrize(("top", "dtype"), [(7, "uint8"), (255, "uint8"), (256, "uint16"), (511, "uint16")])
def test_routes_are_narrow_and_say_their_start(top: int, dtype: str) -> None:
    array = np.array([[[0, top], [1, 2]]], dtype=np.int32)

    got = convert.read_routes(Output([1], routed_experts=array), plan(moe=MOE, routes=True, routes_start=3), tokens=1)

    assert got is not None
    assert (got.array.dtype.name, got.start, got.array.tolist()) == (dtype, 3, array.tolist())


def test_an_expert_that_the_model_has_not_is_an_engine_error() -> None:
    for bad in (512, -1):
        array = np.array([[[0, bad], [1, 2]]], dtype=np.int32)
        with pytest.raises(EngineProtocolError, match=str(bad)):
            convert.read_routes(Output([1], routed_experts=array), plan(moe=MOE, routes=True), tokens=1)


def test_no_tokens_have_typed_empty_routes() -> None:
    got = convert.read_routes(Output([]), plan(moe=MOE, routes=True), tokens=0)

    assert got is not None
    assert (got.array.shape, got.array.dtype.name) == ((0, 2, 2), "uint8")
    event = convert.empty_ending(plan(moe=MOE, routes=True, mask=True, logprobs=True), index=1, spans=[("v", 0)])
    assert event.routed_experts is not None
    assert event.sampling_mask is not None
    assert event.logprobs is not None
    assert (event.routed_experts.array.shape, event.sampling_mask.offsets.tolist()) == ((0, 2, 2), [0])


def test_masks_become_csr() -> None:
    got = convert.read_mask(Mask([[1, 2, 3], [9], [4, 5]]))

    assert got is not None
    assert (got.ids.tolist(), got.offsets.tolist()) == ([1, 2, 3, 9, 4, 5], [0, 3, 4, 6])
    assert convert.read_mask(None) is None


def test_plans_follow_what_is_asked_and_what_there_is() -> None:
    routes = info(moe=MOE, caps={"routed_experts": True})
    asked = convert.plan_choices(make_request(logprobs=2, routed_experts_prompt_start=1), routes)
    scores = convert.plan_choices(make_request(prompt_logprobs=1, max_tokens=1), routes)

    assert (asked.routes, asked.routes_start, asked.logprobs, asked.alternatives) == (True, 1, True, 2)
    assert not scores.routes
    assert not convert.plan_choices(make_request(), info()).routes


def test_timings_are_what_was_measured() -> None:
    class Stats(msgspec.Struct):
        num_preemptions: int = 1
        queued_ts: float = 1.0
        scheduled_ts: float = 1.5
        first_token_ts: float = 0.0
        last_token_ts: float = 0.0

    assert convert.read_timings(Stats()) == {"preemptions": 1, "queue_s": 0.5}
    assert convert.read_timings(None) is None


def test_transfer_parameters_that_nobody_reads_are_refused_with_the_flag() -> None:
    both = make_request(fields={"kv_transfer_params": {"a": 1}, "ec_transfer_params": {"b": 2}})
    convert.check_transfer(both, kinds=frozenset(convert.TRANSFER_KEYS))
    with pytest.raises(InvalidRequest, match="--ec-transfer-config") as refusal:
        convert.check_transfer(both, kinds=frozenset({"kv_transfer_params"}))
    assert refusal.value.param == "ec_transfer_params"
    convert.check_transfer(make_request(), kinds=frozenset())
