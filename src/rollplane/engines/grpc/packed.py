"""A repeated uint32 field from an array, without a Python number per entry, and fields as bytes. Pure."""

from typing import Any, Final

from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.token_ids import largest_id

FEW: Final = 640
"""Up to so many entries a list costs less."""
MOST: Final = (1 << 28) - 1
"""The largest number whose varint has four bytes."""


def extend_field(message: Any, name: str, values: Int32Array) -> None:
    """Add numbers to a packed field of a message whose only set field it is.

    Raises:
        ValueError: a negative number.
    """
    if values.size <= FEW or largest_id(values) > MOST:
        getattr(message, name).extend(values.tolist())
        return
    number = message.DESCRIPTOR.fields_by_name[name].number
    message.MergeFromString(as_field(packed_varints(values), number=number))


def as_field(data: bytes, *, number: int) -> bytes:
    """A message whose only field has this number and these bytes."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def packed_varints(values: Int32Array) -> bytes:
    """The varints of numbers [N] from 0 to `MOST`, one after the other, each of four bytes.

    A varint may have bytes more than it needs. They reach no wire: protobuf writes the numbers anew.
    """
    wide = values.astype("<u4")
    cells = wide & 0x7F
    cells |= 0x808080
    for i in range(1, 4):
        wide <<= 1
        cells |= wide & (0x7F << 8 * i)
    return cells.tobytes()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
