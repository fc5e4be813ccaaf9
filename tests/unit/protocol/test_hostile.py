"""Hostile bodies: whatever comes, the answer is a record or one of our errors, small and soon."""

import contextlib
import time
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplane.errors import MAX_MESSAGE_CHARS, InvalidRequest, PayloadTooLarge, RollplaneError
from rollplane.protocol.hop import decode_hop_request, encode_hop_request
from rollplane.protocol.request import JSON, MSGPACK, GenerateRequest, parse_request

HEAD, TAIL = b'{"token_ids":[1,2],"sampling_params":', b"}"
PACKED_HEAD = b"\x83\xa9token_ids\x91\x05\xafsampling_params\x80"


def sampling(text: bytes) -> bytes:
    return HEAD + text + TAIL


def field(name: bytes, text: bytes) -> bytes:
    return HEAD + b'{},"' + name + b'":' + text + TAIL


def outcome(body: bytes, content_type: str = JSON) -> RollplaneError | GenerateRequest:
    """The record or the error, which must be ours, small, and found by one process in well under a second."""
    began_s = time.process_time()
    found: RollplaneError | GenerateRequest
    try:
        found = parse_request(body, content_type=content_type)
    except RollplaneError as error:
        found = error
    assert time.process_time() - began_s < 2.0
    if isinstance(found, RollplaneError):
        assert len(found.message) <= MAX_MESSAGE_CHARS
        assert found.status in (400, 413, 415)
    return found


