"""A request as the wire carries it, without a server."""

import contextlib

import msgspec
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from rollplane.engines.grpc import convert
from rollplane.engines.grpc.convert import (
    NEUTRAL_VALUES,
    NO_EFFECT,
    NO_TOP_K,
    SAMPLING_FIELDS,
    ConvertSettings,
    raw_item,
    to_wire,
)
from rollplane.errors import InvalidRequest, PayloadTooLarge
from rollplane.identity import media_identity
from rollplane.protocol.features import MediaItem
from rollplane.protocol.info import Capabilities, EngineInfo
from rollplane.protocol.request import ContentPart
from rollplane.protocol.sampling import FIELD_NAMES
from rollplane.testing import make_request

INFO = EngineInfo(
    engine="vllm-grpc",
    model="m",
    max_model_len=100,
    vocab_bound=1000,
    max_num_seqs=8,
    capabilities=Capabilities(sampling_fields=list(SAMPLING_FIELDS)),
)


def wire(token_ids=(5, 6, 7), *, settings=None, **asked):
    (found,) = to_wire(make_request(token_ids, **asked), INFO, settings=settings)
    return found


def as_dict(message):
    return MessageToDict(message, preserving_proto_field_name=True)


def test_what_was_left_out_is_neutral_not_the_servers_default():
    found = as_dict(wire(request_id="r1"))

    assert found == {
        "request_id": "r1",
        "token_ids": {"ids": [5, 6, 7]},
        "temperature": 1.0,
        "sampling": {"num_sequences": 1, "top_k": NO_TOP_K, "top_p": 1.0},
        "decoding": {"repetition_penalty": 1.0},
        "stopping": {"max_new_tokens": 97},
        "response": {"output_text": False, "output_token_ids": True},
    }


def test_null_is_what_was_left_out():
    names = [name for name in FIELD_NAMES if name not in ("watermarking",)]

    assert as_dict(wire(request_id="r", **dict.fromkeys(names))) == as_dict(wire(request_id="r"))


def test_what_prime_rl_sends_is_carried():
    found = wire(
        top_k=-1,
        min_p=0.0,
        return_token_ids=True,
        logprobs=1,
        stop_token_ids=[9],
        skip_special_tokens=False,
        temperature=0.7,
        max_tokens=16,
        fields={"cache_salt": "v7"},
    )

    assert found.sampling.top_k == NO_TOP_K
    assert found.sampling.min_p == 0.0
    assert found.response.output_logprobs
    assert found.response.output_candidates.top_n == 1
    assert list(found.stopping.stop_token_ids) == [9]
    assert found.response.HasField("skip_special_tokens")
    assert not found.response.skip_special_tokens
    assert found.temperature == pytest.approx(0.7)
    assert found.stopping.max_new_tokens == 16
    assert found.kv.cache_salt == "v7"


@pytest.mark.parametrize("top_k", [None, 0, -1])
def test_no_top_k_has_one_form(top_k):
    assert wire(top_k=top_k).sampling.top_k == NO_TOP_K


def test_explicit_values_are_carried():
    found = wire(
        temperature=0.0,
        top_k=5,
        top_p=0.25,
        min_p=0.5,
        seed=0,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={7: -1.5},
        allowed_token_ids=[7, 8],
        stop=["x", "y"],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        max_tokens=4,
        skip_reading_prefix_cache=True,
        fields={"priority": -3, "adapter": "a@2"},
        options={"session_id": "s"},
    )

    assert found.HasField("temperature")
    assert found.temperature == 0.0
    assert as_dict(found.sampling) == {"num_sequences": 1, "top_k": 5, "top_p": 0.25, "min_p": 0.5, "seed": "0"}
    assert as_dict(found.decoding) == {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -1.5},
        "allowed_token_ids": [7, 8],
    }
    assert as_dict(found.stopping) == {
        "max_new_tokens": 4,
        "min_new_tokens": 2,
        "stop_strings": ["x", "y"],
        "include_stop_strings": True,
        "ignore_eos": True,
    }
    assert found.kv.bypass_prefix_cache
    assert (found.priority, found.lora_name, found.session_id) == (-3, "a@2", "s")


def test_a_seed_that_was_left_out_is_none():
    assert not wire().sampling.HasField("seed")


def test_max_tokens_is_always_sent_and_never_past_the_context():
    assert wire().stopping.max_new_tokens == 97
    assert wire(max_tokens=16).stopping.max_new_tokens == 16
    assert wire(max_tokens=5000).stopping.max_new_tokens == 97


@pytest.mark.parametrize(
    ("asked", "logprobs", "candidates"),
    [
        ({}, False, {}),
        ({"logprobs": 0}, True, {}),
        ({"logprobs": 3}, True, {"top_n": 3}),
        ({"logprobs": -1}, True, {"all": True}),
        ({"logprob_token_ids": [4, 5]}, True, {"token_ids": {"ids": [4, 5]}}),
        ({"logprobs": 0, "logprob_token_ids": [4]}, True, {"token_ids": {"ids": [4]}}),
    ],
)
def test_logprobs_ask_for_what_is_needed(asked, logprobs, candidates):
    response = wire(**asked).response

    assert response.output_logprobs is logprobs
    assert as_dict(response.output_candidates) == candidates


