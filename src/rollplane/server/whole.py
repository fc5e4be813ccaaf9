"""An answer whose bytes are all there, as an ASGI app: no more than a head and a body."""

from typing import Final

from starlette.types import Receive, Scope, Send

from rollplane.server.observe import id_header
from rollplane.server.peer import peer_of

_LENGTH: Final = b"content-length"
_TYPE: Final = b"content-type"


class WholeAnswer:
    """Status 200 with `body`.

    Args:
        kind: the content type.
        headers: more of them, names in lower case.
    """

    __slots__ = ("_body", "_headers", "_kind")

    def __init__(self, body: bytes, *, kind: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self._body = body
        self._kind = kind
        self._headers = headers

    def __repr__(self) -> str:
        return f"<WholeAnswer {self._kind.decode()}, {len(self._body)} bytes>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        head = [(_LENGTH, b"%d" % len(self._body)), (_TYPE, self._kind), *self._headers]
        peer = peer_of(scope)
        if peer is not None and peer.answer((*head, id_header(scope)), self._body):
            return
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": self._body, "more_body": False})
