"""A router that shares its fleet's requests with those of other processes: an id is live in one of them."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from rollplane.engines.base import whole_of
from rollplane.engines.wrappers.claimed import ClaimedIds
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest
from rollplane.rl.fleet import Fleet
from rollplane.router.router import Router
from rollplane.server.crew import ABORT_ALL_PATH, FLEET_PATH, Crew


class CrewRouter(Router):
    """See the module.

    Args:
        crew: the processes.
        name: of the fleet.
    """

    def __init__(self, fleet: Fleet, *, crew: Crew, name: str, **options: Any) -> None:
        super().__init__(fleet, name=name, **options)
        self._crew = crew
        self.here = Here(self)
        self._claimed = ClaimedIds(self.here, crew.claims(name), other=lambda i: crew.engine(i, name))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve one request in the process where its id lives; see `Router.generate`."""
        return self._claimed.generate(request)

    def whole(self, request: GenerateRequest) -> Coroutine[Any, Any, list[Event]]:
        """As `generate`, for a request that does not stream."""
        return whole_of(self._claimed, request)

    async def abort(self, request_id: str) -> int:
        """End a request, in whichever process it is."""
        found = await self._claimed.abort(request_id)
        if found or self.reached:
            return found
        # What waits for a fleet's first worker has no claim yet.
        engines = [self._crew.engine(i, self.name) for i in self._crew.others]
        return sum(await asyncio.gather(*(each.abort(request_id) for each in engines if each is not None)))

    async def abort_all(self) -> int:
        """End every request of the fleet in every process."""
        path = FLEET_PATH + self.name + ABORT_ALL_PATH
        asked = [self._crew.ask(i, "POST", path, limit_s=30.0) for i in self._crew.others]
        here = await self.abort_all_here()
        return here + sum(int(answer) for answer in await asyncio.gather(*asked))

    async def abort_all_here(self) -> int:
        """End every request of this process."""
        return await super().abort_all()

    def generate_here(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve one request in this process."""
        return super().generate(request)

    async def whole_here(self, request: GenerateRequest) -> list[Event]:
        """As `generate_here`, for a request that does not stream."""
        return await super().whole(request)

    async def abort_here(self, request_id: str) -> int:
        """End a request of this process."""
        return await super().abort(request_id)


class Here:
    """The requests of one process alone, as an engine."""

    def __init__(self, router: CrewRouter) -> None:
        self._router = router

    def __repr__(self) -> str:
        return f"<Here {self._router!r}>"

    @property
    def info(self) -> EngineInfo:
        """The fleet's facts."""
        return self._router.info

    async def start(self) -> None:
        """Started with the router."""

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Closed with the router."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve one request here."""
        return self._router.generate_here(request)

    async def whole(self, request: GenerateRequest) -> list[Event]:
        """As `generate`, for a request that does not stream."""
        return await self._router.whole_here(request)

    async def abort(self, request_id: str) -> int:
        """End a request that is here."""
        return await self._router.abort_here(request_id)

    async def health(self) -> EngineHealth:
        """The fleet's health, with what is held here."""
        return await self._router.health()
