"""How an HTTP error answer of ours is read, by the client and on the internal hop alike. No I/O."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rollplane.errors import RollplaneError, error_from_body

MAX_QUOTED_CHARS = 300


def error_from_answer(status: int, body: bytes, headers: Mapping[str, str], *, url: str) -> RollplaneError:
    """The typed error of an answer whose status is not 2xx.

    A body that is not one of ours (a proxy's page, nothing at all) becomes an error by status that quotes its start.
    """
    found = _error_object(body)
    if found is None:
        text = body[: MAX_QUOTED_CHARS * 4].decode("utf-8", "replace")
        text = " ".join(text.split())[:MAX_QUOTED_CHARS]
        found = {"message": f"{url} answered {status}: {text or 'an empty body'}"}
    error = error_from_body(found, status=status)
    after = headers.get("Retry-After") or headers.get("retry-after")
    if after is not None and "retry_after_s" not in found:
        # The header may also carry a date; then our own pause is used.
        error.retry_after_s = float(after) if after.isascii() and after.isdigit() else error.retry_after_s
    return error


def _error_object(body: bytes) -> dict[str, Any] | None:
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    inner = tree.get("error") if isinstance(tree, dict) else None
    if isinstance(inner, dict):
        return inner
    if isinstance(tree, dict) and isinstance(tree.get("message"), str):
        return tree
    return {"message": inner} if isinstance(inner, str) else None
