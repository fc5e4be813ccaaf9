"""Who asks: the head of a request, and what its connection knows beyond ASGI, where the connection is ours.

ASGI tells of a hang-up only to whoever waits for it, and of a body only by messages. A connection that can say both at
once spares every request a task, a timer and messages; on other servers both are found out in ASGI's way (`server.watch`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from starlette.types import Scope

PEER: Final = "rollplane.peer"
_HEAD: Final = "rollplane.head"


class Peer(Protocol):
    """The caller's end of one request, in `scope["extensions"]["rollplane.peer"]`."""

    hang_ups: set[Callable[[], Any]]
    """Called once when the caller leaves before its answer is sent; empty for those who need not know."""

    @property
    def gone(self) -> bool:
        """Whether the caller has left."""
        ...

    def take_body(self) -> bytes | None:
        """The whole body where it is here; None: it is still to come, by ASGI's messages."""
        ...

    def answer(self, head: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send status 200, a head that says the body's length, and the body, all at once. False: nothing was sent, for ASGI's
        messages have to (something was sent before, the caller reads slowly, or is gone).
        """
        ...


def peer_of(scope: Scope) -> Peer | None:
    """The caller's end of a request, None on servers that offer none."""
    found: Peer | None = scope.get("extensions", {}).get(PEER)
    return found


def head_of(scope: Scope) -> dict[str, str]:
    """The request's headers, names in lower case as ASGI has them, read once per request; the first of a repeated name."""
    known: dict[str, str] | None = scope.get(_HEAD)
    if known is None:
        known = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        scope[_HEAD] = known
    return known
