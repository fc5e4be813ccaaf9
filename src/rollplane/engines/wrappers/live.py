"""Live request ids and idempotency keys: what is asked for twice runs once.

Engines take duplicate ids and then mix or abort both; this wrapper sits in front of every worker and frontend. A second
asking with the same id and body joins the running one, another body is a Conflict. A request runs in a task of its own
and stops when its last reader leaves.

An idempotency key goes further: the request runs on for a while without a reader, and its answer is kept, bounded in
bytes and time, so that a caller whose connection broke gets the same answer instead of a second sample.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import numpy as np

from rollplane.engines.base import Engine, close_events, whole_of
from rollplane.errors import Conflict, EngineFailed, IdempotencyMismatch, PreconditionFailed
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest


class KeepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How answers to requests with an idempotency key are kept.

    `max_bytes`: all kept answers together; the oldest go first, 0 keeps none. `max_age_s`: since the answer's end.
    `linger_s`: how long such a request runs on without a reader.
    """

    max_bytes: int = 256 * 2**20
    max_age_s: float = 600.0
    linger_s: float = 30.0


class _Live:
    """One running (or kept) request: what it said so far, and who reads it."""

    __slots__ = (
        "digest",
        "ended",
        "ended_at",
        "error",
        "events",
        "key",
        "linger",
        "readers",
        "size",
        "task",
        "waiters",
    )

    def __init__(self, digest: str, key: str | None) -> None:
        self.digest = digest
        self.key = key
        self.events: list[Event] = []
        self.readers = 0
        self.ended = False
        self.ended_at = 0.0
        self.size = 0
        self.error: Exception | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self.task: asyncio.Task[None] | None = None
        self.linger: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def is_left(self) -> bool:
        """A reader leaves; whether it was the last one of a request that still runs."""
        self.readers -= 1
        return self.readers == 0 and not self.ended

    async def change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await waiter


