"""Admission: what an engine cannot serve exactly as asked is refused before it, by field, kind and limit."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.admission import (
    check_request,
    effective_sampling,
    request_warnings,
    resolve_max_tokens,
    wants_mask,
    wants_routes,
)
from rollplane.errors import ContextOverflow, InvalidRequest
from rollplane.protocol.info import Capabilities, EngineInfo, MoeShape
from rollplane.protocol.request import GenerateRequest, parse_request

HONOURED = ["temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "min_tokens"]
HONOURED += ["allowed_token_ids", "logit_bias", "logprob_token_ids", "prompt_logprob_token_ids"]


def info(**changes: Any) -> EngineInfo:
    caps = {"sampling_fields": HONOURED} | {
        k: changes.pop(k) for k in list(changes) if k in Capabilities.__struct_fields__
    }
    fields: dict[str, Any] = {
        "engine": "mock",
        "model": "m",
        "max_model_len": 100,
        "vocab_bound": 1000,
        "max_num_seqs": 4,
        "max_stop_token_ids": 3,
        "max_allowed_token_ids": 4,
        "max_logit_bias": 2,
        "capabilities": Capabilities(**caps),
    }
    return EngineInfo(**(fields | changes))


def request(
    *, ids: int = 10, headers: dict[str, str] | None = None, top: dict[str, Any] | None = None, **params: Any
) -> GenerateRequest:
    body = {"token_ids": list(range(ids)), "sampling_params": params, **(top or {})}
    return parse_request(json.dumps(body).encode(), headers=headers)


def refused(req: GenerateRequest, engine: EngineInfo | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_request(req, engine or info())
    return caught.value


def test_what_rl_clients_send_by_default_works_on_every_engine() -> None:
    sent = {"top_k": -1, "min_p": 0.0, "return_token_ids": True, "logprobs": 1, "skip_special_tokens": False}
    check_request(request(**sent, temperature=1.0), info(sampling_fields=[]))
    check_request(request(**sent, stop_token_ids=[7]), info())


def test_the_prompt_is_inside_the_vocabulary() -> None:
    check_request(request(ids=10), info(vocab_bound=10))
    error = refused(request(ids=10), info(vocab_bound=9))
    assert (error.param, "[0, 9)" in error.message) == ("token_ids[9]", True)


def test_a_prompt_that_leaves_no_room_says_the_maximum_context_length() -> None:
    check_request(request(ids=99), info())
    error = refused(request(ids=100), info())
    assert isinstance(error, ContextOverflow)
    assert "maximum context length is 100" in error.message


@pytest.mark.parametrize("ids", [[], [-1, 5], [[1, 2]]])
def test_ids_that_no_parser_let_in_are_refused_too(ids: Any) -> None:
    broken = msgspec.structs.replace(request(), token_ids=np.array(ids, np.int32))
    assert str(refused(broken).param).startswith("token_ids")


@pytest.mark.parametrize(
    ("given", "prompt", "cap", "tokens"),
    [
        (None, 10, None, 90),
        (None, 10, 20, 20),
        (None, 95, 20, 5),
        (16, 10, None, 16),
        (16, 10, 8, 8),
        (500, 10, None, 90),
        (1, 99, None, 1),
    ],
)
def test_omitted_max_tokens_run_to_the_end_of_the_context(
    given: int | None, prompt: int, cap: int | None, tokens: int
) -> None:
    for params in ({"max_tokens": given}, {} if given is None else {"max_tokens": given}):
        req = request(ids=prompt, **params)
        assert resolve_max_tokens(req, info(), cap=cap) == tokens
        assert effective_sampling(req, info(), cap=cap)["max_tokens"] == tokens


@pytest.mark.parametrize(
    ("params", "param", "says"),
    [
        ({"stop_token_ids": [1, 2, 3, 4]}, "stop_token_ids", "has 4 entries, the limit is 3"),
        ({"stop_token_ids": [1000]}, "stop_token_ids", r"holds 1000, outside the vocabulary \[0, 1000\)"),
        ({"allowed_token_ids": [1, 2, 3, 4, 5]}, "allowed_token_ids", "has 5 entries, the limit is 4"),
        ({"allowed_token_ids": [2_000_000_000]}, "allowed_token_ids", "holds 2000000000"),
        ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "has 3 entries, the limit is 2"),
        ({"logit_bias": {"1000": 1}}, "logit_bias", "holds 1000"),
        ({"logprob_token_ids": [5, 1000]}, "logprob_token_ids", "holds 1000"),
        ({"prompt_logprob_token_ids": [1000]}, "prompt_logprob_token_ids", "holds 1000"),
        ({"n": 5}, "n", "is 5, the engine runs at most 4"),
        ({"n": 2, "temperature": 0}, "n", "temperature 0"),
        ({"logprobs": 21}, "logprobs", "is 21, the limit is 20"),
        ({"logprobs": -1}, "logprobs", "whole vocabulary of 1000"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "not available on the mock engine"),
        ({"min_tokens": 91}, "min_tokens", "is 91, only 90 tokens fit"),
        (
            {"routed_experts_prompt_start": 10},
            "routed_experts_prompt_start",
            "is 10, must be below the prompt length of 10",
        ),
        ({"stop": ["x"]}, "stop", "use stop_token_ids"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not available on the mock engine"),
        ({"bad_words": ["x"]}, "bad_words", "not available"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "not available"),
        ({"structured_outputs": {"regex": "x"}}, "structured_outputs", "not available"),
        ({"extra_args": {"a": 1}}, "extra_args", "not available"),
    ],
)
def test_a_refusal_has_the_field_and_the_limit(params: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        check_request(request(**params), info())
    assert caught.value.param == f"sampling_params.{param}"


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"top_k": 0, "top_p": 1.0, "min_p": 0, "min_tokens": 0, "ignore_eos": False, "temperature": 1},
        {"bad_words": [], "stop": [], "stop_token_ids": [], "extra_args": {}, "logit_bias": {}},
        {"thinking_token_budget": None, "structured_outputs": None},
        {"detokenize": True, "flat_logprobs": True, "stream_interval": 5, "spaces_between_special_tokens": False},
    ],
)
def test_a_value_without_effect_is_fine_on_an_engine_without_the_field(params: dict[str, Any]) -> None:
    check_request(request(**params), info(sampling_fields=[]))


def test_stop_strings_work_where_there_is_a_tokenizer() -> None:
    check_request(request(stop=["x"]), info(stop_strings=True))


@pytest.mark.parametrize(
    ("top", "headers", "param", "able"),
    [
        ({"newer": 1}, {}, "newer", {"extra_fields": ["newer"]}),
        ({"priority": 1}, {}, "priority", {"priority": True}),
        ({"kv_transfer_params": {}}, {}, "kv_transfer_params", {"transfer_params": True}),
        ({"ec_transfer_params": {"a": 1}}, {}, "ec_transfer_params", {"transfer_params": True}),
        ({}, {"x-data-parallel-rank": "1"}, "X-data-parallel-rank", {"data_parallel_size": 2}),
        ({"rollplane": {"routed_experts": True}}, {}, "rollplane.routed_experts", {"routed_experts": True}),
        ({"rollplane": {"sampling_mask": True}}, {}, "rollplane.sampling_mask", {"sampling_mask": True}),
        ({"content_parts": [{"type": "image_url", "url": "x"}]}, {}, "content_parts[0]", {"raw_media": ["image"]}),
        (
            {"features": {"mm_hashes": {"audio": ["h"]}, "mm_placeholders": {"audio": [{"offset": 0, "length": 1}]}}},
            {},
            "features.mm_hashes.audio",
            {"features": ["audio"]},
        ),
    ],
)
def test_what_only_some_engines_take_is_refused_by_name_elsewhere(
    top: dict[str, Any], headers: dict[str, str], param: str, able: dict[str, Any]
) -> None:
    req = request(top=top, headers=headers)
    assert refused(req).param == param
    check_request(req, info(**able))


def test_why_there_are_no_routes() -> None:
    req = request(top={"rollplane": {"routed_experts": True}})
    assert "the model has no MoE layers" in refused(req).message
    moe = info(moe=MoeShape(layers=2, top_k=2, num_experts=8))
    assert "without route capture" in refused(req, moe).message


def test_an_engine_started_with_masks_says_why_it_cannot() -> None:
    masked = info(sampling_mask=True, mask_needs_truncation=True)
    check_request(request(top_p=0.9), masked)
    assert refused(request(), masked).param == "sampling_params"
    assert refused(request(top_p=0.9, temperature=0), masked).param == "sampling_params.temperature"


@pytest.mark.parametrize(
    ("asked", "able", "given"), [(None, True, True), (None, False, False), (False, True, False), (True, True, True)]
)
def test_side_channels_are_given_by_default_and_left_out_when_refused(
    asked: bool | None, able: bool, given: bool
) -> None:
    engine = info(routed_experts=able, sampling_mask=able)
    req = request(top_k=5, top={"rollplane": {"routed_experts": asked, "sampling_mask": asked}})
    assert (wants_routes(req, engine), wants_mask(req, engine)) == (given, given)


@pytest.mark.parametrize(
    ("sampling", "given"),
    [
        ({}, False),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"temperature": 0}, True),
        ({"allowed_token_ids": [1, 2]}, True),
        ({"top_k": -1, "top_p": 1.0}, False),
    ],
)
def test_a_mask_of_the_whole_vocabulary_is_made_only_for_those_who_ask(sampling: dict[str, Any], given: bool) -> None:
    engine = info(sampling_mask=True)
    assert wants_mask(request(**sampling), engine) is given
    assert wants_mask(request(**sampling, top={"rollplane": {"sampling_mask": True}}), engine)


def test_scoring_requests_get_side_channels_only_when_they_ask() -> None:
    engine = info(routed_experts=True, sampling_mask=True, prompt_logprobs=True)
    score = {"prompt_logprobs": 1, "max_tokens": 1}
    assert not wants_routes(request(**score), engine)
    assert not wants_mask(request(**score), engine)
    assert wants_routes(request(**score, top={"rollplane": {"routed_experts": True}}), engine)


def test_effective_sampling_is_neutral_where_nothing_was_given() -> None:
    found = effective_sampling(request(top_k=-1, seed=None, temperature=0.5), info())
    assert found == {
        "n": 1,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "max_tokens": 90,
    }


def test_truncation_without_a_mask_is_warned_of() -> None:
    assert "no sampling mask" in request_warnings(request(top_p=0.9, logprobs=1), info())[0]
    for fine in (request(top_p=0.9), request(logprobs=1), request(top_k=5, logprobs=1, temperature=0)):
        assert request_warnings(fine, info()) == []
    assert request_warnings(request(top_p=0.9, logprobs=1), info(sampling_mask=True)) == []
