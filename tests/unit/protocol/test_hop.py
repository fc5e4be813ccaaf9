"""The internal hop: requests and events come out as they went in, however the stream is cut."""

import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.protocol.answers import int32, responses

from rollplane.errors import EngineFailed, InvalidRequest, TransportError, error_body, error_from_body
from rollplane.protocol.answer import WIRE_VERSION
from rollplane.protocol.events import ChoiceEvent, EndEvent, ErrorEvent, PromptEvent
from rollplane.protocol.features import MediaItem
from rollplane.protocol.hop import (
    MAX_FRAME_BYTES,
    FrameReader,
    decode_events,
    decode_hop_request,
    encode_frame,
    encode_hop_request,
    only_frame,
)
from rollplane.protocol.request import GenerateRequest, parse_request
from rollplane.protocol.sampling import FIELD_NAMES


def request(**fields: Any) -> GenerateRequest:
    tree = {"token_ids": [1, 2, 3], "sampling_params": {"n": 2, "top_k": None, "seed": 5}, **fields}
    return parse_request(json.dumps(tree).encode())


def test_a_request_crosses_whole() -> None:
    sent = request(rollplane={"group_id": "g"}, extra_field={"a": [1]}, kv_transfer_params={"b": 2})
    sent.features = [
        MediaItem(
            modality="image", producer_hash="p", offset=1, length=2, is_embed=np.array([True, False]), kwargs=b"k"
        )
    ]
    sent.expects_policy_version = "v7"
    sent.attempt = 3
    hop = decode_hop_request(encode_hop_request(sent, frontend="f0", deadline_s=2.5))
    assert (hop.wire, hop.frontend, hop.deadline_s) == (WIRE_VERSION, "f0", 2.5)
    assert repr(hop.request) == repr(sent)


def test_omitted_and_null_stay_apart_over_the_hop() -> None:
    sampling = decode_hop_request(encode_hop_request(request())).request.sampling
    assert sampling.top_k is None
    assert all(getattr(sampling, f) is msgspec.UNSET for f in FIELD_NAMES if f not in ("n", "top_k", "seed"))


@st.composite
def event_lists(draw: Any) -> list[Any]:
    response = draw(responses())
    events: list[Any] = [
        PromptEvent(prompt_tokens=response.usage.prompt_tokens, prompt_logprobs=response.prompt_logprobs)
    ]
    for c in response.choices:
        events.append(
            ChoiceEvent(
                index=c.index,
                token_ids=c.token_ids,
                logprobs=c.logprobs,
                finish_reason=c.finish_reason,
                stop_reason=c.stop_reason,
                routed_experts=c.routed_experts,
                sampling_mask=c.sampling_mask,
                policy_versions=c.policy_versions,
            )
        )
    events.append(EndEvent(served_by=response.served_by, metrics=response.metrics))
    return events


@settings(max_examples=80, deadline=None)
@given(event_lists(), st.data())
def test_frames_cut_anywhere_give_the_same_events(events: list[Any], data: Any) -> None:
    frames: list[list[Any]] = [[]]
    for event in events:
        frames[-1].append(event)
        if data.draw(st.booleans()):
            frames.append([])
    stream = b"".join(map(encode_frame, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader, found = FrameReader(), []
    for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[a:b])
    reader.finish()
    assert repr(found) == repr(frames)


def test_byte_by_byte_is_the_worst_cut() -> None:
    stream = encode_frame([EndEvent()]) + encode_frame([]) + encode_frame([EndEvent(), EndEvent()])
    reader = FrameReader()
    found = [events for i in range(len(stream)) for events in reader.feed(stream[i : i + 1])]
    assert [len(events) for events in found] == [1, 0, 2]


def test_frames_are_given_once_though_nobody_looked() -> None:
    reader = FrameReader()
    reader.feed(encode_frame([EndEvent()]) * 3)
    assert list(reader.feed(b"")) == []
    reader.finish()


def test_one_frame_alone_is_known_as_such() -> None:
    frame = encode_frame([EndEvent()])
    assert decode_events(only_frame(frame) or b"") == [EndEvent()]
    for other in (b"", frame[:3], frame[:-1], frame + b"x", frame + frame):
        assert only_frame(other) is None


def test_an_end_inside_a_frame_is_seen() -> None:
    for cut in (1, 4, 5):
        reader = FrameReader()
        assert list(reader.feed(encode_frame([EndEvent()])[:cut])) == []
        assert repr(reader) == f"<FrameReader {cut} bytes waiting>"
        with pytest.raises(TransportError, match=f"{cut} bytes of it arrived"):
            reader.finish()


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80", b"\xc1", b"\x91\x80", b"\x91\x81\xa4type\xa1x", b"\x91" * 100_000, b"\x91\x81\xa4type\xa1\xff"],
)
def test_a_frame_that_cannot_be_read_is_a_transport_error(body: bytes) -> None:
    with pytest.raises(TransportError):
        decode_events(body)
    with pytest.raises(TransportError):
        list(FrameReader().feed(struct.pack(">I", len(body)) + body))


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(TransportError, match=str(MAX_FRAME_BYTES)):
        list(FrameReader().feed(struct.pack(">I", MAX_FRAME_BYTES + 1)))


def test_a_typed_error_crosses() -> None:
    sent = EngineFailed("it broke", param="p", details={"a": 1})
    [[event]] = FrameReader().feed(encode_frame([ErrorEvent(status=502, error=error_body(sent))]))
    assert isinstance(event, ErrorEvent)
    back = error_from_body(event.error, status=event.status)
    assert (type(back), back.message, back.param, back.details) == (EngineFailed, "it broke", "p", {"a": 1})


def changed(path: str, value: Any) -> bytes:
    tree = msgspec.msgpack.decode(encode_hop_request(request()))
    holder = tree
    *parents, last = path.split(".")
    for name in parents:
        holder = holder[name]
    holder[last] = value
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("wire", WIRE_VERSION + 1, f"speaks wire version {WIRE_VERSION + 1}, this worker {WIRE_VERSION}"),
        ("wire", "1", "wire"),
        ("deadline_s", float("nan"), "deadline_s must be finite"),
        ("request.token_ids", [], "must not be empty"),
        ("request.token_ids", [-1], r"token_ids\[0\] is -1"),
        ("request.token_ids", [True], "expected integers"),
        ("request.token_ids.shape", [1, 3], "one dimension, has 2"),
        ("request.token_ids.shape", [4], "needs 16 bytes, got 12"),
        ("request.token_ids.dtype", "float32", "expected int32"),
        ("request.sampling.n", 0, "sampling_params.n must be >= 1"),
        ("request.sampling.temperature", float("nan"), "sampling_params.temperature"),
        ("request.sampling.new", 1, "unknown field"),
        ("request.features", [], "no items"),
        (
            "request.features",
            [{"modality": "image", "producer_hash": "p", "offset": 2, "length": 5}],
            "ends past the prompt",
        ),
    ],
)
def test_a_request_that_the_edge_would_refuse_is_refused_by_the_worker(path: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        decode_hop_request(changed(path, value))


def test_ids_of_a_hop_are_the_same_bytes() -> None:
    sent = request()
    sent.token_ids = int32(range(5000))
    assert decode_hop_request(encode_hop_request(sent)).request.token_ids.tobytes() == sent.token_ids.tobytes()
