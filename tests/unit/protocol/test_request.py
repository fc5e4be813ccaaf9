"""A body becomes one record: JSON and msgpack alike, nothing repaired, every refusal names its field."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplane.errors import InvalidRequest, PayloadTooLarge, UnsupportedMedia
from rollplane.protocol.request import JSON, MSGPACK, RequestLimits, parse_request
from rollplane.protocol.sampling import FIELD_NAMES

PRIME_RL = {
    "top_k": -1,
    "min_p": 0.0,
    "return_token_ids": True,
    "logprobs": 1,
    "stop_token_ids": [7],
    "skip_special_tokens": False,
}


def body(**fields: Any) -> dict[str, Any]:
    return {"token_ids": [1, 2, 3], "sampling_params": {}, **fields}


def parse(tree: Any, *, headers: dict[str, str] | None = None, **limits: Any) -> Any:
    return parse_request(json.dumps(tree).encode(), headers=headers, limits=RequestLimits(**limits))


def refused(tree: Any, **kwargs: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(tree, **kwargs)
    return caught.value


def plain(request: Any) -> dict[str, Any]:
    """The record as plain values, without what differs between two encodings of one request."""
    tree = {f: getattr(request, f) for f in request.__struct_fields__}
    tree["token_ids"] = (request.token_ids.tolist(), request.token_ids.dtype.name)
    for name in ("body_digest", "request_id", "features"):
        del tree[name]
    return tree


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
sampling_objects = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.none() | st.floats(0, 2),
        "top_p": st.none() | st.floats(0.1, 1),
        "top_k": st.none() | st.integers(-1, 50),
        "n": st.none() | st.integers(1, 8),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 9),
        "stop": st.none() | st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "stop_token_ids": st.none() | st.lists(st.integers(0, 99), max_size=3),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 99).map(str), st.floats(-5, 5), max_size=3),
        "max_tokens": st.none() | st.integers(1, 99),
        "ignore_eos": st.none() | st.booleans(),
        "extra_args": st.none() | st.dictionaries(st.text(max_size=3), json_values, max_size=2),
    },
)
bodies = st.fixed_dictionaries(
    {"token_ids": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), "sampling_params": sampling_objects},
    optional={
        "model": st.none() | st.text(min_size=1, max_size=5),
        "cache_salt": st.none() | st.text(min_size=1, max_size=5),
        "priority": st.none() | st.integers(-(2**31), 2**31 - 1),
        "stream": st.none() | st.booleans(),
        "return_token_ids": st.none() | st.booleans(),
        "kv_transfer_params": st.none() | st.dictionaries(st.text(max_size=3), json_values, max_size=2),
        "rollplane": st.none() | st.fixed_dictionaries({}, optional={"group_id": st.text(min_size=1, max_size=3)}),
        "some_new_field": json_values,
    },
)


@settings(max_examples=150, deadline=None)
@given(bodies, st.booleans(), st.sampled_from([None, 1]))
def test_json_and_msgpack_parse_alike(tree: dict[str, Any], as_array: bool, indent: int | None) -> None:
    packed = dict(tree)
    if as_array:
        ids = np.array(tree["token_ids"], np.int32)
        packed["token_ids"] = {"dtype": "int32", "shape": [ids.size], "data": ids.tobytes()}
    from_json = parse_request(json.dumps(tree, indent=indent).encode(), content_type=JSON)
    from_msgpack = parse_request(msgspec.msgpack.encode(packed), content_type=MSGPACK)
    assert plain(from_json) == plain(from_msgpack)
    assert from_json.token_ids.tolist() == tree["token_ids"]


@settings(max_examples=100, deadline=None)
@given(sampling_objects)
def test_omitted_null_and_a_value_are_three_things(obj: dict[str, Any]) -> None:
    sampling = parse(body(sampling_params=obj)).sampling
    for name in FIELD_NAMES:
        value = getattr(sampling, name)
        if name not in obj:
            assert value is msgspec.UNSET
        elif obj[name] is None:
            assert value is None
        else:
            assert value is not None
            assert value is not msgspec.UNSET


def test_the_fields_arrive_as_they_were_sent() -> None:
    request = parse(
        body(
            request_id="r",
            model="m",
            stream=True,
            stream_options={"include_usage": True},
            cache_salt="s",
            priority=-3,
            return_token_ids=True,
            kv_transfer_params={"a": 1},
            ec_transfer_params={"b": [1.5]},
            rollplane={"min_policy_version": "v1", "deadline_s": 5, "routed_experts": False},
            newer={"x": None},
        ),
        headers={"x-data-parallel-rank": "2", "idempotency-key": "k", "x-session-id": "s1", "traceparent": "00-a-b-01"},
    )
    assert (request.request_id, request.model, request.stream, request.cache_salt) == ("r", "m", True, "s")
    assert request.stream_options.include_usage is True
    assert (request.priority, request.return_token_ids, request.data_parallel_rank) == (-3, True, 2)
    assert (request.kv_transfer_params, request.ec_transfer_params) == ({"a": 1}, {"b": [1.5]})
    assert (request.options.min_policy_version, request.options.deadline_s) == ("v1", 5.0)
    assert (request.options.routed_experts, request.options.sampling_mask) == (False, None)
    assert (request.extra, request.idempotency_key, request.traceparent) == ({"newer": {"x": None}}, "k", "00-a-b-01")
    assert request.options.session_id == "s1"


def test_what_rl_clients_send_by_default_is_taken() -> None:
    sampling = parse(body(sampling_params=PRIME_RL)).sampling
    assert sampling.given() == {k: v for k, v in PRIME_RL.items() if k != "return_token_ids"}
    assert sampling.top_k_limit == 0


def test_the_header_names_the_request_before_the_body_does() -> None:
    assert parse(body(request_id="b"), headers={"x-request-id": "h"}).request_id == "h"
    assert parse(body(request_id="b")).request_id == "b"
    made_up = {parse(body()).request_id for _ in range(3)}
    assert len(made_up) == 3


@pytest.mark.parametrize("value", ["", "a\nb", "x" * 257, "\u2028"])
def test_a_request_id_that_logs_could_not_print_is_refused(value: str) -> None:
    assert refused(body(request_id=value)).param == "request_id"
    assert refused(body(), headers={"x-request-id": value}).param == "request_id"


@pytest.mark.parametrize("salt", ["x", "x" * 1024, "ü"])
def test_the_salt_is_taken_from_both_places(salt: str) -> None:
    assert parse(body(cache_salt=salt)).cache_salt == salt
    assert parse(body(sampling_params={"cache_salt": salt})).cache_salt == salt
    assert parse(body(cache_salt=salt, sampling_params={"cache_salt": salt})).cache_salt == salt
    assert parse(body(cache_salt=None, sampling_params={"cache_salt": salt})).cache_salt == salt
    assert refused(body(cache_salt=salt, sampling_params={"cache_salt": salt + "y"})).param == "cache_salt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"sampling_params": {"cache_salt": 5}}, "sampling_params.cache_salt"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": []}, "sampling_params"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 0}}, "sampling_params.prompt_logprobs"),
        ({"priority": 1.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"return_token_ids": "true"}, "return_token_ids"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params"),
        ({"kv_transfer_params": {"a": {"b": [0, 2**64]}}}, "kv_transfer_params.a.b[1]"),
        ({"ec_transfer_params": {"a": -(2**63) - 1}}, "ec_transfer_params.a"),
        ({"rollplane": {"unknown": 1}}, "rollplane.unknown"),
        ({"rollplane": {"policy_version": ""}}, "rollplane.policy_version"),
        ({"rollplane": {"policy_version": "a", "min_policy_version": "b"}}, "rollplane.min_policy_version"),
        ({"rollplane": {"policy_version": "a", "max_policy_lag": 0}}, "rollplane.max_policy_lag"),
        ({"rollplane": {"max_policy_lag": -1}}, "rollplane.max_policy_lag"),
        ({"rollplane": {"max_policy_lag": 1_000_001}}, "rollplane.max_policy_lag"),
        ({"rollplane": {"max_policy_lag": 1.5}}, "rollplane.max_policy_lag"),
        ({"rollplane": {"max_policy_lag": True}}, "rollplane.max_policy_lag"),
        ({"rollplane": {"deadline_s": 0}}, "rollplane.deadline_s"),
        ({"rollplane": {"deadline_s": -0.0}}, "rollplane.deadline_s"),
        ({"rollplane": {"deadline_s": 1e9}}, "rollplane.deadline_s"),
        ({"rollplane": {"deadline_s": True}}, "rollplane.deadline_s"),
        ({"rollplane": {"routed_experts": 1}}, "rollplane.routed_experts"),
        ({"rollplane": {"routed_experts_encoding": "raw"}}, "rollplane.routed_experts_encoding"),
        ({"content_parts": []}, "content_parts"),
        ({"content_parts": [{"type": "text", "url": "x"}]}, "content_parts[0].type"),
        ({"content_parts": [{"type": "image_url", "url": ""}]}, "content_parts[0].url"),
        ({"content_parts": [{"type": "image_url", "uuid": "u"}]}, "content_parts[0].url"),
        ({"content_parts": [{"type": "image_url", "url": "x", "uuid": ""}]}, "content_parts[0].uuid"),
        ({"features": []}, "features"),
        ({"features": {}}, "features.mm_hashes"),
    ],
)
def test_a_refusal_names_its_field(fields: dict[str, Any], param: str) -> None:
    error = refused(body(**fields))
    assert error.param == param
    assert error.status == 400
    assert param.split("[")[0].split(".")[-1] in error.message


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-data-parallel-rank": "-1"}, "X-data-parallel-rank"),
        ({"x-data-parallel-rank": "²"}, "X-data-parallel-rank"),
        ({"x-data-parallel-rank": "1.0"}, "X-data-parallel-rank"),
        ({"x-data-parallel-rank": ""}, "X-data-parallel-rank"),
        ({"x-data-parallel-rank": "1" * 7}, "X-data-parallel-rank"),
        ({"idempotency-key": ""}, "Idempotency-Key"),
        ({"idempotency-key": "x" * 257}, "Idempotency-Key"),
        ({"x-session-id": ""}, "rollplane.session_id"),
    ],
)
def test_a_bad_header_is_refused_by_name(headers: dict[str, str], param: str) -> None:
    assert refused(body(), headers=headers).param == param


def test_two_session_ids_are_a_conflict() -> None:
    assert refused(body(rollplane={"session_id": "a"}), headers={"x-session-id": "b"}).param == "rollplane.session_id"


def test_a_trace_context_that_cannot_be_valid_never_fails_a_request() -> None:
    assert parse(body(), headers={"traceparent": "0" * 100_000}).traceparent is None


@pytest.mark.parametrize("missing", ["token_ids", "sampling_params"])
def test_what_is_required_is_required(missing: str) -> None:
    tree = body()
    del tree[missing]
    error = refused(tree)
    assert (error.param, "required" in error.message) == (missing, True)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-msgpack", "application/jsonx"])
def test_other_content_types_are_unsupported(kind: str) -> None:
    with pytest.raises(UnsupportedMedia, match=kind):
        parse_request(b"{}", content_type=kind)


@pytest.mark.parametrize("kind", ["application/json", "APPLICATION/JSON", "application/json; charset=utf-8", ""])
def test_json_is_known_by_its_names(kind: str) -> None:
    assert parse_request(json.dumps(body()).encode(), content_type=kind).prompt_tokens == 3


def test_limits_are_said() -> None:
    with pytest.raises(PayloadTooLarge, match="token_ids has 3 entries, the limit is 2"):
        parse(body(), max_prompt_tokens=2)
    with pytest.raises(PayloadTooLarge, match="the limit is 1048576"):
        parse(body(kv_transfer_params={"a": "x" * (1 << 20)}))
    assert "the limit is 64" in refused(body(**{f"x{i}": 1 for i in range(65)})).message


def test_the_digest_tells_another_body() -> None:
    one, again, other = (parse(tree).body_digest for tree in (body(), body(), body(priority=0)))
    assert one == again != other


def test_of_a_repeated_key_the_last_counts_in_both_encodings() -> None:
    last = parse_request(b'{"token_ids":[1],"sampling_params":{"n":1,"n":2},"token_ids":[2]}')
    packed = b"\x83\xa9token_ids\x91\x01\xafsampling_params\x82\xa1n\x01\xa1n\x02\xa9token_ids\x91\x02"
    same = parse_request(packed, content_type=MSGPACK)
    assert last.token_ids.tolist() == same.token_ids.tolist() == [2]
    assert last.sampling.n == same.sampling.n == 2


def test_scoring_requests_are_told_apart() -> None:
    assert parse(body(sampling_params={"prompt_logprobs": 0, "max_tokens": 1})).scores_only
    assert not parse(body(sampling_params={"prompt_logprobs": 0, "max_tokens": 2})).scores_only
    assert not parse(body(sampling_params={"max_tokens": 1})).scores_only


GOOD_IDS = [
    ("[1]", [1]),
    ("[0]", [0]),
    ("[-0]", [0]),
    (" [ 1 ,\n2,\t3\r] ", [1, 2, 3]),
    ("[2147483647]", [2**31 - 1]),
    ("[" + " " * 1000 + "5" + "\n" * 1000 + "]", [5]),
]
BAD_IDS = [
    ("[]", "must not be empty"),
    ("[ \n]", "must not be empty"),
    ("[true]", r"token_ids\[0\] must be an integer, got a boolean"),
    ('["1"]', r"token_ids\[0\] must be an integer, got a string"),
    ('[1,"2,3"]', r"token_ids\[1\] must be an integer, got a string"),
    ("[1,null]", r"token_ids\[1\] must be an integer, got null"),
    ("[1,2.0]", r"token_ids\[1\] must be an integer, got a number with a fraction"),
    ("[1,2.5]", r"token_ids\[1\] must be an integer"),
    ("[1e3]", r"token_ids\[0\] must be an integer"),
    ("[1,[2]]", r"token_ids\[1\] must be an integer, got an array"),
    ("[{}]", r"token_ids\[0\] must be an integer, got an object"),
    ("[5,-1]", r"token_ids\[1\] is -1, outside \[0, 2147483647\]"),
    ("[5,2147483648]", r"token_ids\[1\] is 2147483648, outside"),
    ("[4294967296]", r"token_ids\[0\] is 4294967296, outside"),
    ("[9223372036854775808]", r"token_ids\[0\] is outside"),
    ("[18446744073709551617]", r"token_ids\[0\] is outside"),
    ("[-9223372036854775809]", r"token_ids\[0\] is .*outside"),
    ("[" + "9" * 100_000 + "]", r"token_ids\[0\] is outside"),
    ("5", "must be an array of integers"),
    ("{}", "must be an array of integers, got an object"),
    ('"[1]"', "must be an array of integers, got a string"),
]
NOT_JSON = [
    *("[01]", "[007]", "[+1]", "[-]", "[1,-,2]", "[- 1]", "[--1]", "[-01]", "[0x10]", "[1_000]", "[1 2]", "[1,2 3,4]"),
    *("[1,]", "[,1]", "[1,,2]", "[1 , , 2]", "[1;2]", "[1", "1]", "[1]x", "[1][2]", "[1],[2]", "[.5]", "[1.]", "[1e]"),
    *(
        "[NaN]",
        "[nan]",
        "[inf]",
        "[Infinity]",
        "[1\x0b]",
        "[\x0c1]",
        "[1\x00]",
        "[\u0661]",
        "[1,\u00a02]",
        "[\ufeff1]",
        "",
    ),
]


@pytest.mark.parametrize(("text", "ids"), GOOD_IDS)
def test_token_ids_are_read_exactly(text: str, ids: list[int]) -> None:
    found = parse_request(b'{"token_ids":' + text.encode() + b',"sampling_params":{}}').token_ids
    assert (found.tolist(), found.dtype) == (ids, np.int32)


@pytest.mark.parametrize(("text", "says"), BAD_IDS, ids=[text[:24] for text, _ in BAD_IDS])
def test_what_is_no_token_id_is_refused_by_its_place(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        parse_request(b'{"token_ids":' + text.encode() + b',"sampling_params":{}}')
    assert caught.value.param is not None


@pytest.mark.parametrize("text", NOT_JSON)
def test_numbers_that_only_a_lenient_reader_takes_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(b'{"token_ids":' + text.encode() + b',"sampling_params":{}}')


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789+-.eE, \t\n\r[]\x0b\x00x_", max_size=12))
def test_token_ids_are_what_json_says_or_refused(text: str) -> None:
    """Whatever stands between the brackets: the reader agrees with the standard library's, or refuses."""
    try:
        found = parse_request(f'{{"token_ids":[{text}],"sampling_params":{{}}}}'.encode()).token_ids.tolist()
    except InvalidRequest:
        return
    assert found == json.loads(f"[{text}]")
    assert all(type(x) is int for x in json.loads(f"[{text}]"))


