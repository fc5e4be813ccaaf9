"""A prefix cache without memory: which blocks would be cached, and what is said about them."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent


@dataclass(slots=True)
class _Block:
    """`parent`: key of the block before it; `holders`: running requests whose prompt uses it."""

    parent: int | None
    token_ids: Int32Array
    salt: str | None
    adapter: str | None
    holders: int = 0


class PrefixCache:
    """Blocks by their chained key, least recently used first; a block always comes before its parent.

    Keys come from `rollplane.identity.block_keys`, so salt and adapter are in them. Held blocks are never evicted: with
    more of them than `capacity_blocks` the cache is over its capacity until they are let go.
    """

    def __init__(self, *, block_tokens: int, capacity_blocks: int) -> None:
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._events: list[KvEvent] = []

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self._blocks)}/{self.capacity_blocks} blocks of {self.block_tokens}>"

    def __len__(self) -> int:
        return len(self._blocks)

    def hit(self, keys: list[int]) -> int:
        """How many leading keys are cached; they become the most recently used."""
        found = next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys[:found]):
            self._blocks.move_to_end(key)
        return found

    def store(self, keys: list[int], tokens: Int32Array, *, salt: str | None, adapter: str | None) -> None:
        """Cache the blocks of a chain from its start; those already there become the most recently used."""
        if not self.capacity_blocks or not keys:
            return
        known = self.hit(keys)
        new = keys[known:]
        if not new:
            return
        size = self.block_tokens
        parents = [keys[known - 1] if known else None, *new[:-1]]
        blocks = [
            _Block(parent, tokens[(known + i) * size : (known + i + 1) * size], salt, adapter)
            for i, parent in enumerate(parents)
        ]
        for key, block in zip(reversed(new), reversed(blocks), strict=True):
            self._blocks[key] = block
        for key in reversed(keys[:known]):
            self._blocks.move_to_end(key)
        self._events.append(
            BlocksStored(
                hashes=new,
                parent=parents[0],
                token_ids=np.ascontiguousarray(tokens[known * size : len(keys) * size]),
                block_tokens=size,
                salt=salt,
                adapter=adapter,
            )
        )
        self._evict()

    def hold(self, keys: list[int]) -> list[int]:
        """Keep blocks from eviction; the keys that are there (give these back to `release`)."""
        held = [key for key in keys if key in self._blocks]
        for key in held:
            self._blocks[key].holders += 1
        return held

    def release(self, keys: list[int]) -> None:
        """Let held blocks go; those dropped in between are no error."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block.holders = max(block.holders - 1, 0)
        self._evict()

    def clear(self, *, held_too: bool) -> tuple[int, int]:
        """Drop blocks; how many went and how many stayed because they are held."""
        before = len(self._blocks)
        gone = [key for key, block in self._blocks.items() if held_too or not block.holders]
        if len(gone) == before:
            self._blocks.clear()
            self._events.append(CacheCleared())
        else:
            for key in gone:
                del self._blocks[key]
            if gone:
                self._events.append(BlocksRemoved(hashes=gone))
        return len(gone), before - len(gone)

    def snapshot(self) -> list[KvEvent]:
        """What is stored now, parents before children."""
        return [
            BlocksStored(
                hashes=[key],
                parent=block.parent,
                token_ids=block.token_ids,
                block_tokens=self.block_tokens,
                salt=block.salt,
                adapter=block.adapter,
            )
            for key, block in reversed(self._blocks.items())
        ]

    def take_events(self) -> list[KvEvent]:
        """The changes since the last call."""
        events, self._events = self._events, []
        return events

    def _evict(self) -> None:
        over = len(self._blocks) - self.capacity_blocks
        if over <= 0:
            return
        gone: list[int] = []
        for key, block in self._blocks.items():
            if len(gone) == over:
                break
            if not block.holders:
                gone.append(key)
        for key in gone:
            del self._blocks[key]
        if gone:
            self._events.append(BlocksRemoved(hashes=gone))
