"""Which part of a body cannot be decoded: told in the refusal, where the decoder tells a byte or nothing."""

from typing import Any, Final

import msgspec

from rollplane.errors import InvalidRequest

MAX_NAMED_LEVELS: Final = 8
"""Objects below one another that are looked into."""

_JSON_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MSGPACK_MEMBERS: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def undecodable(
    raw: bytes | memoryview | msgspec.Raw, *, root: str = "", is_json: bool = True, levels: int = MAX_NAMED_LEVELS
) -> InvalidRequest | None:
    """Our error for a value that cannot be decoded, named by the innermost member that has the fault; None where it can be.

    Args:
        root: the value's own name; "" is the whole body.
        levels: how many more objects may be looked into.
    """
    says = _fault(raw, is_json=is_json)
    if says is None:
        return None
    for name, member in _members(raw, is_json=is_json).items() if levels else ():
        inner = undecodable(member, root=f"{root}.{name}" if root else name, is_json=is_json, levels=levels - 1)
        if inner is not None:
            return inner
    if root:
        return InvalidRequest(f"{root} {says}", param=root)
    return InvalidRequest(f"the body {says}".replace("cannot be decoded", f"is not {'JSON' if is_json else 'msgpack'}"))


def _fault(raw: Any, *, is_json: bool) -> str | None:
    try:
        (msgspec.json if is_json else msgspec.msgpack).decode(raw)
    except RecursionError:
        return "is nested too deeply"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"cannot be decoded: {error}".partition(" - at `")[0]
    return None


def _members(raw: Any, *, is_json: bool) -> dict[str, msgspec.Raw]:
    try:
        return (_JSON_MEMBERS if is_json else _MSGPACK_MEMBERS).decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
