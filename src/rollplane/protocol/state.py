"""What a worker says of itself on the internal state endpoint.

`GET /internal/v1/state` answers one msgpack `WorkerState`. With `?watch=1` it may answer frames instead (a 32-bit
big-endian length and the msgpack of one `WorkerState`): the present state at once, then the whole state after every
change and at least every `HEARTBEAT_S` seconds. A worker that ignores `watch` is polled.
"""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from rollplane.errors import TransportError
from rollplane.protocol.admin import AdapterRecord
from rollplane.protocol.answer import WIRE_VERSION
from rollplane.protocol.info import EngineHealth, EngineInfo

HEARTBEAT_S: Final = 5.0
MAX_STATE_BYTES: Final = 16 * 2**20

_LENGTH: Final = struct.Struct(">I")


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of one worker.

    `instance`: new with every start of the process. `epoch`: the newest control epoch it obeyed, None before the first.
    `paused`: stopped by a caller, not by an update of its own. `routes`: names of the admin routes that work here.
    `cache_generation`: grows whenever cached KV may be gone (reset, sleep, update). `salt_scope`: what scopes the engine's
    salt now, see `identity.engine_salt`; None: nothing does.
    """

    wire: int = WIRE_VERSION
    worker: str
    instance: str
    info: EngineInfo
    health: EngineHealth
    policy_version: str
    policy_digest: str | None = None
    epoch: int | None = None
    paused: bool = False
    adapters: list[AdapterRecord] = msgspec.field(default_factory=list)
    routes: list[str] = msgspec.field(default_factory=list)
    cache_generation: int = 0
    salt_scope: str | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerState)
_wire_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def encode_state(state: WorkerState) -> bytes:
    """The body of one state."""
    return _encoder.encode(state)


def encode_state_frame(state: WorkerState) -> bytes:
    """One frame of a watched state."""
    body = _encoder.encode(state)
    return _LENGTH.pack(len(body)) + body


def decode_state(body: bytes) -> WorkerState:
    """The state in a body.

    Raises:
        TransportError: it cannot be read, or speaks another wire version.
    """
    try:
        raw = _wire_decoder.decode(body).get("wire")
        wire = None if raw is None else msgspec.msgpack.decode(raw)
        if wire != WIRE_VERSION:
            raise TransportError(f"the worker speaks wire version {wire!r}, this side {WIRE_VERSION}")
        return _decoder.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise TransportError(f"a worker's state cannot be read: {error}") from None


class StateReader:
    """Cuts a watched byte stream into states; feed it what arrives. A state that says what the one before said is that one."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._last: tuple[bytes, WorkerState] | None = None

    def __repr__(self) -> str:
        return f"<StateReader {len(self._buffer)} bytes waiting>"

    def feed(self, data: bytes) -> Iterator[WorkerState]:
        """Every state that is now whole.

        Raises:
            TransportError: a state over the limit, or one that cannot be read.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_STATE_BYTES:
                raise TransportError(f"a state of {length} bytes is over the limit of {MAX_STATE_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            if self._last is None or self._last[0] != body:
                self._last = (body, decode_state(body))
            yield self._last[1]
