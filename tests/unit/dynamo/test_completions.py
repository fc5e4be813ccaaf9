from typing import Any

import pytest

from rollplane.dynamo.completions import read_completion
from rollplane.errors import InvalidRequest
from rollplane.protocol.request import GenerateRequest


def read(**fields: Any) -> GenerateRequest:
    return read_completion({"model": "roll", "token_ids": [1, 2], **fields}, request_id="c-1", base_model="roll")


def test_the_projection_is_the_request() -> None:
    request = read(
        stop_conditions={"max_tokens": 5, "min_tokens": 1, "stop_token_ids_hidden": [9], "stop": ["x"]},
        sampling_options={"n": 2, "temperature": 0.5, "top_k": -1, "seed": 3, "best_of": None},
        output_options={"logprobs": 4294967295},
        eos_token_ids=[2, 9],
    )

    assert request.sampling.given() == {
        "n": 2, "temperature": 0.5, "top_k": -1, "seed": 3, "max_tokens": 5, "min_tokens": 1,
        "stop_token_ids": [9, 2], "logprobs": -1,
    }  # fmt: skip
    assert request.stream
    assert request.model is None


def test_eos_does_not_stop_what_ignores_it() -> None:
    request = read(stop_conditions={"ignore_eos": True}, eos_token_ids=[2])

    assert request.sampling.given() == {"ignore_eos": True}


def test_prompt_logprobs_are_answered_whole() -> None:
    assert not read(output_options={"prompt_logprobs": 1}).stream


def test_the_routers_priority_is_turned_round() -> None:
    assert read(routing={"priority": 5}).priority == -5


def test_salt_and_adapter_come_from_the_routing() -> None:
    request = read(model="ad1", routing={"cache_salt": "v7", "lora_name": "ad1"})

    assert (request.cache_salt, request.model) == ("v7", "ad1")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"multi_modal_data": {"image_url": [{"Url": "x"}]}}, "multi_modal_data"),
        ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding"),
        ({"eos_token_ids": [True]}, "eos_token_ids"),
        ({"stop_conditions": {"stop_token_ids_hidden": "9"}}, "stop_conditions.stop_token_ids_hidden"),
        ({"sampling_options": 3}, "sampling_options"),
        ({"token_ids": None}, "token_ids"),
    ],
)
def test_what_is_no_request_is_refused_by_the_fields_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param