@pytest.mark.parametrize(("count", "candidates"), [(0, {}), (2, {"top_n": 2}), (-1, {"all": True})])
def test_prompt_logprobs_come_with_the_prompts_ids(count, candidates):
    response = wire(prompt_logprobs=count, max_tokens=1).response

    assert response.prompt_logprobs
    assert response.prompt_token_ids
    assert as_dict(response.prompt_candidates) == candidates


@pytest.mark.parametrize(
    ("structure", "sent"),
    [
        ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"json": {"type": "object"}}, {"json": '{"type":"object"}'}),
        ({"json": "{}"}, {"json": "{}"}),
        ({"choice": ["a", "b"]}, {"choice": {"choices": ["a", "b"]}}),
        ({"grammar": "root ::= x", "regex": None}, {"grammar": "root ::= x"}),
        ({"json_object": True}, {"json_object": True}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
    ],
)
def test_one_structure_is_carried(structure, sent):
    decoding = as_dict(wire(structured_outputs=structure).decoding)

    assert decoding == {"repetition_penalty": 1.0, **sent}


@pytest.mark.parametrize(
    "structure",
    [{"regex": "a", "json": "{}"}, {"regex": 1}, {"choice": []}, {"choice": [1]}, {"whitespace_pattern": "a"}],
)
def test_another_structure_is_refused(structure):
    with pytest.raises(InvalidRequest) as refused:
        wire(structured_outputs=structure)

    assert refused.value.param is not None
    assert refused.value.param.startswith("sampling_params.structured_outputs")


# -- what the wire cannot say ----------------------------------------------------------------------------------------

ASKING = {
    "prompt_logprob_token_ids": [4],
    "prompt_logprob_start": 2,
    "extra_args": {"a": 1},
    "bad_words": ["x"],
    "thinking_token_budget": 4,
    "repetition_detection": {"a": 1},
    "watermarking": {"a": 1},
}


@pytest.mark.parametrize("name", ASKING)
def test_a_parameter_that_the_wire_lacks_is_refused_by_name(name):
    with pytest.raises(InvalidRequest, match="wire") as refused:
        wire(**{name: ASKING[name]})

    assert refused.value.param == f"sampling_params.{name}"


def test_every_sampling_parameter_is_carried_refused_or_without_effect():
    known = set(SAMPLING_FIELDS) | NO_EFFECT | set(ASKING) | {"routed_experts_prompt_start"}

    assert set(FIELD_NAMES) == known
    assert set(NEUTRAL_VALUES) <= set(ASKING)


def test_a_neutral_value_asks_for_nothing():
    neutral = {name: values[0] for name, values in NEUTRAL_VALUES.items()}

    assert as_dict(wire(request_id="r", **neutral)) == as_dict(wire(request_id="r"))


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"options": {"routed_experts": True}}, "rollplane.routed_experts"),
        ({"options": {"sampling_mask": True}}, "rollplane.sampling_mask"),
        ({"fields": {"extra": {"mm_processor_kwargs": {}}}}, "mm_processor_kwargs"),
        ({"fields": {"extra": {"prompt_embeds": "x"}}}, "prompt_embeds"),
        ({"logprobs": 2, "logprob_token_ids": [4]}, "sampling_params.logprob_token_ids"),
        ({"fields": {"kv_transfer_params": {"a": 2**53 + 1}}}, "kv_transfer_params.a"),
        (
            {
                "fields": {
                    "return_token_ids": True,
                    "content_parts": [ContentPart(type="image_url", url="data:image/png;base64,AA")],
                }
            },
            "return_token_ids",
        ),
    ],
)
def test_what_the_wire_cannot_say_is_refused_by_name(asked, param):
    with pytest.raises(InvalidRequest) as refused:
        wire(**asked)

    assert refused.value.param == param


def test_side_channels_that_are_left_out_are_fine():
    wire(options={"routed_experts": False, "sampling_mask": False})


def test_a_request_over_the_servers_limit_is_refused_with_the_numbers():
    with pytest.raises(PayloadTooLarge, match=r"\d+ bytes on the engine's wire, its limit is 100"):
        wire(range(1, 90), settings=ConvertSettings(max_request_bytes=100))


@pytest.mark.parametrize(
    ("ids", "fields"),
    [
        ([1], {}),
        ([2**31 - 1] * 50, {}),
        ([5, 6], {"cache_salt": "\U0001f600" * 200, "adapter": "\u20ac" * 90}),
        ([5], {"priority": -(2**31), "return_token_ids": True}),
    ],
)
def test_no_request_is_larger_than_it_is_taken_to_be_at_most(ids, fields):
    params = {"seed": -(2**63), "skip_reading_prefix_cache": True, "stop_token_ids": list(range(90))}
    names = {"request_id": "\U0001f600" * 99, "options": {"session_id": "\U0001f600" * 99}}
    request = make_request(ids, fields=fields, **names, **params)
    (made,) = to_wire(request, INFO)

    assert made.ByteSize() <= convert._at_most(request, sampling=convert._sampling_of(request.sampling))


