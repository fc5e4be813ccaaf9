"""Where a router's requests are, and small helpers of its waits."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from typing import Any, Protocol

from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest
from rollplane.router.prefill_pace import Ticket
from rollplane.router.worker import RoutedWorker


class Placement:
    """Where one request is: on a worker, or held (None)."""

    __slots__ = ("aborted", "ticket", "woken", "worker")

    def __init__(self) -> None:
        self.worker: RoutedWorker | None = None
        self.ticket: Ticket | None = None
        self.aborted = False
        self.woken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Placement {'held' if self.worker is None else self.worker.url}{', aborted' if self.aborted else ''}>"

    def wake(self) -> None:
        """End its wait, whatever it waits for."""
        self.woken.set()
        if self.ticket is not None:
            self.ticket.wake()


class Unknowing:
    """Requests that wait until it is known what serves them, by id; several callers may ask for one.

    They have no placement, and an abort has no answer that it could give: it ends their wait with an error.
    """

    def __init__(self) -> None:
        self._aborted: dict[str, list[asyncio.Event]] = {}

    def __repr__(self) -> str:
        return f"<Unknowing {len(self._aborted)}>"

    @contextlib.contextmanager
    def waits(self, names: Sequence[str]) -> Generator[asyncio.Event, None, None]:
        """The block waits; the event is set when the request is aborted by any of its names."""
        aborted = asyncio.Event()
        for name in names:
            self._aborted.setdefault(name, []).append(aborted)
        try:
            yield aborted
        finally:
            for name in names:
                callers = self._aborted[name]
                callers.remove(aborted)
                if not callers:
                    del self._aborted[name]

    def abort(self, request_id: str) -> int:
        """End the waits for a request; 1 where there were any that had not been ended yet."""
        callers = [aborted for aborted in self._aborted.get(request_id, ()) if not aborted.is_set()]
        for aborted in callers:
            aborted.set()
        return 1 if callers else 0

    def abort_all(self) -> int:
        """End all waits; how many requests waited."""
        return sum(self.abort(request_id) for request_id in list(self._aborted))


class Routes(Protocol):
    """A router as its table of live requests sees it."""

    @property
    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        ...

    async def abort(self, request_id: str) -> int:
        """See `Engine.abort`."""
        ...

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        ...

    def routed(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve a request that owns its id."""
        ...

    async def routed_whole(self, request: GenerateRequest) -> list[Event]:
        """As `routed`, for a request that does not stream."""
        ...


class RoutedRequests:
    """A router as the engine under its own table of live requests, which closes nothing."""

    def __init__(self, router: Routes) -> None:
        self._router = router

    def __repr__(self) -> str:
        return repr(self._router)

    @property
    def info(self) -> EngineInfo:
        """The router's."""
        return self._router.info

    async def start(self) -> None:
        """The router starts itself."""

    async def close(self, *, grace_s: float = 0.0) -> None:
        """The router closes itself."""

    async def abort(self, request_id: str) -> int:
        """See `Engine.abort`."""
        return await self._router.abort(request_id)

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        return await self._router.health()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve a request that owns its id."""
        return self._router.routed(request)

    def whole(self, request: GenerateRequest) -> Coroutine[Any, Any, list[Event]]:
        """As `generate`, for a request that does not stream."""
        return self._router.routed_whole(request)


async def either(*events: asyncio.Event, timeout_s: float) -> None:
    """Return when one of the events is set, or after `timeout_s`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
