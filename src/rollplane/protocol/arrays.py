"""Arrays on the wire: one encoding for every numpy array in msgpack, and the array types that records name.

In msgpack an array is the map `{"dtype": str, "shape": [int, ...], "data": bin}`: C-order, little-endian, dtype by its
numpy name (`int32`, `float32`, `uint8`, `uint16`, `bool`). No other dtype crosses a wire of ours.
"""

import functools
import math
from typing import Any, Final, get_args

import msgspec
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
"""Token ids, offsets, ranks; shape stated where a field is declared."""
Float32Array = npt.NDArray[np.float32]
"""Log-probabilities in nats."""
BoolArray = npt.NDArray[np.bool_]
"""Flags, one per position."""
ExpertArray = np.ndarray[Any, Any]
"""Expert ids; uint8, uint16 or int32, the narrowest that holds the largest id."""

WIRE_DTYPES = frozenset({"int32", "float32", "uint8", "uint16", "bool", "int64"})
_DTYPES: Final = {name: np.dtype(name).newbyteorder("<") for name in sorted(WIRE_DTYPES)}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
"""numpy works a dtype's name out anew at every look."""

INT32_MAX: Final = 2**31 - 1
MAX_DIMENSIONS: Final = 8
SMALL_BYTES: Final = 4096
"""Up to so many, a copy costs less than a view of the memory."""
_ARRAY_KEYS: Final = frozenset({"dtype", "shape", "data"})


def encode_array(array: npt.NDArray[Any]) -> dict[str, Any]:
    """The wire map of an array, over its own memory where it is C-contiguous and not small (msgspec copies once)."""
    name, data = _NAMES.get(array.dtype), array
    if name is not None and array.nbytes <= SMALL_BYTES:
        return {"dtype": name, "shape": array.shape, "data": array.tobytes()}
    if name is None:
        name = array.dtype.name
        if name not in WIRE_DTYPES:
            raise TypeError(f"an array of dtype {name} does not cross the wire; allowed: {sorted(WIRE_DTYPES)}")
        data = np.ascontiguousarray(array, dtype=_DTYPES[name])
    elif not array.flags.c_contiguous:
        data = np.ascontiguousarray(array)
    return {"dtype": name, "shape": array.shape, "data": data.data.cast("B") if data.size else b""}


def decode_array(obj: Any) -> npt.NDArray[Any]:
    """The array of a wire map, over the decoded bytes (read-only, no copy).

    Raises:
        ValueError: the map is incomplete, its dtype is not one of ours, or shape and data disagree; with the numbers.
    """
    if not isinstance(obj, dict) or obj.keys() != _ARRAY_KEYS:
        raise ValueError("an array is a map of dtype, shape and data")
    name, shape, data = obj["dtype"], obj["shape"], obj["data"]
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"array dtype {name!r} is not one of {sorted(WIRE_DTYPES)}")
    if not isinstance(shape, list) or any(map(_is_odd, shape)):
        raise ValueError(f"array shape {shape!r} is not a list of sizes")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"array shape has {len(shape)} dimensions, the limit is {MAX_DIMENSIONS}")
    if not isinstance(data, (bytes, memoryview)):
        raise ValueError(f"array data is a {type(data).__name__}, not bytes")
    wanted = (shape[0] if len(shape) == 1 else math.prod(shape)) * dtype.itemsize
    if wanted != len(data):
        raise ValueError(f"array of shape {shape} and dtype {name} needs {wanted} bytes, got {len(data)}")
    if name == "bool" and np.frombuffer(data, dtype=np.uint8).max(initial=0) > 1:
        raise ValueError("array data of dtype bool holds bytes other than 0 and 1")
    array = np.frombuffer(data, dtype=dtype)
    return array if len(shape) == 1 else array.reshape(shape)


def _is_odd(size: Any) -> bool:
    return type(size) is not int or size < 0


def enc_hook(obj: Any) -> Any:
    """msgspec hook: arrays become wire maps, numpy scalars become numbers."""
    if isinstance(obj, np.ndarray):
        return encode_array(obj)
    if isinstance(obj, np.generic):
        return obj.item()
    raise NotImplementedError(f"{type(obj).__name__} does not cross the wire")


_ITEMS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "i": ((int,), "integers"),
    "f": ((int, float), "numbers"),
    "b": ((bool,), "booleans"),
}
"""What a plain list may hold by the kind of dtype: numpy alone would read the string "1.5" as a number."""


def dec_hook(kind: Any, obj: Any) -> Any:
    """msgspec hook: wire maps become arrays; a plain list of integers or numbers is taken too (small clients)."""
    wanted = _wanted_dtype(kind)
    if isinstance(obj, list) and wanted is not None:
        allowed, says = _ITEMS[wanted.kind]
        if not all(type(x) in allowed for x in obj):
            raise ValueError(f"expected {says}")
        try:
            with np.errstate(over="raise"):
                return np.array(obj, dtype=wanted)
        except (OverflowError, FloatingPointError, ValueError, TypeError) as error:
            raise ValueError(f"not an array of {wanted.name}: {error}") from None
    array = decode_array(obj)
    if wanted is not None and array.dtype != wanted:
        raise ValueError(f"array dtype is {array.dtype.name}, expected {wanted.name}")
    return array


@functools.cache
def _wanted_dtype(kind: Any) -> np.dtype[Any] | None:
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise NotImplementedError(f"{kind} does not cross the wire")
    args = get_args(kind)
    inner = get_args(args[1]) if len(args) == 2 else ()
    if inner and isinstance(inner[0], type) and issubclass(inner[0], np.generic):
        return np.dtype(inner[0])
    return None


def empty_int32() -> Int32Array:
    """A length-0 int32 array."""
    return np.empty(0, dtype=np.int32)


def msgpack_encoder() -> msgspec.msgpack.Encoder:
    """An encoder that writes arrays as wire maps."""
    return msgspec.msgpack.Encoder(enc_hook=enc_hook)
