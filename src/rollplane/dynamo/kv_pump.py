"""Tells Dynamo's router what a worker caches, as long as the worker lives."""

import asyncio
from contextlib import aclosing
from typing import Any, Final, Protocol

import structlog

from rollplane.dynamo.kv_translation import KvTranslation, Removed, Stored
from rollplane.dynamo.scopes import Scopes
from rollplane.protocol.kv_events import KvEvent
from rollplane.worker import Worker

EVENTS_AT_ONCE: Final = 256

log = structlog.get_logger("rollplane.dynamo")


class KvPublisher(Protocol):
    """What publishes; Dynamo's own `KvEventPublisher` is one."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        **scope: Any,
    ) -> None:
        """Tell of blocks that are cached now."""
        ...

    def publish_removed(self, block_hashes: list[int]) -> None:
        """Take blocks back."""
        ...


class KvPump:
    """One worker's events to one publisher."""

    def __init__(self, worker: Worker, publisher: KvPublisher, *, scopes: Scopes, block_tokens: int) -> None:
        self._worker = worker
        self._publisher = publisher
        self.told = KvTranslation(scopes.of, block_tokens=block_tokens)

    def __repr__(self) -> str:
        return f"<KvPump {self.told!r}>"

    async def run(self) -> None:
        """Publish until the worker closes."""
        async with asyncio.TaskGroup() as tasks:
            events = tasks.create_task(self._follow_events(), name="dynamo kv events")
            scopes = tasks.create_task(self._follow_scopes(), name="dynamo kv scopes")
            await asyncio.wait({events, scopes}, return_when=asyncio.FIRST_COMPLETED)
            events.cancel()
            scopes.cancel()

    async def _follow_events(self) -> None:
        while True:
            generation = self._worker.cache_generation
            async with aclosing(self._worker.kv_feed()) as feed:
                async for batch in feed:
                    if batch.generation != generation:
                        break  # what was cached may be gone: everything is taken back and told anew
                    await self._take(batch.events)
                else:
                    return
            self._say(self.told.clear())

    async def _follow_scopes(self) -> None:
        seen: Any = None
        async with aclosing(self._worker.watch()) as states:
            async for state in states:
                now = (state.policy_version, [(a.engine_name, a.state) for a in state.adapters])
                if now != seen:
                    seen = now
                    self._say(self.told.rescope())

    async def _take(self, events: list[KvEvent]) -> None:
        for start in range(0, len(events), EVENTS_AT_ONCE):
            self._say(self.told.take(events[start : start + EVENTS_AT_ONCE]))
            await asyncio.sleep(0)  # a snapshot of a full cache must not hold up requests

    def _say(self, news: list[Stored | Removed]) -> None:
        for each in news:
            if isinstance(each, Removed):
                self._publisher.publish_removed(each.names)
            else:
                self._publisher.publish_stored(
                    each.token_ids,
                    [each.block_tokens] * len(each.names),
                    each.names,
                    each.parent,
                    lora_name=each.scope.adapter,
                    cache_salt=each.scope.salt,
                )
