"""An operation followed over HTTP: server-sent lines in, `OperationEvent`s out."""

from typing import Final

import msgspec

from rollplane.errors import TransportError
from rollplane.protocol.admin import OperationEvent

MAX_LINE_BYTES: Final = 4 * 2**20
"""A failed update of many workers names each of them."""

_decoder = msgspec.json.Decoder(OperationEvent)


class EventLines:
    """Cuts bytes into events; feed it what arrives. `done`: the server said that nothing more comes."""

    def __init__(self) -> None:
        self.done = False
        self._buffer = bytearray()

    def __repr__(self) -> str:
        return f"<EventLines {len(self._buffer)} bytes waiting{', done' if self.done else ''}>"

    def feed(self, data: bytes) -> list[OperationEvent]:
        """The events that are whole now.

        Raises:
            TransportError: a line over the limit, or one that cannot be read.
        """
        self._buffer += data
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        if len(rest) > MAX_LINE_BYTES:
            raise TransportError(f"an event of an operation is over the limit of {MAX_LINE_BYTES} bytes")
        found = []
        for line in lines:
            if not line.startswith(b"data: "):
                continue  # its id and kind are in the data too; comments only keep the connection alive
            content = line.removeprefix(b"data: ").strip()
            if content == b"[DONE]":
                self.done = True
                break
            try:
                found.append(_decoder.decode(content))
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise TransportError(f"an event of an operation cannot be read: {error}") from None
        return found
