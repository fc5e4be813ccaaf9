"""Live request ids: a second asking with the same id and body joins the running one, another body is refused.

Engines take duplicate ids and then mix or abort both; this wrapper sits in front of every worker and frontend. A
request runs in a task of its own and stops when its last reader leaves.
"""

import asyncio
from collections.abc import AsyncGenerator

from rollplane.engines.base import Engine
from rollplane.errors import Conflict
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest


class _Live:
    """One running request: what it said so far, and who reads it."""

    __slots__ = ("changed", "digest", "ended", "error", "events", "readers", "task")

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.events: list[Event] = []
        self.readers = 0
        self.ended = False
        self.error: BaseException | None = None
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class LiveRequests:
    """An `Engine` over another one that owns request ids while they live."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._live: dict[str, _Live] = {}

    def __repr__(self) -> str:
        readers = sum(live.readers for live in self._live.values())
        return f"<LiveRequests {len(self._live)} live, {readers} readers over {self.engine!r}>"

    @property
    def info(self) -> EngineInfo:
        """The inner engine's facts."""
        return self.engine.info

    @property
    def count(self) -> int:
        """How many requests are live."""
        return len(self._live)

    async def start(self) -> None:
        """Start the inner engine."""
        await self.engine.start()

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Close the inner engine; live requests end as it ends them."""
        await self.engine.close(grace_s=grace_s)

    async def abort(self, request_id: str) -> int:
        """Abort in the inner engine."""
        return await self.engine.abort(request_id)

    async def health(self) -> EngineHealth:
        """The inner engine's health."""
        return await self.engine.health()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Run the request, or join the live one with its id.

        Raises:
            Conflict: a live request has this id and another body.
        """
        live = self._live.get(request.request_id)
        if live is None:
            live = self._live[request.request_id] = _Live(request.body_digest)
            live.task = asyncio.create_task(self._run(request, live), name=f"generate {request.request_id}")
        elif live.digest != request.body_digest or not request.body_digest:
            raise Conflict(
                f"request_id {request.request_id!r} is live with another body; give every request its own id",
                param="request_id",
            )
        live.readers += 1
        try:
            at = 0
            while True:
                changed = live.changed
                while at < len(live.events):
                    event = live.events[at]
                    at += 1
                    yield event
                if live.error is not None:
                    raise live.error
                if live.ended:
                    return
                if at == len(live.events):
                    await changed.wait()
        finally:
            live.readers -= 1
            if live.readers == 0 and not live.ended and live.task is not None:
                self._forget(request.request_id, live)
                live.task.cancel()
                await asyncio.wait({live.task})

    async def _run(self, request: GenerateRequest, live: _Live) -> None:
        events = self.engine.generate(request)
        try:
            async for event in events:
                live.events.append(event)
                live.tell()
        except Exception as error:
            live.error = error
        finally:
            live.ended = True
            self._forget(request.request_id, live)
            live.tell()
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    def _forget(self, request_id: str, live: _Live) -> None:
        if self._live.get(request_id) is live:
            del self._live[request_id]
