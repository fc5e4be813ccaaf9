"""KV block events: what an engine's prefix cache holds, as the router's prefix index follows it.

`GET /internal/v1/kv_events` answers frames (a 32-bit big-endian length and the msgpack of one `KvBatch`): first what is
stored now, then every change, and an empty batch where nothing changed for `HEARTBEAT_S` seconds.
"""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from rollplane.errors import TransportError
from rollplane.protocol.answer import WIRE_VERSION
from rollplane.protocol.arrays import Int32Array, dec_hook, enc_hook

KV_EVENTS_PATH: Final = "/internal/v1/kv_events"
MAX_BATCH_BYTES: Final = 256 * 2**20


class BlocksStored(msgspec.Struct, tag="stored", kw_only=True, omit_defaults=True):
    """Blocks now cached. `token_ids` int32 of all their tokens; `parent` the block before the first, None at a start.

    `salt` and `adapter` (engine-side) scope the chain; `hashes` are the engine's own names for the blocks.
    """

    hashes: list[int]
    parent: int | None
    token_ids: Int32Array
    block_tokens: int
    salt: str | None = None
    adapter: str | None = None


class BlocksRemoved(msgspec.Struct, tag="removed", kw_only=True):
    """Blocks no longer cached."""

    hashes: list[int]


class CacheCleared(msgspec.Struct, tag="cleared"):
    """Nothing is cached any more."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


class KvBatch(msgspec.Struct, kw_only=True):
    """Events of one worker, in order. `instance`: its process. `generation`: grows whenever its cache may be gone (reset,
    sleep, update), whatever its engine says of that; see `WorkerState.cache_generation`.
    """

    wire: int = WIRE_VERSION
    instance: str
    generation: int
    events: list[KvEvent] = msgspec.field(default_factory=list)


_LENGTH: Final = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder(enc_hook=enc_hook)
_decoder = msgspec.msgpack.Decoder(KvBatch, dec_hook=dec_hook)


def encode_batch_frame(batch: KvBatch) -> bytes:
    """One frame.

    Raises:
        TransportError: over the limit.
    """
    body = _encoder.encode(batch)
    if len(body) > MAX_BATCH_BYTES:
        raise TransportError(f"KV events of {len(body)} bytes are over the limit of {MAX_BATCH_BYTES}")
    return _LENGTH.pack(len(body)) + body


class KvBatchReader:
    """Cuts a byte stream into batches; feed it what arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __repr__(self) -> str:
        return f"<KvBatchReader {len(self._buffer)} bytes waiting>"

    def feed(self, data: bytes) -> Iterator[KvBatch]:
        """Every batch that is now whole.

        Raises:
            TransportError: one over the limit, one that cannot be read, or another wire version.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_BATCH_BYTES:
                raise TransportError(f"KV events of {length} bytes are over the limit of {MAX_BATCH_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                batch = _decoder.decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise TransportError(f"KV events cannot be read: {error}") from None
            if batch.wire != WIRE_VERSION:
                raise TransportError(f"the worker speaks wire version {batch.wire}, this side {WIRE_VERSION}")
            yield batch
