"""Answers as JSON and msgpack: what is written is what was there, to the last bit."""

import base64
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from tests.unit.protocol.answers import float32, int32, responses

from rollplane.protocol.answer import decode_msgpack, encode_json, encode_msgpack
from rollplane.protocol.artifacts import Alternatives, PromptLogprobs, RoutedExperts, TokenLogprobs
from rollplane.protocol.events import ServedBy
from rollplane.protocol.response import Choice, GenerateResponse, Usage


def strict(body: bytes) -> Any:
    """json.loads that refuses what JSON has no word for."""

    def refuse(text: str) -> Any:
        raise AssertionError(f"not JSON: {text}")

    return json.loads(body, parse_constant=refuse)


def naive(response: GenerateResponse, *, npy: bool = False) -> dict[str, Any]:
    """The JSON tree of an answer, one Python object after the other."""
    choices = []
    for choice in response.choices:
        tree: dict[str, Any] = {
            "index": choice.index,
            "token_ids": [int(x) for x in choice.token_ids],
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "sampling_mask": None,
            "routed_experts": None,
            "policy_versions": [[version, first] for version, first in choice.policy_versions],
        }
        if choice.logprobs is not None:
            content = []
            for t, token in enumerate(tree["token_ids"]):
                entry = {"token": f"token_id:{token}", "logprob": float(choice.logprobs.values[t]), "bytes": None}
                top = choice.logprobs.alternatives
                a, b = (top.offsets[t], top.offsets[t + 1]) if top is not None else (0, 0)
                entry["top_logprobs"] = [
                    {"token": f"token_id:{top.ids[j]}", "logprob": float(top.values[j]), "bytes": None}
                    for j in range(a, b)
                ]
                content.append(entry)
            tree["logprobs"] = {"content": content}
        if choice.sampling_mask is not None:
            mask = choice.sampling_mask
            tree["sampling_mask"] = [
                [int(x) for x in mask.ids[mask.offsets[t] : mask.offsets[t + 1]]] for t in range(len(tree["token_ids"]))
            ]
        if choice.routed_experts is not None:
            array = choice.routed_experts.array
            if npy:
                buffer = io.BytesIO()
                np.save(buffer, array)
                tree["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
            else:
                tree["routed_experts"] = {
                    "data": base64.b64encode(array.tobytes()).decode(),
                    "shape": list(array.shape),
                    "start": choice.routed_experts.start,
                    "dtype": str(array.dtype),
                }
        choices.append(tree)
    usage: dict[str, Any] = {
        "prompt_tokens": response.usage.prompt_tokens,
        "completion_tokens": response.usage.completion_tokens,
        "total_tokens": response.usage.prompt_tokens + response.usage.completion_tokens,
    }
    if response.usage.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": response.usage.cached_tokens}
    prompt = None
    if response.prompt_logprobs is not None:
        part = response.prompt_logprobs
        prompt = [None]
        for t in range(1, response.usage.prompt_tokens):
            prompt.append(
                {
                    str(int(part.ids[j])): {
                        "logprob": float(part.values[j]),
                        "rank": int(part.ranks[j]) or None,
                        "decoded_token": None,
                    }
                    for j in range(part.offsets[t], part.offsets[t + 1])
                }
            )
    served = {"worker": "w", "attempt": response.served_by.attempt, "logprobs_mode": "unknown", "wire": 1}
    if response.served_by.warnings:
        served["warnings"] = response.served_by.warnings
    return {
        "request_id": response.request_id,
        "model": response.model,
        "created": response.created,
        "choices": choices,
        "usage": usage,
        "prompt_logprobs": prompt,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": None if response.prompt_token_ids is None else [int(x) for x in response.prompt_token_ids],
        "mm_placeholders": None,
        "metrics": response.metrics,
        "kv_transfer_params": response.kv_transfer_params,
        "ec_transfer_params": None,
        "rollplane": served,
    }


def same(one: Any, other: Any) -> bool:
    """Deep equality of records that hold arrays, with their dtypes."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, msgspec.Struct):
        return type(one) is type(other) and all(same(getattr(one, f), getattr(other, f)) for f in one.__struct_fields__)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def small(**changes: Any) -> GenerateResponse:
    fields: dict[str, Any] = {"index": 0, "token_ids": int32([7]), "finish_reason": "stop"}
    fields |= {k: changes.pop(k) for k in list(changes) if k in Choice.__struct_fields__}
    choice = Choice(**fields)
    usage = Usage(prompt_tokens=2, completion_tokens=int(choice.token_ids.size))
    return GenerateResponse(request_id="r", model="m", created=0, choices=[choice], usage=usage, **changes)


@settings(max_examples=150, deadline=None)
@given(responses())
def test_json_is_what_a_naive_writer_writes(response: GenerateResponse) -> None:
    assert strict(encode_json(response)) == naive(response)


def test_the_sampled_token_as_its_own_alternative_is_written_twice() -> None:
    ids, values = int32([7, 8]), float32([-0.25, -0.0])
    for other in (values, float32([-0.25, 0.0]), float32([-0.5, -1.0])):
        top = Alternatives(ids=ids, values=other, ranks=int32([1, 1]), offsets=int32([0, 1, 2]))
        response = small(token_ids=ids, logprobs=TokenLogprobs(values=values, alternatives=top))
        assert strict(encode_json(response))["choices"] == naive(response)["choices"]


@settings(max_examples=40, deadline=None)
@given(responses())
def test_json_with_npy_routes_is_what_a_naive_writer_writes(response: GenerateResponse) -> None:
    assert strict(encode_json(response, routes="npy")) == naive(response, npy=True)


@settings(max_examples=100, deadline=None)
@given(responses())
def test_msgpack_reads_back_bit_for_bit(response: GenerateResponse) -> None:
    assert same(decode_msgpack(encode_msgpack(response)), response)


@settings(max_examples=60, deadline=None)
@given(responses())
def test_the_prompts_own_token_is_the_first_key(response: GenerateResponse) -> None:
    if response.prompt_logprobs is None or response.prompt_token_ids is None:
        return
    rows = strict(encode_json(response))["prompt_logprobs"]
    assert rows[0] is None
    assert [next(iter(row)) for row in rows[1:]] == [str(x) for x in response.prompt_token_ids[1:]]


def test_float32_survives_json_exactly() -> None:
    values = float32([-0.1, -1e-30, -123.456, -0.0, np.nextafter(np.float32(-1), np.float32(0))])
    response = small(token_ids=int32([1, 2, 3, 4, 5]), logprobs=TokenLogprobs(values=values))
    content = strict(encode_json(response))["choices"][0]["logprobs"]["content"]
    back = float32([entry["logprob"] for entry in content])
    assert back.tobytes() == values.tobytes()


def test_a_choice_without_tokens_has_empty_logprobs_and_typed_empty_routes() -> None:
    response = small(
        token_ids=int32([]),
        logprobs=TokenLogprobs(values=float32([])),
        routed_experts=RoutedExperts(array=np.empty((0, 4, 2), np.uint8)),
    )
    choice = strict(encode_json(response))["choices"][0]
    assert choice["logprobs"] == {"content": []}
    assert choice["routed_experts"] == {"data": "", "shape": [0, 4, 2], "start": 0, "dtype": "uint8"}


def test_clients_find_the_routes_by_their_first_bytes() -> None:
    response = small(routed_experts=RoutedExperts(array=np.array([[[1, 2]], [[0, 1]]], np.uint8)))
    assert b'"routed_experts":{"data":"' in encode_json(response)


def test_an_unknown_rank_is_null() -> None:
    part = PromptLogprobs(ids=int32([9]), values=float32([-1]), ranks=int32([0]), offsets=int32([0, 0, 1]))
    tree = strict(encode_json(small(prompt_logprobs=part)))
    assert tree["prompt_logprobs"] == [None, {"9": {"logprob": -1.0, "rank": None, "decoded_token": None}}]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_number_outside_json_is_ever_written(bad: float) -> None:
    response = small(metrics={"a": bad}, logprobs=TokenLogprobs(values=float32([bad])))
    assert strict(encode_json(response))["metrics"] == {"a": None}


def test_the_server_says_who_answered_and_how() -> None:
    served = ServedBy(worker="w0", instance="i", attempt=2, logprobs_mode="sampling", recomputed=[(0, 5)])
    tree = strict(encode_json(small(served_by=served)))["rollplane"]
    assert tree == {
        "worker": "w0",
        "instance": "i",
        "attempt": 2,
        "logprobs_mode": "sampling",
        "recomputed": [[0, 5]],
        "wire": 1,
    }


def test_an_answer_of_another_wire_version_is_refused() -> None:
    tree = msgspec.msgpack.decode(encode_msgpack(small()))
    assert tree["wire"] == 1
    with pytest.raises(msgspec.ValidationError, match="wire version 2"):
        decode_msgpack(msgspec.msgpack.encode(tree | {"wire": 2}))


@pytest.mark.parametrize(
    "body", [b"", b"\x80", b"\xff", b"\xc1", b"\x91" * 100_000, b"\x81\xa7metrics" + b"\x91" * 5000]
)
def test_a_foreign_msgpack_body_is_a_decode_error(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_msgpack(body)
