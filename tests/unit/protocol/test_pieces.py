"""A big encoding in pieces is the small one, byte for byte, whatever the sizes."""

import base64
import io
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.unit.protocol.answers import responses

from rollplane.protocol import answer, pieces
from rollplane.protocol.answer import encode_json, encode_msgpack, encode_pieces, json_pieces
from rollplane.protocol.events import ChoiceEvent, EndEvent
from rollplane.protocol.hop import FrameReader, encode_frame, frame_pieces
from rollplane.protocol.pieces import Holes, base64_pieces, cut, joined, npy_pieces, size_of
from rollplane.protocol.response import GenerateResponse


@pytest.fixture(scope="module", autouse=True)
def tiny_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "HOLE_BYTES", 8)
        patch.setattr(answer, "BLOCK_NUMBERS", 3)
        yield


@settings(max_examples=150, deadline=None)
@given(responses())
def test_json_in_pieces_is_json(response: GenerateResponse) -> None:
    assert joined(json_pieces(response)) == encode_json(response)
    assert joined(json_pieces(response, routes="npy")) == encode_json(response, routes="npy")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(responses())
def test_msgpack_in_pieces_reads_as_msgpack(response: GenerateResponse) -> None:
    whole = joined(encode_pieces(response))
    # Lengths of short binaries take fewer bytes when they are copied, so the bytes differ and what they say does not.
    assert msgspec.msgpack.decode(whole) == msgspec.msgpack.decode(encode_msgpack(response))


def test_a_frame_in_pieces_is_read_as_a_frame() -> None:
    ids = np.arange(5000, dtype=np.int32)
    events = [ChoiceEvent(index=0, token_ids=ids, finish_reason="length"), EndEvent()]
    in_pieces = frame_pieces(events)
    assert len(in_pieces) > 2
    reader = FrameReader()
    found = [events for piece in in_pieces for events in reader.feed(bytes(piece))]
    reader.finish()
    [[choice, end]] = found
    assert isinstance(choice, ChoiceEvent)
    assert np.array_equal(choice.token_ids, ids)
    assert isinstance(end, EndEvent)
    assert isinstance(next(FrameReader().feed(encode_frame(events)))[1], EndEvent)


def test_an_array_in_pieces_is_its_own_memory() -> None:
    ids = np.arange(5000, dtype=np.int32)
    in_pieces = frame_pieces([ChoiceEvent(index=0, token_ids=ids)])
    assert any(
        isinstance(piece, memoryview) and np.shares_memory(np.frombuffer(piece, np.uint8), ids) for piece in in_pieces
    )


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 7, 300_000])
def test_base64_in_pieces_is_base64(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert joined(base64_pieces(data)) == base64.b64encode(data)
    array = np.frombuffer(data, np.uint8)
    buffer = io.BytesIO()
    np.save(buffer, array)
    assert joined(npy_pieces(array)) == base64.b64encode(buffer.getvalue())


def test_what_is_cut_is_whole() -> None:
    data = bytes(range(10))
    assert [bytes(part) for part in cut(data, size=4)] == [data[:4], data[4:8], data[8:]]
    assert size_of(cut(data, size=4)) == 10


def test_a_mark_that_got_lost_is_an_error() -> None:
    holes = Holes()
    mark = holes.mark([b"x"])
    assert joined(holes.fill(b"[" + mark + b"]")) == b"[x]"
    for text in (b"[]", b"[" + mark + mark + b"]"):
        with pytest.raises(ValueError, match="marks"):
            holes.fill(text)
