from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplane.errors import InvalidRequest
from rollplane.protocol.broadcast import ALIGN_BYTES, DTYPE_BYTES, Manifest, TensorSpec, TransferGroup, buckets


def spec(name: str, shape: list[int], dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


shapes = st.lists(st.integers(0, 40), max_size=3)


@given(
    st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPE_BYTES))), min_size=1, max_size=30),
    st.integers(ALIGN_BYTES, 4096),
)
def test_every_tensor_is_packed_once_in_order_aligned_and_alone_where_it_is_over_the_limit(
    tensors: list[tuple[list[int], str]], limit: int
) -> None:
    manifest = Manifest(
        tensors=[spec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(tensors)], bucket_bytes=limit
    )
    packed = list(buckets(manifest))
    assert [p.tensor for bucket in packed for p in bucket.placements] == manifest.tensors
    for bucket in packed:
        ends = 0
        for placed in bucket.placements:
            assert placed.offset % ALIGN_BYTES == 0
            assert placed.offset >= ends
            ends = placed.offset + placed.tensor.bytes
        assert bucket.bytes == ends
        assert bucket.bytes <= limit or len(bucket.placements) == 1


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([spec("a", [1]), spec("a", [2])], "a is named twice"),
        ([spec("a", [1], "complex64")], "dtype 'complex64'"),
        ([spec("a", [1] * 17)], "17 dimensions"),
    ],
)
def test_a_manifest_that_cannot_be_packed_is_refused_by_name(tensors: list[TensorSpec], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Manifest(tensors=tensors).check()


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a", "dtype": "float32", "shape": [-1]},
        {"name": "", "dtype": "float32", "shape": [1]},
        {"name": "a", "dtype": "float32", "shape": [1], "data": "gASVDAAAAAAAAACMCGJ1aWx0aW5z"},
    ],
)
def test_a_tensor_is_described_by_name_dtype_and_shape_and_nothing_else(body: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(body, TensorSpec)


@pytest.mark.parametrize(("offset", "receivers", "fits"), [(1, 1, True), (1, 2, True), (2, 1, True), (2, 2, False)])
def test_a_workers_ranks_lie_inside_the_group(offset: int, receivers: int, fits: bool) -> None:
    group = TransferGroup(master_address="h", master_port=1, rank_offset=offset, world_size=3)
    if fits:
        group.check(receivers=receivers)
    else:
        with pytest.raises(InvalidRequest, match="ranks 2 to 3"):
            group.check(receivers=receivers)