def packed(token_ids: Any) -> bytes:
    return msgspec.msgpack.encode({"token_ids": token_ids, "sampling_params": {}})


def array(dtype: Any = "int32", shape: Any = (2,), data: Any = b"\x01\0\0\0\x02\0\0\0") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data": data}


@pytest.mark.parametrize(
    "token_ids",
    [
        array("int64"),
        array("float32"),
        array("object"),
        array(["int32"]),
        array(5),
        array(shape=[3]),
        array(shape=[1, 2]),
        array(shape=[]),
        array(shape=2),
        array(shape=[-2]),
        array(shape=[2.0]),
        array(shape=[True, 2]),
        array(shape=[2**62, 4]),
        array(shape=[2**62, 4, 0], data=b""),
        array(shape=[2**40, 2**40], data=b""),
        array(shape=[1] * 70 + [2]),
        array(shape=[0], data=b""),
        array(data="text"),
        array(data=None),
        array(data=b"\xff\xff\xff\xff\x01\0\0\0"),
        {"dtype": "int32", "shape": [2]},
        {**array(), "more": 1},
        {1: 2},
        "text",
        b"bytes",
        None,
        5,
        [],
        [True],
        [1.0],
        [2**31],
        [-1],
        [[1]],
        ["1"],
        msgspec.msgpack.Ext(5, b"1"),
    ],
)
def test_msgpack_token_ids_of_another_kind_are_refused(token_ids: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(packed(token_ids), content_type=MSGPACK)
    assert str(caught.value.param).startswith("token_ids")
