"""The internal hop: what a frontend sends a worker and what comes back.

Request: one POST whose body is the msgpack of a `HopRequest`. Answer: frames, each an unsigned 32-bit big-endian length
and the msgpack of a list of events. A unary answer is one frame. A stream is as many frames as it has moments. An error
is an `ErrorEvent` and always the last of its frame. Both sides name `WIRE_VERSION`; another one is refused before the
body is read.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from rollplane.errors import InvalidRequest, TransportError
from rollplane.protocol.answer import WIRE_VERSION
from rollplane.protocol.arrays import dec_hook, enc_hook
from rollplane.protocol.events import HopEvent
from rollplane.protocol.request import GenerateRequest, check_carried

FRAMES: Final = "application/x-rollplane-frames"
WIRE_HEADER: Final = "x-rollplane-wire"
GENERATE_PATH: Final = "/internal/v1/generate"
STATE_PATH: Final = "/internal/v1/state"
KEYS_PATH: Final = "/internal/v1/keys"
MAX_FRAME_BYTES: Final = 1 << 30

_LENGTH: Final = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
_events_decoder = msgspec.msgpack.Decoder(list[HopEvent], dec_hook=dec_hook)


class HopRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request on its way to a worker. `deadline_s`: seconds left when it was sent."""

    wire: int
    request: GenerateRequest
    frontend: str = ""
    deadline_s: float | None = None


class KeyClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An idempotency key, and the worker (by address) that is to keep its answer unless another does already."""

    key: str
    keeper: str
    number: int = 1


class KeyKeeper(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the worker that keeps a key's answer, and which one in a row it is."""

    keeper: str
    number: int


_request_decoder = msgspec.msgpack.Decoder(HopRequest, dec_hook=dec_hook)


def encode_hop_request(request: GenerateRequest, *, frontend: str = "", deadline_s: float | None = None) -> bytes:
    """The body of the internal POST."""
    return _encoder.encode(HopRequest(wire=WIRE_VERSION, request=request, frontend=frontend, deadline_s=deadline_s))


def decode_hop_request(body: bytes) -> HopRequest:
    """The request in an internal body.

    Raises:
        InvalidRequest: not such a body, another wire version, or a request that `parse_request` would refuse.
    """
    try:
        hop = _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the internal envelope cannot be read: {error}") from None
    except RecursionError:
        raise InvalidRequest("the internal envelope is nested too deeply") from None
    if hop.wire != WIRE_VERSION:
        raise InvalidRequest(f"the frontend speaks wire version {hop.wire}, this worker {WIRE_VERSION}")
    if hop.deadline_s is not None and not math.isfinite(hop.deadline_s):
        raise InvalidRequest(f"the internal envelope's deadline_s must be finite, got {hop.deadline_s!r}")
    check_carried(hop.request)
    return hop


def encode_frame(events: Sequence[HopEvent]) -> bytes:
    """One frame with these events."""
    body = _encoder.encode(list(events))
    if len(body) > MAX_FRAME_BYTES:
        raise TransportError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames; feed it what arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __repr__(self) -> str:
        return f"<FrameReader {len(self._buffer)} bytes waiting>"

    def feed(self, data: bytes) -> Iterator[list[HopEvent]]:
        """The events of every frame that is now whole. All of them are taken out of the buffer before this returns.

        Raises:
            TransportError: a frame over the limit, or one that cannot be read.
        """
        self._buffer += data
        found: list[list[HopEvent]] = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MAX_FRAME_BYTES:
                raise TransportError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as whole:
                body = bytes(whole[at + _LENGTH.size : end])
            at = end
            found.append(decode_events(body))
        del self._buffer[:at]
        return iter(found)

    def finish(self) -> None:
        """The stream ended.

        Raises:
            TransportError: inside a frame.
        """
        if self._buffer:
            raise TransportError(f"the connection ended inside a frame ({len(self._buffer)} bytes of it arrived)")


def decode_events(body: bytes) -> list[HopEvent]:
    """The events in a frame's body.

    Raises:
        TransportError: it cannot be read.
    """
    try:
        return _events_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"a frame cannot be read: {error}") from None
    except RecursionError:
        raise TransportError("a frame is nested too deeply") from None
