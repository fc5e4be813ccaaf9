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
import numpy as np

from rollplane.errors import InvalidRequest, TransportError
from rollplane.protocol.answer import WIRE_VERSION
from rollplane.protocol.arrays import dec_hook, enc_hook
from rollplane.protocol.events import HopEvent
from rollplane.protocol.pieces import Piece, msgpack_pieces, size_of
from rollplane.protocol.request import GenerateRequest, check_carried

FRAMES: Final = "application/x-rollplane-frames"
WIRE_HEADER: Final = "x-rollplane-wire"
GENERATE_PATH: Final = "/internal/v1/generate"
STATE_PATH: Final = "/internal/v1/state"
KEYS_PATH: Final = "/internal/v1/keys"
MAX_FRAME_BYTES: Final = 1 << 30
BIG_FRAME_BYTES: Final = 256 * 1024
"""From this size on a frame is read off the event loop."""

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


def frame_pieces(events: Sequence[HopEvent]) -> list[Piece]:
    """One frame with these events, big arrays as their own memory; see `rollplane.protocol.pieces`."""
    pieces = msgpack_pieces(list(events))
    length = size_of(pieces)
    if length > MAX_FRAME_BYTES:
        raise TransportError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return [_LENGTH.pack(length), *pieces]


def only_frame(data: bytes) -> bytes | None:
    """The body of the one frame that all of `data` is; None where it is anything else."""
    if len(data) < _LENGTH.size or _LENGTH.unpack_from(data)[0] != len(data) - _LENGTH.size:
        return None
    return data[_LENGTH.size :]


class FrameReader:
    """Cuts a byte stream into frames; feed it what arrives. A frame is copied once, piece by piece, as it arrives."""

    def __init__(self) -> None:
        self._head = b""
        self._body: memoryview | None = None
        self._filled = 0

    def __repr__(self) -> str:
        return f"<FrameReader {self._waiting} bytes waiting>"

    @property
    def _waiting(self) -> int:
        return len(self._head) if self._body is None else _LENGTH.size + self._filled

    def feed(self, data: bytes) -> Iterator[list[HopEvent]]:
        """The events of every frame that is now whole.

        Raises:
            TransportError: a frame over the limit, or one that cannot be read.
        """
        return iter([decode_events(body) for body in self.cut(data)])

    def cut(self, data: bytes) -> list[bytes | memoryview]:
        """The bodies, for `decode_events`, of every frame that is now whole.

        Raises:
            TransportError: a frame over the limit.
        """
        found: list[bytes | memoryview] = []
        whole, at = memoryview(data), 0
        while True:
            if self._body is None:
                if self._head or len(data) - at < _LENGTH.size:
                    taken = min(_LENGTH.size - len(self._head), len(data) - at)
                    self._head += whole[at : at + taken]
                    at += taken
                    if len(self._head) < _LENGTH.size:
                        return found
                    (length,) = _LENGTH.unpack(self._head)
                    self._head = b""
                else:
                    (length,) = _LENGTH.unpack_from(data, at)
                    at += _LENGTH.size
                if length > MAX_FRAME_BYTES:
                    raise TransportError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
                if len(data) - at >= length:
                    found.append(data[at : at + length])
                    at += length
                    continue
                self._body, self._filled = np.empty(length, dtype=np.uint8).data, 0
            taken = min(len(self._body) - self._filled, len(data) - at)
            self._body[self._filled : self._filled + taken] = whole[at : at + taken]
            self._filled += taken
            at += taken
            if self._filled < len(self._body):
                return found
            found.append(self._body)
            self._body = None

    def finish(self) -> None:
        """The stream ended.

        Raises:
            TransportError: inside a frame.
        """
        if self._waiting:
            raise TransportError(f"the connection ended inside a frame ({self._waiting} bytes of it arrived)")


def decode_events(body: bytes | memoryview) -> list[HopEvent]:
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
