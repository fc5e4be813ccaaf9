"""A repeated uint32 field from an array, without a Python number per entry, and fields as bytes. Pure."""

from typing import Any, Final

import numpy as np

from rollplane.protocol.arrays import Int32Array

FEW: Final = 1024
"""Up to so many entries a list costs less."""
_BOUNDS: Final = tuple(1 << 7 * i for i in range(1, 5))
"""From each of these on, a varint has one byte more."""


def extend_field(message: Any, name: str, values: Int32Array) -> None:
    """Add numbers, none negative, to a packed field of a message whose only set field it is."""
    if values.size <= FEW:
        getattr(message, name).extend(values.tolist())
        return
    number = message.DESCRIPTOR.fields_by_name[name].number
    message.MergeFromString(as_field(packed_varints(values), number=number))


def as_field(data: bytes, *, number: int) -> bytes:
    """A message whose only field has this number and these bytes."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def packed_varints(values: Int32Array) -> bytes:
    """The varints of numbers [N], N > 0, none negative, one after the other."""
    wide = values.view(np.uint32)
    width = 1 + sum(int(np.maximum.reduce(wide)) >= bound for bound in _BOUNDS)
    cells = np.empty((wide.size, width), dtype=np.uint8)
    keep = np.ones((wide.size, width), dtype=np.bool_)
    for i in range(width):
        cells[:, i] = (wide >> 7 * i) & 0x7F
        if i + 1 < width:
            more = wide >= _BOUNDS[i]
            cells[:, i] |= more.view(np.uint8) << 7
            keep[:, i + 1] = more
    return cells[keep].tobytes() if width > 1 else cells.tobytes()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
