import base64
from typing import Any

import pytest
from tests.models.qwen_features import image_fields, payload

from rollplane.dynamo.envelope import is_generate, read_generate
from rollplane.errors import InvalidRequest
from rollplane.identity import media_identity, routing_marker
from rollplane.protocol.request import GenerateRequest

PAYLOAD = payload(**image_fields(grid=(1, 2, 2)))
FEATURES = {
    "mm_hashes": {"image": ["theirs"]},
    "mm_placeholders": {"image": [{"offset": 1, "length": 1}]},
    "kwargs_data": {"image": [base64.b64encode(PAYLOAD).decode()]},
}
MARKER = routing_marker(media_identity("image", PAYLOAD))
DEEP: dict[str, Any] = {}
for _ in range(3000):
    DEEP = {"a": DEEP}


def message(
    *, tito: dict[str, Any] | None = None, extra: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """What the frontend sends for a minimal request, with changes."""
    sent = {"request_id": "r-1", "sampling_params": {"max_tokens": 2}, "stream": False, "priority": 0, **(tito or {})}
    return {
        "model": "roll",
        "token_ids": [1, 2, 3],
        "stop_conditions": {"max_tokens": 2, "ignore_eos": False},
        "sampling_options": {"n": 1},
        "output_options": {},
        "routing": {"priority": 0, "priority_jump": 0.0},
        "extra_args": {"vllm_tito": sent, **(extra or {})},
        **fields,
    }


def read(sent: dict[str, Any]) -> GenerateRequest:
    return read_generate(sent, request_id="r-1", base_model="roll")


def test_the_minimal_message_is_the_request_that_the_caller_sent() -> None:
    request = read(message())

    assert request.token_ids.tolist() == [1, 2, 3]
    assert request.sampling.given() == {"max_tokens": 2}
    assert (request.request_id, request.model, request.stream, request.cache_salt) == ("r-1", None, False, None)


def test_the_callers_own_parameters_count_where_the_projection_says_otherwise() -> None:
    request = read(
        message(
            tito={"sampling_params": {"n": 2, "temperature": 0.7, "stop": ["x"], "logprobs": -1}},
            sampling_options={"n": 1, "temperature": 0.699999988},
            output_options={"logprobs": 4294967295},
        )
    )

    assert request.sampling.given() == {"n": 2, "temperature": 0.7, "stop": ["x"], "logprobs": -1}


def test_priority_keeps_the_callers_sign() -> None:
    request = read(message(tito={"priority": 7}, routing={"priority": -7}))

    assert request.priority == 7


@pytest.mark.parametrize("routed", [{"cache_salt": "v7"}, {"cache_salt": "dynamo-cache-salt:v7"}, {}])
def test_a_salt_is_the_callers_without_dynamos_prefix(routed: dict[str, Any]) -> None:
    assert read(message(tito={"cache_salt": "v7"}, routing=routed)).cache_salt == "v7"


def test_a_salt_in_the_sampling_parameters_is_taken() -> None:
    assert read(message(tito={"sampling_params": {"cache_salt": "v7"}})).cache_salt == "v7"


def test_an_adapter_is_named_by_the_router_and_the_caller_alike() -> None:
    request = read(message(model="ad1", tito={"model": "ad1"}, routing={"lora_name": "ad1"}))

    assert request.model == "ad1"


def test_the_base_models_name_is_no_adapter() -> None:
    assert read(message(tito={"model": "roll"})).model is None


def test_the_routers_rank_is_kept() -> None:
    assert read(message(routing={"dp_rank": 1})).data_parallel_rank == 1


def test_features_get_the_identity_of_their_content_and_agree_with_the_markers() -> None:
    request = read(message(tito={"features": FEATURES}, extra={"dynamo_mm_routing_hashes": [MARKER]}))

    assert request.features is not None
    assert request.features[0].mm_hash == media_identity("image", PAYLOAD)


def test_features_that_the_router_did_not_use_are_served() -> None:
    assert read(message(tito={"features": FEATURES})).features is not None


def test_unknown_fields_of_the_caller_are_kept_for_the_engine() -> None:
    assert read(message(tito={"mystery": {"a": 1}})).extra == {"mystery": {"a": 1}}


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (message(token_ids=None), "token_ids"),
        (message(token_ids="1,2"), "token_ids"),
        (message(token_ids=[]), "token_ids"),
        (message(token_ids=[1, True]), "token_ids[1]"),
        (message(token_ids=[1, "2"]), "token_ids[1]"),
        (message(token_ids=[2**70]), "token_ids"),
        (message(token_ids=[1, -1]), "token_ids[1]"),
        (message(extra_args=7), "extra_args"),
        (message(extra={"vllm_tito": "x"}), "extra_args.vllm_tito"),
        (message(tito={"token_ids": [1]}), "extra_args.vllm_tito.token_ids"),
        (message(tito={"stream": True}), "stream"),
        (message(tito={"sampling_params": None}), "sampling_params"),
        (message(tito={"sampling_params": {"top_k": "x"}}), "sampling_params.top_k"),
        (message(tito={"sampling_params": {"nope": 1}}), "sampling_params.nope"),
        (message(tito={"cache_salt": "a"}, routing={"cache_salt": "b"}), "routing.cache_salt"),
        (message(routing={"cache_salt": "b"}), "routing.cache_salt"),
        (message(routing={"cache_salt": 7}), "routing.cache_salt"),
        (message(tito={"cache_salt": ""}), "cache_salt"),
        (message(routing=[1]), "routing"),
        (message(routing={"lora_name": 1}), "routing.lora_name"),
        (message(tito={"model": "ad1"}, routing={"lora_name": "ad2"}), "routing.lora_name"),
        (message(routing={"dp_rank": -1}), "routing.dp_rank"),
        (message(routing={"dp_rank": True}), "routing.dp_rank"),
        (message(routing={"dp_rank": DEEP}), "routing.dp_rank"),
        (message(token_ids=["\ud800"]), "token_ids"),
        (message(extra={"vllm_tito": {1: 2}}), "extra_args.vllm_tito"),
        (message(tito={"priority": 2**64}), "priority"),
        (message(tito={"sampling_params": {"seed": 2**70}}), "sampling_params.seed"),
        (message(tito={"sampling_params": {"stop": ["a", DEEP]}}), "sampling_params"),
        (message(tito={"cache_salt": "\ud800"}), "cache_salt"),
        (message(tito={"kv_transfer_params": {"a": [-(2**70)]}}), "kv_transfer_params.a[0]"),
        (message(multi_modal_data={"image_url": []}), "multi_modal_data"),
        (message(tito={"rollplane": {"max_policy_lag": 1}}), "rollplane.max_policy_lag"),
    ],
)
def test_a_malformed_message_is_refused_by_the_fields_name(sent: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(sent)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("markers", "features", "says"),
    [
        ("x", FEATURES, "must be an array"),
        (["x"], FEATURES, "64 hex digits"),
        ([7], FEATURES, "64 hex digits"),
        ([MARKER, MARKER], FEATURES, "has 2 entries, features has 1 items"),
        ([MARKER], None, "has 1 entries, features has 0 items"),
        (["0" * 64], FEATURES, "the content of item 0 (image) has"),
    ],
)
def test_markers_that_are_not_the_contents_are_refused(markers: Any, features: Any, says: str) -> None:
    tito = {} if features is None else {"features": features}
    with pytest.raises(InvalidRequest, match="dynamo_mm_routing_hashes") as caught:
        read(message(tito=tito, extra={"dynamo_mm_routing_hashes": markers}))
    assert says in caught.value.message


def test_a_message_without_the_callers_body_is_no_generate() -> None:
    assert is_generate(message())
    assert not is_generate({"token_ids": [1], "extra_args": {}})
    assert not is_generate({"token_ids": [1]})
