"""Counter-based pseudo-randomness: a value per (key, counter), for whole arrays at once."""

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_A: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B: Final = np.uint64(0x94D049BB133111EB)
_MASK: Final = 2**64 - 1


def key_of(*parts: bytes | str | int | None) -> int:
    """A 64-bit key of the parts; each led by its length, so that no two lists share an input."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def mix(values: UInt64Array) -> UInt64Array:
    """The finaliser of splitmix64, elementwise."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_A
    values = (values ^ (values >> np.uint64(27))) * _MIX_B
    return values ^ (values >> np.uint64(31))


def stream(key: int, counters: npt.NDArray[Any], *, salt: int = 0) -> UInt64Array:
    """One 64-bit value per counter, of the stream named by key and salt."""
    start = np.uint64((key ^ (salt * 0xD1B54A32D192ED03)) & _MASK)
    return mix(start + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniforms(key: int, counters: npt.NDArray[Any], *, salt: int = 0) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per counter."""
    return (stream(key, counters, salt=salt) >> np.uint64(11)).astype(np.float64) * 2.0**-53
