"""What an engine caches, as Dynamo's router has to be told. Pure.

The router computes a prompt's blocks from the caller's salt and the adapter's public name. The engine's events have the
engine's: a salt that is scoped by the policy version, and `name@generation`. So each chain is translated, and one that no
request of now could hit (an older version's, a replaced adapter's) is not told, and taken back when it becomes such.

Blocks are named by their content: the router loses track of blocks that are stored again under another name.
"""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from rollplane.identity import chained_keys, scope_key
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, KvEvent

NAME_BITS: Final = 2**63 - 1
"""Dynamo takes signed 64-bit names."""


class Scope(msgspec.Struct, frozen=True):
    """What a caller sends to hit a chain: its salt and an adapter's public name, None for none."""

    salt: str | None
    adapter: str | None


ScopeOf = Callable[[str | None, str | None], Scope | None]
"""(engine-side salt, engine-side adapter) -> the caller's; None: no caller can hit it now."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks to tell of; media positions in `token_ids` are their routing pads."""

    token_ids: list[int]
    block_tokens: int
    names: list[int]
    parent: int | None
    scope: Scope


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks to take back."""

    names: list[int]


class _Block(msgspec.Struct, frozen=True):
    key: int
    salt: str | None
    adapter: str | None
    scope: Scope


class KvTranslation:
    """What was told of one engine's cache.

    Args:
        scope_of: looks up what a chain's engine-side salt and adapter stand for now.
        block_tokens: the size that the model was registered with.
    """

    def __init__(self, scope_of: ScopeOf, *, block_tokens: int) -> None:
        self._scope_of = scope_of
        self._block_tokens = block_tokens
        self._blocks: dict[int, _Block] = {}
        self._told: dict[int, int] = {}
        """Name -> by how many of the engine's blocks it is held."""
        self.untold = 0
        """Blocks that nobody could hit, or of another size."""

    def __repr__(self) -> str:
        return f"<KvTranslation {len(self._told)} blocks told, {self.untold} untold>"

    def take(self, events: Iterable[KvEvent]) -> list[Stored | Removed]:
        """What to say after the engine said this."""
        found: list[Stored | Removed] = []
        for event in events:
            if isinstance(event, BlocksStored):
                stored = self._store(event)
                if stored is not None:
                    found.append(stored)
            else:
                gone = event.hashes if isinstance(event, BlocksRemoved) else list(self._blocks)
                found += self._remove(gone)
        return found

    def rescope(self) -> list[Stored | Removed]:
        """What to take back after the version or an adapter changed."""
        known: dict[tuple[str | None, str | None], Scope | None] = {}
        gone = []
        for name, block in self._blocks.items():
            engine_side = (block.salt, block.adapter)
            if engine_side not in known:
                known[engine_side] = self._scope_of(*engine_side)
            if known[engine_side] != block.scope:
                gone.append(name)
        return self._remove(gone)

    def clear(self) -> list[Stored | Removed]:
        """Take everything back."""
        return self._remove(list(self._blocks))

    def _store(self, event: BlocksStored) -> Stored | None:
        scope = self._scope_of(event.salt, event.adapter)
        parent = None if event.parent is None else self._blocks.get(event.parent)
        if scope is None or event.block_tokens != self._block_tokens or (event.parent is not None and parent is None):
            self.untold += len(event.hashes)
            return None
        start = parent.key if parent is not None else scope_key(salt=scope.salt, adapter=scope.adapter)
        keys = chained_keys(event.token_ids, block_tokens=event.block_tokens, parent=start)
        if len(keys) != len(event.hashes):
            self.untold += len(event.hashes)
            return None
        for name, key in zip(event.hashes, keys, strict=True):
            before = self._blocks.get(name)
            self._blocks[name] = _Block(key, event.salt, event.adapter, scope)
            if before is None or before.key != key:
                self._told[key & NAME_BITS] = self._told.get(key & NAME_BITS, 0) + 1
        return Stored(
            token_ids=event.token_ids.tolist(),
            block_tokens=event.block_tokens,
            names=[key & NAME_BITS for key in keys],
            parent=None if parent is None else parent.key & NAME_BITS,
            scope=scope,
        )

    def _remove(self, names: Iterable[int]) -> list[Stored | Removed]:
        gone = []
        for name in names:
            block = self._blocks.pop(name, None)
            if block is None:
                continue
            told = block.key & NAME_BITS
            left = self._told.get(told, 0) - 1
            if left > 0:
                self._told[told] = left
            else:
                self._told.pop(told, None)
                gone.append(told)
        return [Removed(names=gone)] if gone else []
