"""Follows what each worker says of its cache, and hands it to the policy. One task per worker."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final, Protocol, runtime_checkable

import structlog

from rollplane.errors import Conflict, InvalidRequest, NotFound, RollplaneError
from rollplane.protocol.kv_events import KvBatch
from rollplane.router.policies import Policy
from rollplane.router.worker import RoutedWorker

log = structlog.get_logger("rollplane.router")

AGAIN_S: Final = 0.5
"""Pause before a feed that ended is asked for again."""
AGAIN_AT_MOST_S: Final = 15.0
EVENTS_AT_ONCE: Final = 256
"""A snapshot is taken in by so many events at a time, so that requests are placed in between."""


@runtime_checkable
class CacheFeed(Protocol):
    """An engine that says what it caches; `engines.remote.RemoteEngine` and `worker.Worker` are two."""

    def kv_feed(self) -> AsyncGenerator[KvBatch, None]:
        """First all of it, then every change.

        Raises:
            NotFound: it says nothing of the kind.
        """
        ...


class CacheFollowers:
    """The tasks.

    Args:
        policy: gets the batches.
        on_learn: called after each of them.
    """

    def __init__(self, policy: Policy, *, on_learn: Callable[[RoutedWorker], None] = lambda worker: None) -> None:
        self._policy = policy
        self._on_learn = on_learn
        self._tasks: dict[RoutedWorker, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<CacheFollowers of {len(self._tasks)} workers>"

    def join(self, worker: RoutedWorker) -> None:
        """Follow a worker that has entered the fleet."""
        if isinstance(worker.member.worker.engine, CacheFeed) and worker not in self._tasks:
            self._tasks[worker] = asyncio.get_running_loop().create_task(
                self._follow(worker), name=f"cache of {worker.url}"
            )

    def leave(self, worker: RoutedWorker) -> None:
        """A worker has left the fleet."""
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
        self._policy.forget(worker)

    async def close(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, worker: RoutedWorker) -> None:
        pause_s = AGAIN_S
        while True:
            try:
                async for first, batch in _numbered(worker.member.worker.engine):
                    if first:
                        # A feed begins with all there is: what was known before is not continued.
                        self._policy.lost_track(worker)
                    await self._take(worker, batch)
                    pause_s = AGAIN_S
            except NotFound:
                pause_s = AGAIN_AT_MOST_S
            except InvalidRequest as error:
                log.warning("kv_events_refused", worker=worker.url, error=error.message)
                pause_s = AGAIN_AT_MOST_S
            except Conflict:
                pause_s = AGAIN_S  # the worker was restarted, and its state is not heard yet
            except RollplaneError as error:
                log.debug("kv_events_ended", worker=worker.url, error=error.message)
                pause_s = min(pause_s * 2, AGAIN_AT_MOST_S)
            await asyncio.sleep(pause_s)

    async def _take(self, worker: RoutedWorker, batch: KvBatch) -> None:
        if len(batch.events) <= EVENTS_AT_ONCE:
            self._policy.learn(worker, batch)
            self._on_learn(worker)
            return
        for at in range(0, len(batch.events), EVENTS_AT_ONCE):
            part = batch.events[at : at + EVENTS_AT_ONCE]
            self._policy.learn(worker, KvBatch(instance=batch.instance, generation=batch.generation, events=part))
            self._on_learn(worker)
            await asyncio.sleep(0)


async def _numbered(engine: object) -> AsyncGenerator[tuple[bool, KvBatch], None]:
    """The batches of a feed, and whether each is its first; the feed is closed with this."""
    if not isinstance(engine, CacheFeed):
        raise NotFound("this engine has no feed of its cache")
    feed = engine.kv_feed()
    first = True
    try:
        async for batch in feed:
            yield first, batch
            first = False
    finally:
        await feed.aclose()
