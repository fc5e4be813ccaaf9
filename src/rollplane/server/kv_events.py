"""`GET /internal/v1/kv_events`: which blocks a worker caches, for the prefix indexes of the frontends that follow it."""

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Send

from rollplane.errors import NotFound
from rollplane.protocol.hop import FRAMES
from rollplane.protocol.kv_events import KvBatch, encode_batch_frame
from rollplane.protocol.state import HEARTBEAT_S
from rollplane.server.service import Service
from rollplane.server.watch import WatchedAnswer
from rollplane.worker import Worker

BIG_BATCH_EVENTS = 256
"""A batch above this, such as the snapshot of a full cache, is encoded off the event loop."""


async def kv_events(request: Request) -> ASGIApp:
    """Frames of `KvBatch`; see `protocol.kv_events`.

    Raises:
        NotFound: this is no worker, or its engine says no KV events.
    """
    service: Service = request.app.state.service
    if service.worker is None or not service.worker.says_kv_events:
        raise NotFound("no KV events are said here")
    return KvEventStream(service, service.worker)


class KvEventStream(WatchedAnswer):
    """The ASGI answer of one follower."""

    def __init__(self, service: Service, worker: Worker) -> None:
        self._service = service
        self._worker = worker

    def __repr__(self) -> str:
        return f"<KvEventStream of {self._worker!r}>"

    async def send_all(self, send: Send) -> None:
        """Send batches until the reader leaves, the engine ends or the process stops."""
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", FRAMES.encode())]})
        feed = self._worker.kv_feed()
        batch: asyncio.Task[KvBatch | None] | None = None
        stopping = asyncio.ensure_future(self._service.lifecycle.stopping.wait())
        try:
            while not stopping.done():
                batch = batch or asyncio.ensure_future(anext(feed, None))
                await asyncio.wait({batch, stopping}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if batch.done():
                    found, batch = batch.result(), None
                    if found is None:
                        break
                else:
                    found = KvBatch(instance=self._worker.instance_id, generation=self._worker.cache_generation)
                frame = await self._service.in_pool(encode_batch_frame, found, big=len(found.events) > BIG_BATCH_EVENTS)
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        finally:
            stopping.cancel()
            if batch is not None:
                batch.cancel()
            await asyncio.gather(stopping, *([] if batch is None else [batch]), return_exceptions=True)
            await feed.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
