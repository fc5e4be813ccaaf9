"""KV block events: what an engine's prefix cache holds, as the router's prefix index follows it."""

import msgspec

from rollplane.protocol.arrays import Int32Array


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
