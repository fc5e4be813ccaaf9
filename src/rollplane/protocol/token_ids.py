"""The prompt's token ids: read from a body's text without a Python object per token, and held to int32."""

from typing import Any, Final, NoReturn

import msgspec
import numpy as np

from rollplane.errors import InvalidRequest
from rollplane.protocol.arrays import INT32_MAX, Int32Array, dec_hook
from rollplane.protocol.opaque import json_kind

_BLANKS: Final = b" \t\r\n"
_INTEGER_TEXT: Final = b"0123456789-," + _BLANKS

_UNSIGNED: Final[dict[Any, np.dtype[Any]]] = {
    np.dtype(np.int32): np.dtype(np.uint32),
    np.dtype(np.int64): np.dtype(np.uint64),
}
_MSGPACK_IDS: msgspec.msgpack.Decoder[Int32Array] = msgspec.msgpack.Decoder(Int32Array, dec_hook=dec_hook)


def read_packed_ids(raw: msgspec.Raw) -> Int32Array:
    """The ids in one msgpack value: an array of integers, or an array as the wire packs it.

    Raises:
        InvalidRequest: neither, or naming the first id outside [0, 2**31 - 1].
    """
    try:
        ids = _MSGPACK_IDS.decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"token_ids: {error}", param="token_ids") from None
    except RecursionError:
        raise InvalidRequest("token_ids is nested too deeply", param="token_ids") from None
    return check_token_ids(ids)


def read_json_ids(raw: bytes) -> Int32Array:
    """The ids in the text of one JSON value whose syntax was checked before.

    Raises:
        InvalidRequest: naming the first entry that is not an integer in [0, 2**31 - 1].
    """
    # numpy's number reader alone is too kind: it takes `+1`, `007`, `-` as 0, and before numpy 2.3 it stops at `2.5` and
    # answers 2. In valid JSON, an array of nothing but digits, minus signs, commas and blanks holds integers only.
    text = raw.strip(_BLANKS)
    inner = text[1:-1].strip(_BLANKS)
    if not text.startswith(b"[") or inner.translate(None, _INTEGER_TEXT):
        _refuse_token_ids(text)
    if not inner:
        raise InvalidRequest("token_ids must not be empty", param="token_ids")
    return check_token_ids(np.fromstring(inner, dtype=np.int64, sep=","))


def check_token_ids(ids: np.ndarray[Any, Any]) -> Int32Array:
    """The prompt as int32 [prompt].

    Raises:
        InvalidRequest: not one dimension, empty, or naming the first id outside [0, 2**31 - 1].
    """
    if ids.ndim != 1:
        raise InvalidRequest(f"token_ids must have one dimension, has {ids.ndim}", param="token_ids")
    if ids.size == 0:
        raise InvalidRequest("token_ids must not be empty", param="token_ids")
    if largest_id(ids) > INT32_MAX:
        bad = int(np.flatnonzero((ids < 0) | (ids > INT32_MAX))[0])
        value = int(ids[bad])
        # The reader saturates at 64 bits, so the largest value may stand for any number.
        shown = "" if value == 2**63 - 1 else f"{value}, "
        raise InvalidRequest(f"token_ids[{bad}] is {shown}outside [0, {INT32_MAX}]", param=f"token_ids[{bad}]")
    return ids.astype(np.int32, copy=False)


def largest_id(ids: np.ndarray[Any, Any]) -> int:
    """The largest of some integers [N], N > 0; one over int32 where any is negative, so that one pass finds both."""
    unsigned = _UNSIGNED.get(ids.dtype)
    if unsigned is not None:
        ids = ids.view(unsigned)
    elif ids.item(ids.argmin()) < 0:
        return INT32_MAX + 1
    return int(ids.item(ids.argmax()))  # of a few ids it costs half of the largest itself


def _refuse_token_ids(text: bytes) -> NoReturn:
    """Say which entry is not an integer: the slow way, taken only for bad input."""
    try:
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"token_ids cannot be decoded: {error}", param="token_ids") from None
    except RecursionError:
        raise InvalidRequest("token_ids is nested too deeply", param="token_ids") from None
    if not isinstance(values, list):
        raise InvalidRequest(f"token_ids must be an array of integers, got {json_kind(values)}", param="token_ids")
    for i, value in enumerate(values):
        if type(value) is not int:
            raise InvalidRequest(f"token_ids[{i}] must be an integer, got {json_kind(value)}", param=f"token_ids[{i}]")
    raise InvalidRequest("token_ids must be a plain array of integers", param="token_ids")