class LiveRequests:
    """An `Engine` over another one that owns request ids while they live, and idempotency keys for longer.

    Args:
        engine: what runs the requests.
        keep: limits of kept answers; None keeps none (a frontend: the worker that made an answer keeps it).
        clock: monotonic seconds.
    """

    def __init__(
        self, engine: Engine, *, keep: KeepLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine = engine
        self.keep = keep
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._keyed: OrderedDict[str, _Live] = OrderedDict()
        self._kept_bytes = 0

    def __repr__(self) -> str:
        readers = sum(live.readers for live in self._live.values())
        kept = sum(live.ended for live in self._keyed.values())
        return f"<LiveRequests {len(self._live)} live, {readers} readers, {kept} kept over {self.engine!r}>"

    @property
    def info(self) -> EngineInfo:
        """The inner engine's facts."""
        return self.engine.info

    @property
    def count(self) -> int:
        """How many requests are live."""
        return len(self._live)

    @property
    def ids(self) -> list[str]:
        """The ids of all live requests."""
        return list(self._live)

    @property
    def kept_bytes(self) -> int:
        """Size of all kept answers."""
        return self._kept_bytes

    async def start(self) -> None:
        """Start the inner engine."""
        await self.engine.start()

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Close the inner engine; live requests end as it ends them, those without a reader at once."""
        lonely = [live for live in self._live.values() if live.readers == 0 and live.task is not None]
        for live in lonely:
            await self._stop(live)
        await self.engine.close(grace_s=grace_s)

    async def abort(self, request_id: str) -> int:
        """Abort in the inner engine."""
        return await self.engine.abort(request_id)

    async def health(self) -> EngineHealth:
        """The inner engine's health."""
        return await self.engine.health()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Run the request, join the live one, or give the kept answer.

        Raises:
            Conflict: a live request has this id and another body.
            IdempotencyMismatch: the idempotency key was used with another body.
            PreconditionFailed: it is only to be joined (`attach_only`), and there is nothing to join.
        """
        live = self._join(request)
        try:
            at = 0
            while True:
                while at < len(live.events):
                    event = live.events[at]
                    at += 1
                    yield event
                if live.error is not None:
                    raise live.error
                if live.ended:
                    return
                await live.change()
        finally:
            if live.is_left():
                await self._left_alone(live)

    async def whole(self, request: GenerateRequest) -> list[Event]:
        """As `generate`, for a request that does not stream."""
        live = self._join(request)
        try:
            while not live.ended:
                await live.change()
            if live.error is not None:
                raise live.error
            return list(live.events)
        finally:
            if live.is_left():
                await self._left_alone(live)

    def _join(self, request: GenerateRequest) -> _Live:
        live = self._known(request)
        if live is None:
            if request.attach_only:
                raise PreconditionFailed("there is no request or answer under this idempotency key here")
            live = self._begin(request)
        live.readers += 1
        if live.linger is not None:
            live.linger.cancel()
            live.linger = None
        return live

    def _known(self, request: GenerateRequest) -> _Live | None:
        key = request.idempotency_key
        if key is not None and (keyed := self._keyed.get(key)) is not None and not self._too_old(keyed):
            if keyed.digest != request.body_digest:
                raise IdempotencyMismatch(
                    f"the idempotency key {key!r} was used with another body", param="Idempotency-Key"
                )
            return keyed
        live = self._live.get(request.request_id)
        if live is not None and (live.digest != request.body_digest or not request.body_digest or live.key != key):
            raise Conflict(
                f"request_id {request.request_id!r} is live with another body; give every request its own id",
                param="request_id",
            )
        return live

    def _begin(self, request: GenerateRequest) -> _Live:
        key = request.idempotency_key
        live = self._live[request.request_id] = _Live(request.body_digest, key)
        if key is not None:
            self._drop(key)
            self._keyed[key] = live
        live.task = asyncio.create_task(self._run(request, live), name=f"generate {request.request_id}")
        return live

    async def _run(self, request: GenerateRequest, live: _Live) -> None:
        events = self.engine.generate(request) if request.stream else None
        whole = False
        try:
            if events is None:
                live.events += await whole_of(self.engine, request)
            else:
                async for event in events:
                    live.events.append(event)
                    live.tell()
            whole = True
        except Exception as error:
            live.error = error
        finally:
            if not whole and live.error is None:
                live.error = EngineFailed(f"request {request.request_id} was stopped by its server")
            live.ended, live.ended_at = True, self._clock()
            if self._live.get(request.request_id) is live:
                del self._live[request.request_id]
            self._settle(live, whole=whole)
            live.tell()
            if events is not None:
                await close_events(events)

    async def _left_alone(self, live: _Live) -> None:
        """The last reader left a running request: stop it now, or after the linger when it has a key."""
        if live.key is not None and self.keep is not None and self.keep.linger_s > 0:
            loop = asyncio.get_running_loop()
            live.linger = loop.call_later(self.keep.linger_s, self._cancel, live)
        else:
            await self._stop(live)

    def _cancel(self, live: _Live) -> None:
        if live.readers == 0 and live.task is not None:
            live.task.cancel()

    async def _stop(self, live: _Live) -> None:
        """Cancel and wait; from now on its id and key are free."""
        for request_id, other in list(self._live.items()):
            if other is live:
                del self._live[request_id]
        if live.key is not None and self._keyed.get(live.key) is live:
            del self._keyed[live.key]
        if live.linger is not None:
            live.linger.cancel()
        if live.task is not None:
            live.task.cancel()
            await asyncio.wait({live.task})

    # Kept answers ----------------------------------------------------------------------------------------------------

    def _settle(self, live: _Live, *, whole: bool) -> None:
        """Keep a whole answer under its key; forget a failed one, so that asking again runs anew."""
        if live.linger is not None:
            live.linger.cancel()
        if live.key is None or self._keyed.get(live.key) is not live:
            return
        if not whole or self.keep is None or self.keep.max_bytes == 0:
            del self._keyed[live.key]
            return
        live.size = sum(size_of(event) for event in live.events)
        self._kept_bytes += live.size
        self._keyed.move_to_end(live.key)
        for key, other in list(self._keyed.items()):
            if other.ended and (self._kept_bytes > self.keep.max_bytes or self._too_old(other)):
                self._drop(key)

    def _too_old(self, live: _Live) -> bool:
        return self.keep is not None and live.ended and self._clock() - live.ended_at > self.keep.max_age_s

    def _drop(self, key: str) -> None:
        dropped = self._keyed.pop(key, None)
        if dropped is not None and dropped.ended:
            self._kept_bytes -= dropped.size


def size_of(value: Any) -> int:
    """Bytes of the arrays in a record, and a little for each record; what keeping it costs, near enough."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, msgspec.Struct):
        return 256 + sum(size_of(getattr(value, name)) for name in value.__struct_fields__)
    return len(value) if isinstance(value, (str, bytes)) else 16
