"""What an engine caches, kept from its own events, so that every follower can be told all of it first."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

MAX_WAITING_BATCHES: Final = 10_000
"""A follower further behind than this is told all of it again."""


class KvMirror:
    """Blocks by the engine's hash, and the followers."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[BlocksStored, int]] = {}
        """Block -> the event that stored it, and its place there. In the order of storing: parents before children."""
        self._queues: list[asyncio.Queue[list[KvEvent] | None]] = []
        self._ended = False

    def __repr__(self) -> str:
        return f"<KvMirror {len(self._blocks)} blocks, {len(self._queues)} followers>"

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, events: Sequence[KvEvent]) -> None:
        """The engine said this."""
        for event in events:
            if isinstance(event, BlocksStored):
                for at, name in enumerate(event.hashes):
                    self._blocks[name] = (event, at)
            elif isinstance(event, BlocksRemoved):
                for name in event.hashes:
                    self._blocks.pop(name, None)
            else:
                self._blocks.clear()
        if events:
            self._tell(list(events))

    def clear(self) -> None:
        """What is cached is gone or unknown, whatever the engine says or does not say."""
        self.take([CacheCleared()])

    def end(self) -> None:
        """The engine has ended: so do the feeds."""
        self._ended = True
        for queue in self._queues:
            queue.put_nowait(None)

    def snapshot(self) -> list[KvEvent]:
        """All of it, a block each."""
        found: list[KvEvent] = []
        for name, (event, at) in self._blocks.items():
            size = event.block_tokens
            found.append(
                BlocksStored(
                    hashes=[name],
                    parent=event.hashes[at - 1] if at else event.parent,
                    token_ids=event.token_ids[at * size : (at + 1) * size],
                    block_tokens=size,
                    salt=event.salt,
                    adapter=event.adapter,
                )
            )
        return found

    async def feed(self) -> AsyncGenerator[list[KvEvent], None]:
        """All of it, then every change; see `KvEventSource.kv_events`."""
        queue: asyncio.Queue[list[KvEvent] | None] = asyncio.Queue()
        queue.put_nowait(self.snapshot())
        if self._ended:
            queue.put_nowait(None)
        self._queues.append(queue)
        try:
            while (batch := await queue.get()) is not None:
                yield batch
        finally:
            self._queues.remove(queue)

    def _tell(self, events: list[KvEvent]) -> None:
        for queue in self._queues:
            if queue.qsize() >= MAX_WAITING_BATCHES:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait([CacheCleared(), *self.snapshot()])
            else:
                queue.put_nowait(events)
