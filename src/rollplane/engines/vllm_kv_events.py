"""vLLM's KV events as ours: the msgpack batches that its ZMQ publisher sends, decoded without vLLM. Pure.

A batch is `[timestamp, [event, ...], data_parallel_rank?]`; events are maps with a `type`. What enters a block's identity
beside its tokens is in `extra_keys`, per block and untagged: the adapter's name (where `lora_name` is set), one
`[identifier, offset in the block]` per medium, the salt (a prompt's first block only), and digests of prompt embeddings.
"""

from typing import Any, Final

import msgspec
import numpy as np

from rollplane.errors import EngineProtocolError
from rollplane.identity import ROUTING_PAD_BASE, ROUTING_PAD_MASK, routing_pad
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

FULL_ATTENTION_GROUP: Final = 0
"""Hybrid models publish a second time for their other cache groups; prefixes are those of the first."""
_DEVICE: Final = frozenset({None, "GPU"})
"""vLLM names the engine's own cache so, also on a CPU; other media are tiers behind it."""
_HASH_MASK: Final = 2**64 - 1


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | bytes | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(_Batch)


def read_batch(payload: bytes) -> list[KvEvent]:
    """The events of one published batch, in order.

    Raises:
        EngineProtocolError: it cannot be read, or an event contradicts itself.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EngineProtocolError(f"a batch of vLLM's KV events cannot be read: {error}") from None
    found: list[KvEvent] = []
    for event in batch.events:
        if isinstance(event, _Cleared):
            found.append(CacheCleared())
        elif event.medium not in _DEVICE or event.group_idx not in (None, FULL_ATTENTION_GROUP):
            continue
        elif isinstance(event, _Removed):
            found.append(BlocksRemoved(hashes=[_name(one) for one in event.block_hashes]))
        elif event.block_hashes:
            found.append(_stored(event))
    return found


def _stored(event: _Stored) -> BlocksStored:
    count, size = len(event.block_hashes), event.block_size
    if len(event.token_ids) != count * size:
        raise EngineProtocolError(
            f"vLLM stored {count} blocks of {size} tokens with {len(event.token_ids)} token ids", param="token_ids"
        )
    keys = event.extra_keys or []
    if keys and len(keys) != count:
        raise EngineProtocolError(f"vLLM stored {count} blocks with the extra keys of {len(keys)}", param="extra_keys")
    try:
        tokens = np.array(event.token_ids, dtype=np.int32)
    except OverflowError:
        raise EngineProtocolError("vLLM stored a block with a token id beyond 32 bits", param="token_ids") from None
    salt: str | None = None
    for at, extra in enumerate(keys):
        media, salts = _parts(extra or [], adapter=event.lora_name)
        if media:
            _mark_media(tokens[at * size : (at + 1) * size], media)
        if salts and at == 0 and event.parent_block_hash is None:
            salt = salts[-1]
    return BlocksStored(
        hashes=[_name(one) for one in event.block_hashes],
        parent=None if event.parent_block_hash is None else _name(event.parent_block_hash),
        token_ids=tokens,
        block_tokens=size,
        salt=salt,
        adapter=event.lora_name,
    )


def _parts(extra: list[Any], *, adapter: str | None) -> tuple[list[tuple[str, int]], list[str]]:
    """The media and the salts among a block's extra keys; the adapter's name comes first where there is one."""
    media: list[tuple[str, int]] = []
    texts: list[str] = []
    for part in extra:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) and isinstance(part[1], int):
            media.append((_content(part[0], adapter=adapter), part[1]))
    if adapter is not None and texts and texts[0] == adapter:
        del texts[0]
    return media, texts


def _mark_media(block: Int32Array, media: list[tuple[str, int]]) -> None:
    """Replace each medium's placeholder tokens in one block by its routing pad, as `identity.routing_tokens` does.

    A medium begins at its offset (before the block where that is negative); the tokens like the one there, up to the next
    medium, are its placeholders. Exact for models that repeat one pad token, such as Qwen-VL.
    """
    starts = [max(offset, 0) for _, offset in media] + [block.size]
    original = block.copy()
    for (content, _), start, end in zip(media, starts, starts[1:], strict=False):
        part = original[start:end]
        if part.size:
            block[start:end][part == part[0]] = _pad(content)


def _content(identifier: str, *, adapter: str | None) -> str:
    """The content's identity; vLLM leads it with the adapter's name where an adapter reaches the encoder."""
    return identifier.removeprefix(f"{adapter}:") if adapter is not None else identifier


def _pad(content: str) -> int:
    """The routing pad of a content identity, or of the routing marker that stands for one (16 hex digits and 48 zeros)."""
    if len(content) == 64 and content.endswith("0" * 48):
        try:
            return ROUTING_PAD_BASE + (int(content[:16], 16) & ROUTING_PAD_MASK)
        except ValueError:
            pass  # not hexadecimal: an identity of some other kind
    return routing_pad(content)


def _name(block_hash: int | bytes) -> int:
    """A block's name: vLLM's 64-bit hash, or the last 64 bits of its long one."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & _HASH_MASK
