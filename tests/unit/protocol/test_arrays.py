"""Arrays on the wire: dtype, shape and bytes agree, or nothing is read."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplane.protocol.arrays import (
    BoolArray,
    ExpertArray,
    Float32Array,
    Int32Array,
    dec_hook,
    decode_array,
    enc_hook,
    encode_array,
)


class Held(msgspec.Struct):
    ids: Int32Array | None = None
    values: Float32Array | None = None
    flags: BoolArray | None = None
    experts: ExpertArray | None = None


encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
decoder = msgspec.msgpack.Decoder(Held, dec_hook=dec_hook)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["int32", "float32", "uint8", "uint16", "bool", "int64"]),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_arrays_read_back_bit_for_bit(dtype: str, shape: list[int], seed: int) -> None:
    array = np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
    back = decode_array(msgspec.msgpack.decode(encoder.encode(array)))
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_strided_and_big_endian_arrays_travel_as_their_values() -> None:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    for array in (base[::2, ::-1], base.T, base.astype(">i4")):
        assert decode_array(msgspec.msgpack.decode(encoder.encode(array))).tolist() == array.tolist()


def test_a_decoded_array_lies_over_the_body_and_cannot_be_written() -> None:
    held = decoder.decode(encoder.encode(Held(ids=np.arange(1000, dtype=np.int32))))
    assert held.ids is not None
    assert not held.ids.flags.owndata
    assert not held.ids.flags.writeable


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.uint32, np.int8, object, "U3", np.complex64])
def test_other_dtypes_do_not_cross(dtype: Any) -> None:
    with pytest.raises(TypeError, match="does not cross the wire"):
        encode_array(np.zeros(2, dtype))


@pytest.mark.parametrize(
    ("obj", "says"),
    [
        ([1], "map of dtype, shape and data"),
        ({"dtype": "int32", "shape": [0]}, "map of dtype, shape and data"),
        ({"dtype": "float64", "shape": [0], "data": b""}, "'float64' is not one of"),
        ({"dtype": ["int32"], "shape": [0], "data": b""}, "is not one of"),
        ({"dtype": "int32", "shape": 1, "data": b"1234"}, "not a list of sizes"),
        ({"dtype": "int32", "shape": [-1], "data": b"1234"}, "not a list of sizes"),
        ({"dtype": "int32", "shape": [True], "data": b"1234"}, "not a list of sizes"),
        ({"dtype": "int32", "shape": [1.0], "data": b"1234"}, "not a list of sizes"),
        ({"dtype": "int32", "shape": [1] * 9, "data": b"1234"}, "9 dimensions, the limit is 8"),
        ({"dtype": "int32", "shape": [1], "data": "1234"}, "is a str, not bytes"),
        ({"dtype": "int32", "shape": [1], "data": b"123"}, "needs 4 bytes, got 3"),
        ({"dtype": "int32", "shape": [2**62, 4], "data": b""}, "needs 73786976294838206464 bytes, got 0"),
        ({"dtype": "bool", "shape": [2], "data": b"\x01\x02"}, "other than 0 and 1"),
    ],
)
def test_a_broken_wire_map_is_refused_with_its_numbers(obj: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode_array(obj)


def test_small_clients_may_send_plain_lists() -> None:
    held = decoder.decode(msgspec.msgpack.encode({"ids": [1, 2], "values": [0, -1.5], "flags": [True, False]}))
    assert repr(held) == repr(
        Held(ids=np.array([1, 2], np.int32), values=np.array([0, -1.5], np.float32), flags=np.array([True, False]))
    )


@pytest.mark.parametrize(
    "tree",
    [
        {"ids": [1.0]},
        {"ids": [True]},
        {"ids": ["1"]},
        {"ids": [2**31]},
        {"ids": [[1]]},
        {"values": ["1.5"]},
        {"values": [True]},
        {"values": [None]},
        {"values": [[1.0]]},
        {"values": [1e300]},
        {"flags": [1]},
        {"flags": ["x"]},
        {"experts": [1, 2]},
        {"ids": encode_array(np.zeros(1, np.float32))},
        {"values": encode_array(np.zeros(1, np.int32))},
        {"flags": encode_array(np.zeros(1, np.uint8))},
    ],
)
def test_values_of_another_kind_are_never_converted(tree: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(tree))
