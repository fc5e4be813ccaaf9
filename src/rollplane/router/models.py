"""Several models behind one address, each a fleet of its own: the policy that is trained, a frozen reference, a teacher.

A request goes to the fleet that serves the model it names; without a name, to the first. Everything else is each
router's own: checks, placement, holding, versions.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any

import msgspec

from rollplane.errors import NotFound, RollplaneError, Unavailable
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.rendered import RenderBody, Rendered
from rollplane.protocol.request import GenerateRequest, RequestHead
from rollplane.rl.fleet import Fleet
from rollplane.router.observed import Observed
from rollplane.router.report import PlacementReport
from rollplane.router.router import Router


class Models:
    """Routers by fleet name, as one `Engine`; the first is the default.

    A fleet's name is a name of its model too, whatever its workers call it.
    """

    def __init__(self, routers: Mapping[str, Router]) -> None:
        self.routers = dict(routers)
        self.default = next(iter(self.routers.values()))
        waiting = self.default.unknowing
        for router in self.routers.values():
            router.unknowing = waiting  # a request that may be any fleet's waits for all of them, and is one request

    def __repr__(self) -> str:
        return f"<Models {', '.join(f'{name}: {router!r}' for name, router in self.routers.items())}>"

    @property
    def fleets(self) -> dict[str, Fleet]:
        """The fleets by name."""
        return {name: router.fleet for name, router in self.routers.items()}

    @property
    def info(self) -> EngineInfo:
        """The facts of the default model."""
        return self.default.info

    async def start(self) -> None:
        """Follow every fleet's workers."""
        for router in self.routers.values():
            await router.start()

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Close every router."""
        await asyncio.gather(*(router.close(grace_s=grace_s) for router in self.routers.values()))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve a request where its model is; see `Router.generate`.

        Raises:
            NotFound: no fleet serves the model.
            Unavailable: none that was reached does, and some were not reached yet.
        """
        router, request = self._for(request)
        return router.generate(request)

    def whole(self, request: GenerateRequest) -> Coroutine[Any, Any, list[Event]]:
        """As `generate`, for a request that does not stream."""
        router, request = self._for(request)
        return router.whole(request)

    def _for(self, request: GenerateRequest) -> tuple[Router, GenerateRequest]:
        router, known_as = self._of(request.model)
        if known_as != request.model:
            request = msgspec.structs.replace(request, model=known_as)
        return router, request

    async def known(self, head: RequestHead) -> EngineInfo:
        """The facts of what serves a model; see `Router.known`. While no fleet that was reached serves it, those that were not
        are waited for.

        Raises:
            NotFound: no fleet serves it.
        """
        ends = None if head.deadline_s is None else time.monotonic() + head.deadline_s

        def left() -> RequestHead:
            left_s = None if ends is None else max(ends - time.monotonic(), 0.0)
            return msgspec.structs.replace(head, deadline_s=left_s)

        while True:
            try:
                router, _ = self._of(head.model)
            except Unavailable:
                unknown = [router for router in self.routers.values() if not router.reached]
                waits = [asyncio.ensure_future(router.known(left())) for router in unknown]
                try:
                    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for wait in done:
                        wait.result()
                finally:
                    for wait in waits:
                        wait.cancel()
                    await asyncio.gather(*waits, return_exceptions=True)
            else:
                return await router.known(left())

    async def render_media(self, body: RenderBody, *, model: str | None = None) -> Rendered:
        """See `Router.render_media`; where the model is."""
        router, _ = self._of(model)
        return await router.render_media(body)

    def _of(self, model: str | None) -> tuple[Router, str | None]:
        """The router, and the name by which its workers know the model."""
        if model is None:
            return self.default, None
        unknown = []
        for name, router in self.routers.items():
            try:
                info = router.info
            except Unavailable:
                unknown.append(name)
                continue
            if info.serves(model) or _has_adapter(router.fleet, model):
                return router, model
        if model in self.routers:
            return self.routers[model], None
        if unknown:
            raise Unavailable(f"model {model!r} is not known; fleet {', '.join(unknown)} was not reached yet")
        raise NotFound(f"model {model!r} does not exist: no fleet serves it", param="model")

    async def abort(self, request_id: str) -> int:
        """End a request, wherever it is."""
        return sum([await router.abort(request_id) for router in self.routers.values()])

    async def abort_all(self) -> int:
        """End every request of every fleet."""
        return sum([await router.abort_all() for router in self.routers.values()])

    async def health(self) -> EngineHealth:
        """The default fleet's health, with the requests of all."""
        found = {name: await router.health() for name, router in self.routers.items()}
        first = next(iter(found.values()))
        counters = {key: sum(one.counters.get(key, 0) for one in found.values()) for key in first.counters}
        return msgspec.structs.replace(
            first,
            running=sum(one.running for one in found.values()),
            waiting=sum(one.waiting for one in found.values()),
            counters=counters,
        )

    def placement(self) -> PlacementReport:
        """Every fleet's workers; the index is the default fleet's."""
        reports = [router.placement() for router in self.routers.values()]
        observed = Observed()
        for report in reports:
            observed.include(report.observed)
        return PlacementReport(
            policy=reports[0].policy,
            workers=[worker for report in reports for worker in report.workers],
            observed=observed,
            index=reports[0].index,
            queues=[queue for report in reports for queue in report.queues],
        )

    def known_models(self) -> list[tuple[EngineInfo, list[str]]]:
        """By fleet that was reached: its facts, and every name that a request may use."""
        found = []
        for name, router in self.routers.items():
            try:
                info = router.info
            except RollplaneError:
                continue
            names = [info.model, *info.aliases, name, *sorted(router.fleet.adapter_paths)]
            found.append((info, list(dict.fromkeys(names))))
        return found


def _has_adapter(fleet: Fleet, name: str) -> bool:
    if name in fleet.adapter_paths:
        return True
    states = [member.worker.state for member in fleet.members]
    return any(record.name == name for state in states if state is not None for record in state.adapters)
