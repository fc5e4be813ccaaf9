"""Weights from the trainer's memory: what is said about them in JSON, and how they are packed into buckets.

Only names, dtypes and shapes travel as text; the values are raw bytes in a collective broadcast from rank 0. Both ends
compute the same buckets from the same manifest, so nothing about the layout is sent and nothing is unpickled.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from rollplane.errors import InvalidRequest

Backend = Literal["gloo", "nccl"]

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of every dtype that can be named; an engine may read fewer."""

ALIGN_BYTES: Final = 16
"""Every tensor starts at a multiple of this inside its bucket, so that it can be viewed in place."""
MAX_TENSORS: Final = 1_000_000
MAX_DIMENSIONS: Final = 16
MAX_RANKS: Final = 1 << 20
DEFAULT_BUCKET_BYTES: Final = 256 * 2**20
MAX_BUCKET_BYTES: Final = 1 << 40


class TransferGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective group of a trainer (rank 0) and the receiving ranks of its workers.

    `master_address`, `master_port`: where rank 0 keeps the group's store. `rank_offset`: the rank of this worker's first
    receiver, from 1. `world_size`: all ranks, the trainer's included. `group_name`: tells groups of one store apart.
    """

    master_address: Annotated[str, Meta(min_length=1, max_length=255)]
    master_port: Annotated[int, Meta(ge=1, le=65_535)]
    rank_offset: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    world_size: Annotated[int, Meta(ge=2, le=MAX_RANKS)]
    group_name: Annotated[str, Meta(min_length=1, max_length=128)] = "weights"
    backend: Backend = "gloo"

    def check(self, *, receivers: int) -> None:
        """Whether this worker's ranks fit into the group.

        Raises:
            InvalidRequest: naming the numbers.
        """
        if self.rank_offset + receivers > self.world_size:
            raise InvalidRequest(
                f"ranks {self.rank_offset} to {self.rank_offset + receivers - 1} of this worker do not fit into a world of "
                f"{self.world_size} (rank 0 is the trainer)",
                param="rank_offset",
            )


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor: its name as in a checkpoint on disk, its dtype by torch's name, its shape."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]

    @property
    def bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is about to be broadcast, in the order in which it is packed. `bucket_bytes`: most bytes per broadcast."""

    tensors: Annotated[list[TensorSpec], Meta(min_length=1, max_length=MAX_TENSORS)]
    bucket_bytes: Annotated[int, Meta(ge=ALIGN_BYTES, le=MAX_BUCKET_BYTES)] = DEFAULT_BUCKET_BYTES

    @property
    def bytes(self) -> int:
        """Bytes of all values, without padding."""
        return sum(tensor.bytes for tensor in self.tensors)

    def check(self) -> None:
        """Names are unique, dtypes are known.

        Raises:
            InvalidRequest: naming the tensor.
        """
        seen: set[str] = set()
        for i, tensor in enumerate(self.tensors):
            if tensor.dtype not in DTYPE_BYTES:
                raise InvalidRequest(
                    f"tensor {tensor.name} has dtype {tensor.dtype[:32]!r}; known are {', '.join(DTYPE_BYTES)}",
                    param=f"tensors[{i}].dtype",
                )
            if len(tensor.shape) > MAX_DIMENSIONS:
                raise InvalidRequest(
                    f"tensor {tensor.name} has {len(tensor.shape)} dimensions, the limit is {MAX_DIMENSIONS}",
                    param=f"tensors[{i}].shape",
                )
            if tensor.name in seen:
                raise InvalidRequest(f"tensor {tensor.name} is named twice", param=f"tensors[{i}].name")
            seen.add(tensor.name)


class Placement(NamedTuple):
    """Where a tensor lies in its bucket, in bytes."""

    tensor: TensorSpec
    offset: int


class Bucket(NamedTuple):
    """One broadcast: a flat uint8 buffer of `bytes`."""

    bytes: int
    placements: list[Placement]


def buckets(manifest: Manifest) -> Iterator[Bucket]:
    """The buckets of a manifest, in order: filled greedily, a tensor over the limit alone in one of its own."""
    placements: list[Placement] = []
    used = 0
    for tensor in manifest.tensors:
        at = -(-used // ALIGN_BYTES) * ALIGN_BYTES
        if placements and at + tensor.bytes > manifest.bucket_bytes:
            yield Bucket(used, placements)
            placements, at = [], 0
        placements.append(Placement(tensor, at))
        used = at + tensor.bytes
    if placements:
        yield Bucket(used, placements)


class GroupReport(msgspec.Struct, kw_only=True):
    """A worker's transfer group. `active` False: there is none (any more). `ranks`: this worker's own."""

    active: bool
    group_name: str | None = None
    backend: Backend | None = None
    ranks: list[int] = msgspec.field(default_factory=list)
    world_size: int | None = None