DEEP = 100_000
MANY = 10_000_000
REFUSED = {
    "deep objects": b'{"a":' * DEEP,
    "deep arrays": b"[" * DEEP,
    "deep ids": b'{"token_ids":' + b"[" * DEEP + b"]" * DEEP + b',"sampling_params":{}}',
    "deep sampling": sampling(b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "deep features": field(b"features", b"[" * DEEP + b"]" * DEEP),
    "deep transfer": field(b"kv_transfer_params", b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
    "deep unknown field": field(b"x", b"[" * 900 + b"]" * 900),
    "deep schema": sampling(b'{"structured_outputs":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}"),
    "not UTF-8": field(b"cache_salt", b'"\xff\xfe"'),
    "not UTF-8 in a key": field(b"\xff", b"1"),
    "a lone surrogate": field(b"cache_salt", b'"\\ud800"'),
    "a lone surrogate in an id": field(b"request_id", b'"\\udfff"'),
    "a lone surrogate in a stop string": sampling(b'{"stop":["\\ud83d"]}'),
    "UTF-16": '{"token_ids":[1],"sampling_params":{}}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + sampling(b"{}"),
    "nothing": b"",
    "null": b"null",
    "trailing bytes": sampling(b"{}") + b"{}",
    "a cut": sampling(b"{}")[:-1],
    "NaN": sampling(b'{"temperature":NaN}'),
    "Infinity": sampling(b'{"temperature":Infinity}'),
    "1e999": sampling(b'{"temperature":1e999}'),
    "-1e999": field(b"kv_transfer_params", b'{"a":-1e999}'),
    "an integer of 400 digits": sampling(b'{"seed":1' + b"0" * 400 + b"}"),
    "an integer of 100,000 digits": sampling(b'{"seed":1' + b"0" * DEEP + b"}"),
    "a fraction of 100,000 digits": sampling(b'{"top_k":0.' + b"0" * DEEP + b"1}"),
    "a huge priority": field(b"priority", b"1" + b"0" * DEEP),
    "a comment": sampling(b"{}/* */"),
    "single quotes": b"{'token_ids':[1]}",
    "10 MB of ids": b'{"token_ids":[' + b"1," * (MANY // 2) + b'1],"sampling_params":{}}',
    "10 MB of ids, the last a boolean": b'{"token_ids":[' + b"1," * (MANY // 2) + b'true],"sampling_params":{}}',
    "10 MB of ids, the last negative": b'{"token_ids":[' + b"1," * (MANY // 2) + b'-1],"sampling_params":{}}',
    "an id of 10 MB": b'{"token_ids":[' + b"1" * MANY + b'],"sampling_params":{}}',
    "a salt of 10 MB": field(b"cache_salt", b'"' + b"a" * MANY + b'"'),
    "a request id of 10 MB": field(b"request_id", b'"' + b"a" * MANY + b'"'),
    "two salts of 5 MB": sampling(
        b'{"cache_salt":"' + b"a" * 5_000_000 + b'"},"cache_salt":"' + b"b" * 5_000_000 + b'"'
    ),
    "an unknown name of 10 MB": sampling(b'{"' + b"a" * MANY + b'":1}'),
    "a flag of 10 MB": sampling(b'{"return_token_ids":"' + b"a" * MANY + b'"}'),
    "3 million stop strings": sampling(b'{"stop":[' + b'"",' * 3_000_000 + b'""]}'),
    "300,000 content parts": field(
        b"content_parts", b"[" + b",".join([b'{"type":"image_url","url":"x"}'] * 300_000) + b"]"
    ),
    "a million unknown fields": HEAD + b"{}," + b",".join(b'"%d":1' % i for i in range(800_000)) + TAIL,
    "a number of 10 MB in an unknown field": field(b"x", b"1" * MANY),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_a_hostile_json_body_is_refused(body: bytes) -> None:
    assert isinstance(outcome(body), RollplaneError)


@pytest.mark.parametrize(
    ("name", "text"),
    [(b"temperature", b"1e999"), (b"seed", b"1" + b"0" * DEEP), (b"stop", b'"\xff"')],
)
def test_a_value_that_cannot_be_decoded_is_named(name: bytes, text: bytes) -> None:
    error = outcome(sampling(b'{"n":1,"' + name + b'":' + text + b"}"))
    assert isinstance(error, InvalidRequest)
    assert error.param == f"sampling_params.{name.decode()}"


REFUSED_PACKED = {
    "deep arrays": b"\x91" * DEEP + b"\x01",
    "deep unknown field": PACKED_HEAD + b"\xa1x" + b"\x91" * DEEP + b"\x01",
    "deep ids": b"\x82\xa9token_ids" + b"\x91" * DEEP + b"\x01\xafsampling_params\x80",
    "an extension as ids": b"\x82\xa9token_ids\xd4\x05\x01\xafsampling_params\x80",
    "an extension in an unknown field": PACKED_HEAD + b"\xa1x\xd4\x05\x01",
    "a timestamp in an unknown field": PACKED_HEAD + b"\xa1x\xd6\xff\x00\x00\x00\x01",
    "an extension in transfer params": PACKED_HEAD + b"\xb2kv_transfer_params\x81\xa1a\xd4\x05\x01",
    "bytes in transfer params": PACKED_HEAD + b"\xb2kv_transfer_params\x81\xa1a\xc4\x01a",
    "a number as a key in transfer params": PACKED_HEAD + b"\xb2kv_transfer_params\x81\xa1a\x81\x01\x02",
    "NaN in transfer params": PACKED_HEAD + b"\xb2kv_transfer_params\x81\xa1a\xcb\x7f\xf8" + b"\0" * 6,
    "NaN in an unknown field": PACKED_HEAD + b"\xa1x\xcb\x7f\xf8" + b"\0" * 6,
    "bytes as sampling": b"\x82\xa9token_ids\x91\x05\xafsampling_params\xc4\x01a",
    "a number as a sampling name": b"\x82\xa9token_ids\x91\x05\xafsampling_params\x81\x01\x02",
    "an array as a sampling name": b"\x82\xa9token_ids\x91\x05\xafsampling_params\x81\x91\x01\x02",
    "a map as a sampling name": b"\x82\xa9token_ids\x91\x05\xafsampling_params\x81\x81\x01\x02\x03",
    "a number as a field": PACKED_HEAD + b"\x01\x02",
    "not UTF-8": PACKED_HEAD + b"\xaacache_salt\xa1\xff",
    "a surrogate": PACKED_HEAD + b"\xaacache_salt\xa3\xed\xa0\x80",
    "not UTF-8 in a key": PACKED_HEAD + b"\xa1\xff\xa1x",
    "an announced length of 4 billion": b"\x82\xa9token_ids\xdd\xff\xff\xff\xff\x01",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "the reserved byte": b"\xc1",
    "trailing bytes": b"\x82\xa9token_ids\x91\x05\xafsampling_params\x80\x01",
}


@pytest.mark.parametrize("body", REFUSED_PACKED.values(), ids=REFUSED_PACKED.keys())
def test_a_hostile_msgpack_body_is_refused(body: bytes) -> None:
    assert isinstance(outcome(body, MSGPACK), RollplaneError)


def hop(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest, PayloadTooLarge):
        decode_hop_request(body)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_never_get_another_answer(body: bytes) -> None:
    outcome(body)
    outcome(body, MSGPACK)
    hop(body)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_body_never_gets_another_answer(data: Any) -> None:
    tree = {
        "token_ids": [1, 2, 3],
        "sampling_params": {"temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1.0}, "seed": 7},
        "features": {
            "mm_hashes": {"image": ["h"]},
            "mm_placeholders": {"image": [{"offset": 0, "length": 1, "is_embed": [True]}]},
            "kwargs_data": {"image": ["gA=="]},
        },
        "kv_transfer_params": {"a": [1, {"b": None}]},
        "rollplane": {"deadline_s": 5.0, "group_id": "g"},
    }
    good = parse_request(msgspec.json.encode(tree))
    kind = data.draw(st.sampled_from(["json", "msgpack", "hop"]))
    body = {
        "json": msgspec.json.encode,
        "msgpack": msgspec.msgpack.encode,
        "hop": lambda _: encode_hop_request(good, deadline_s=1.0),
    }[kind](tree)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body = body[:at] + data.draw(st.binary(max_size=3)) + body[at + data.draw(st.integers(0, 3)) :]
    if kind == "hop":
        hop(body)
    else:
        outcome(body, JSON if kind == "json" else MSGPACK)


odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127).filter(lambda c: c != -1), st.binary(max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(-5, 5), inner, max_size=3)
        | st.fixed_dictionaries({"dtype": inner, "shape": inner, "data": inner})
    ),
    max_leaves=6,
)
NAMES = ["token_ids", "sampling_params", "features", "rollplane", "stream", "stream_options", "cache_salt", "priority"]
NAMES += ["content_parts", "kv_transfer_params", "model", "request_id", "return_token_ids", "other"]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(NAMES), odd, max_size=3), st.none() | st.dictionaries(st.text(max_size=9), odd))
def test_fields_of_any_kind_never_get_another_answer(changes: dict[str, Any], params: dict[str, Any] | None) -> None:
    tree = {"token_ids": [1, 2], "sampling_params": params or {}, **changes}
    outcome(msgspec.msgpack.encode(tree), MSGPACK)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_an_internal_request_with_any_field_replaced_never_gets_another_answer(data: Any) -> None:
    tree = msgspec.msgpack.decode(encode_hop_request(parse_request(sampling(b'{"n":1}')), deadline_s=1.0))
    for _ in range(data.draw(st.integers(1, 3))):
        holder = data.draw(st.sampled_from([tree, tree.get("request"), (tree.get("request") or {}).get("token_ids")]))
        if not isinstance(holder, dict) or not holder:
            continue
        holder[data.draw(st.sampled_from([*holder, "features", "options", "extra"]))] = data.draw(odd)
        if not isinstance(tree.get("request"), dict):
            break
    hop(msgspec.msgpack.encode(tree))
