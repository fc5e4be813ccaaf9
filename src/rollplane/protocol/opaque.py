"""Opaque values: parts of a request that are handed on unread, bounded so that every hop can carry them."""

import math
from typing import Any, Final

from rollplane.errors import InvalidRequest

MAX_OPAQUE_DEPTH: Final = 64
"""Levels of objects and arrays: far below every encoder's and Python's own recursion limit, wherever it is reached."""

_TOO_DEEP: Final = f"is nested more than {MAX_OPAQUE_DEPTH} levels deep"


def check_opaque(value: Any, *, param: str) -> None:
    """Refuse what some hop could not carry exactly: JSON, msgpack, a Python dict and back.

    Raises:
        InvalidRequest: naming the path of a non-finite number, an integer outside 64 bits, a key that is not a string, a
            value that JSON has no word for, or more than 64 levels.
    """
    found = _find_bad(value, MAX_OPAQUE_DEPTH)
    if found is not None:
        path, says = found
        path = "" if says is _TOO_DEEP else path
        raise InvalidRequest(f"{param}{path} {says}", param=f"{param}{path}")


def json_kind(value: Any) -> str:
    """What a value is, in JSON's words, for a refusal to name."""
    names = {bool: "a boolean", str: "a string", float: "a number with a fraction", dict: "an object", list: "an array"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _find_bad(value: Any, depth: int) -> tuple[str, str] | None:
    """(path below this value, what is wrong); the path is written on the way out only."""
    if value is None or isinstance(value, (bool, str)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", f"must be a finite number, got {value!r}")
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else ("", "must be a 64-bit integer")
    if not isinstance(value, (dict, list)):
        return "", f"must be what JSON can say, got {type(value).__name__}"
    if depth == 0:
        return "", _TOO_DEEP
    if isinstance(value, list):
        for i, inner in enumerate(value):
            if found := _find_bad(inner, depth - 1):
                return f"[{i}]{found[0]}", found[1]
        return None
    for key, inner in value.items():
        if not isinstance(key, str):
            return "", f"must have strings for keys, got {type(key).__name__}"
        if found := _find_bad(inner, depth - 1):
            return f".{key}{found[0]}", found[1]
    return None
