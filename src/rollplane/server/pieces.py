"""Writes an answer piece by piece, at its reader's pace, so that neither a copy of all of it nor one long write is made."""

import asyncio
from collections.abc import Mapping, Sequence

from starlette.types import Receive, Scope, Send

from rollplane.errors import TransportError
from rollplane.protocol.pieces import Piece, size_of


class PiecesAnswer:
    """The ASGI answer of a whole encoding in pieces.

    Args:
        stall_s: a reader that takes nothing for so long is cut off.
    """

    def __init__(
        self, pieces: Sequence[Piece], *, media_type: str, stall_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        self._pieces = pieces
        self._stall_s = stall_s
        self._headers = {"content-length": str(size_of(pieces)), "content-type": media_type, **(headers or {})}

    def __repr__(self) -> str:
        return f"<PiecesAnswer {len(self._pieces)} pieces, {self._headers['content-length']} bytes>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it.

        Raises:
            TransportError: the reader took nothing for too long.
        """
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_pieces(send, self._pieces, stall_s=self._stall_s, more=False)


async def send_pieces(send: Send, pieces: Sequence[Piece], *, stall_s: float, more: bool) -> None:
    """Send pieces of a body that has begun; `more`: something follows them.

    Raises:
        TransportError: the reader took nothing for too long.
    """
    last = len(pieces) - 1
    for i, piece in enumerate(pieces):
        if i:
            await asyncio.sleep(0)  # a socket with much room would take them all before anybody else has a turn
        try:
            async with asyncio.timeout(stall_s):
                await send({"type": "http.response.body", "body": piece, "more_body": more or i < last})
        except TimeoutError:
            raise TransportError(f"the reader took nothing for {stall_s:g} s") from None
