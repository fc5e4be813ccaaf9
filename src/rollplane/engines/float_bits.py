"""Whether numbers that lie in memory as bytes are all finite, by their safetensors dtype: no torch, no conversion."""

from typing import Final

import numpy as np

EXPONENT_BITS: Final = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
}
"""All of them set: an infinity or no number."""


def all_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Whether none of the little-endian numbers in `data` is infinite or no number; other dtypes than floats have none.

    Args:
        data: whole numbers (what is left over at the end is not looked at); a mapping that it lies over may be closed
            afterwards.
        dtype: `F32`, `BF16`, as safetensors names them.
    """
    if dtype not in EXPONENT_BITS:
        return True
    kind, mask = EXPONENT_BITS[dtype]
    count = len(data) // np.dtype(kind).itemsize
    if count == 0:
        return True
    values = np.frombuffer(data, dtype=kind, count=count)
    found = bool(((values & mask) == mask).any())
    del values  # a map cannot close while an array lies over it
    return not found