@pytest.mark.parametrize("over", [0, 1])
def test_the_servers_limit_is_held_to_the_byte(over):
    request = make_request(range(1, 90))
    (made,) = to_wire(request, INFO)
    settings = ConvertSettings(max_request_bytes=made.ByteSize() - over)
    with pytest.raises(PayloadTooLarge, match=f"has {made.ByteSize()} bytes") if over else contextlib.nullcontext():
        to_wire(request, INFO, settings=settings)


# -- choices ---------------------------------------------------------------------------------------------------------


def test_choices_are_calls_of_their_own_with_seeds_that_follow():
    wires = to_wire(make_request(n=3, seed=7, request_id="r"), INFO)

    assert [each.request_id for each in wires] == ["r#0", "r#1", "r#2"]
    assert [each.sampling.seed for each in wires] == [7, 8, 9]
    assert [each.sampling.num_sequences for each in wires] == [1, 1, 1]


def test_choices_without_a_seed_have_none():
    assert not any(each.sampling.HasField("seed") for each in to_wire(make_request(n=3), INFO))


# -- media -----------------------------------------------------------------------------------------------------------


def image(**changes) -> MediaItem:
    return msgspec.structs.replace(
        MediaItem(modality="image", producer_hash="theirs", offset=1, length=2, kwargs=b"abc"), **changes
    )


def test_features_carry_tensors_ranges_and_an_identity_of_their_content():
    found = wire(fields={"features": [image(is_embed=np.array([True, False]))], "adapter": "a@2"}).media[0]
    digest = media_identity("image", b"abc")

    assert found.modality == 1
    assert found.features.kwargs == b"abc"
    assert found.features.mm_hash == digest
    assert found.features.identifier == f"a@2:{digest}"
    assert (found.features.offset, found.features.length) == (1, 2)
    assert list(found.features.is_embed) == [True, False]


def test_without_an_adapter_the_identifier_is_the_content_hash():
    features = wire(fields={"features": [image()]}).media[0].features

    assert features.identifier == features.mm_hash == media_identity("image", b"abc")
    assert not features.is_embed


def test_an_item_without_its_payload_cannot_be_resolved():
    with pytest.raises(InvalidRequest) as refused:
        wire(fields={"features": [image(kwargs=None)]})

    assert refused.value.param == "features.kwargs_data.image"


def test_raw_media_travel_with_their_uuids():
    parts = [
        ContentPart(type="image_url", url="data:image/png;base64,AA", uuid="u1"),
        ContentPart(type="video_url", url="https://media.example/clip", uuid=None),
    ]
    found = wire(fields={"content_parts": parts}, settings=ConvertSettings(media_hosts=("media.example",))).media

    assert [(m.modality, m.WhichOneof("source"), m.uuid) for m in found] == [(1, "data_uri", "u1"), (2, "url", "")]
    assert found[1].url == "https://media.example/clip"


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/x",
        "http://127.0.0.1/x",
        "http://media.example.evil/x",
        "http://media.example@evil/x",
        "file:///etc/passwd",
        "ftp://media.example/x",
        "//media.example/x",
        "http://[bad/x",
    ],
)
def test_media_come_from_allowed_hosts_only(url):
    with pytest.raises(InvalidRequest) as refused:
        raw_item(ContentPart(type="image_url", url=url), param="content_parts[0]", hosts=("media.example",))

    assert refused.value.param == "content_parts[0].url"


def test_transfer_params_keep_whole_numbers():
    found = wire(fields={"kv_transfer_params": {"port": 7, "rate": 0.5}, "ec_transfer_params": {}})

    assert as_dict(found.kv) == {"kv_transfer_params": {"port": 7.0, "rate": 0.5}, "ec_transfer_params": {}}


def test_requests_that_share_their_sampling_differ_in_seed_and_limit():
    first, second, third = (
        wire(request_id=f"r{i}", temperature=0.5, stop_token_ids=[7], **own)
        for i, own in enumerate([{"seed": 3, "max_tokens": 4}, {}, {"seed": 5, "max_tokens": 6, "n": 1}])
    )

    assert [each.stopping.max_new_tokens for each in (first, second, third)] == [4, 97, 6]
    assert [each.sampling.HasField("seed") for each in (first, second, third)] == [True, False, True]
    assert (first.sampling.seed, third.sampling.seed) == (3, 5)
    assert [list(each.stopping.stop_token_ids) for each in (first, second, third)] == [[7], [7], [7]]


@pytest.mark.parametrize("entries", [1, 300])
def test_long_sampling_parameters_are_said_as_short_ones_are(entries):
    bias = dict.fromkeys(range(entries), 0.5)

    for _ in range(2):
        assert dict(wire(logit_bias=bias).decoding.logit_bias) == bias
