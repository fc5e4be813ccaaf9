"""`GET /internal/v1/state`: what a worker says of itself to the frontends that follow it."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Send

from rollplane.engines.base import close_events
from rollplane.errors import NotFound
from rollplane.protocol.hop import FRAMES
from rollplane.protocol.request import MSGPACK
from rollplane.protocol.state import HEARTBEAT_S, WorkerState, encode_state, encode_state_frame
from rollplane.server.service import Service
from rollplane.server.watch import WatchedAnswer
from rollplane.worker import Worker

BEAT_S = min(1.0, HEARTBEAT_S)
"""Load changes without a change of state; frontends hear of it this often."""


async def worker_state(worker: Worker, service: Service) -> WorkerState:
    """The worker's state now; an engine that does not say how it is counts as not alive."""
    return await worker.snapshot(health=await service.health())


async def state(request: Request) -> ASGIApp:
    """The state once, or (`?watch=1`) frames of it: now, after every change, and at least every heartbeat.

    Raises:
        NotFound: this is no worker.
    """
    service: Service = request.app.state.service
    if service.worker is None:
        raise NotFound("only a worker says its state")
    if request.query_params.get("watch") == "1":
        return StateStream(service, service.worker)
    return Response(encode_state(await worker_state(service.worker, service)), media_type=MSGPACK)


class StateStream(WatchedAnswer):
    """The ASGI answer of a watched state."""

    def __init__(self, service: Service, worker: Worker) -> None:
        self._service = service
        self._worker = worker

    def __repr__(self) -> str:
        return f"<StateStream of {self._worker!r}>"

    async def send_all(self, send: Send) -> None:
        """Send states until the reader leaves or the process stops."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", FRAMES.encode())]})
        beats = _beats(self._worker, self._service)
        try:
            async for _ in beats:
                frame = encode_state_frame(await worker_state(self._worker, self._service))
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        finally:
            await beats.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _beats(worker: Worker, service: Service) -> AsyncGenerator[None, None]:
    """One item at once, after every change and every `BEAT_S`; ends when the process stops."""
    changes = aiter(worker.watch())
    change = asyncio.ensure_future(_next(changes))
    stopping = asyncio.ensure_future(service.lifecycle.stopping.wait())
    try:
        while not stopping.done():
            done, _ = await asyncio.wait({change, stopping}, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if change in done and not change.result():
                yield None
                return
            if change in done:
                change = asyncio.ensure_future(_next(changes))
            yield None
    finally:
        for task in (change, stopping):
            task.cancel()
        await asyncio.gather(change, stopping, return_exceptions=True)
        await close_events(changes)


async def _next(changes: object) -> bool:
    try:
        await anext(changes)  # type: ignore[call-overload]
    except StopAsyncIteration:
        return False
    return True
