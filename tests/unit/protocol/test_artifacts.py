"""Side payloads: routes in both encodings, masks as rows and CSR."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.protocol.answers import int32, offsets_of

from rollplane.protocol.artifacts import (
    RoutedExperts,
    SamplingMask,
    concat_offsets,
    decode_routes_npy,
    decode_routes_structured,
    encode_routes_npy,
    encode_routes_structured,
    narrow_expert_ids,
)


@st.composite
def arrays(draw: Any) -> np.ndarray:
    dtype = draw(st.sampled_from(["uint8", "uint16", "int32"]))
    shape = draw(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)))
    high = min(int(np.iinfo(dtype).max), 100_000)
    return np.random.default_rng(draw(st.integers(0, 2**31))).integers(0, high, shape, endpoint=True).astype(dtype)


@settings(max_examples=80, deadline=None)
@given(arrays(), st.integers(0, 9))
def test_structured_routes_read_back(array: np.ndarray, start: int) -> None:
    tree = encode_routes_structured(RoutedExperts(array=array, start=start))
    assert list(tree) == ["data", "shape", "start", "dtype"]
    assert base64.b64decode(tree["data"]) == array.tobytes()
    back = decode_routes_structured(tree)
    assert (back.array.dtype, back.start, back.array.tolist()) == (array.dtype, start, array.tolist())


@settings(max_examples=80, deadline=None)
@given(arrays(), st.integers(0, 9))
def test_npy_routes_read_back(array: np.ndarray, start: int) -> None:
    back = decode_routes_npy(encode_routes_npy(RoutedExperts(array=array)), start=start)
    assert (back.array.dtype, back.start, back.array.tolist()) == (array.dtype, start, array.tolist())


@pytest.mark.parametrize("change", [lambda a: a[::2], lambda a: a.transpose(0, 2, 1), lambda a: a.astype(">u2")])
def test_odd_memory_layouts_are_written_in_c_order_little_endian(change: Any) -> None:
    array = change(np.arange(300, 324, dtype=np.uint16).reshape(4, 3, 2))
    assert (
        decode_routes_structured(encode_routes_structured(RoutedExperts(array=array))).array.tolist() == array.tolist()
    )


def npy(array: Any, **kwargs: Any) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, **kwargs)
    return base64.b64encode(buffer.getvalue()).decode()


def test_a_wider_npy_is_narrowed_to_an_expert_dtype() -> None:
    for dtype in (np.int64, ">i4", np.int16, np.uint32):
        back = decode_routes_npy(npy(np.full((1, 2, 2), 300, dtype)))
        assert (back.array.dtype, back.array.tolist()) == (np.uint16, [[[300, 300], [300, 300]]])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "!",
        base64.b64encode(b"\x93NUMPY").decode(),
        base64.b64encode(b"PK\x03\x04junk").decode(),
        base64.b64encode(b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', 'fortran_order': False, 'shape': (9,9,9)}".ljust(118)).decode(),
        base64.b64encode(b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999,9,9)}".ljust(118)).decode(),
        base64.b64encode(b"\x93NUMPY\x01\x00\x76\x00" + b"(((((".ljust(118)).decode(),
        npy(np.zeros((2, 2), np.uint8)),
        npy(np.zeros((2, 2, 2), np.float32)),
        npy(np.full((1, 1, 1), -1)),
        npy(np.array([[[object()]]], dtype=object), allow_pickle=True),
    ],
)  # fmt: skip
def test_what_is_no_route_file_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_routes_npy(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": "AAA="}, "needs 4 bytes, got 2"),
        ({"data": "!!"}, "not base64"),
        ({"data": None}, "not base64"),
        ({"shape": [4]}, "is not .rows, layers, top_k."),
        ({"shape": [2**62, 4, 1]}, "needs 18446744073709551616 bytes, got 4"),
        ({"shape": [-1, 2, 2]}, "is not .rows"),
        ({"shape": [True, 2, 2]}, "is not .rows"),
        ({"dtype": "int64"}, "'int64' is not"),
        ({"dtype": ["uint8"]}, "is not uint8"),
        ({"start": -1}, "start -1"),
        ({"start": 1.0}, "start 1.0"),
    ],
)
def test_broken_structured_routes_are_refused_with_their_numbers(changes: dict[str, Any], says: str) -> None:
    good = {"data": "AAECAw==", "shape": [1, 2, 2], "start": 0, "dtype": "uint8"}
    assert decode_routes_structured(good).array.tolist() == [[[0, 1], [2, 3]]]
    with pytest.raises(ValueError, match=says):
        decode_routes_structured(good | changes)
    for key in changes:
        with pytest.raises(ValueError, match="lacks"):
            decode_routes_structured({k: v for k, v in good.items() if k != key})


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(0, "uint8"), (255, "uint8"), (256, "uint16"), (511, "uint16"), (65535, "uint16"), (65536, "int32")],
)
def test_expert_ids_take_the_narrowest_dtype_that_holds_them(largest: int, dtype: str) -> None:
    array = np.array([[[0, largest]]], np.int64)
    assert narrow_expert_ids(array).dtype == dtype
    assert narrow_expert_ids(array, num_experts=largest + 1).dtype == dtype
    assert narrow_expert_ids(array).tolist() == array.tolist()


@pytest.mark.parametrize("bad", [-1, 2**31])
def test_ids_that_are_no_expert_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=str(bad)):
        narrow_expert_ids(np.array([[[0, bad]]]))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6))
def test_mask_rows_and_csr_say_the_same(rows: list[list[int]]) -> None:
    mask = SamplingMask(ids=int32([x for row in rows for x in row]), offsets=offsets_of(rows))
    assert mask.rows() == rows


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3), max_size=4))
def test_concatenated_offsets_are_those_of_the_whole(parts: list[list[list[int]]]) -> None:
    whole = offsets_of([row for part in parts for row in part])
    found = concat_offsets([offsets_of(part) for part in parts])
    assert (found.tolist(), found.dtype) == (whole.tolist(), np.int32)


@pytest.mark.parametrize("part", [[], [1, 2]])
def test_offsets_that_are_none_are_refused(part: list[int]) -> None:
    with pytest.raises(ValueError, match="start at 0"):
        concat_offsets([int32([0, 1]), int32(part)])
