"""The worker's end of the internal hop: `POST /internal/v1/generate`, frames of events out.

A failure before the first event is an HTTP error answer; after it, an `ErrorEvent` that ends the last frame. A unary
answer is one frame; a stream's frames carry whatever is ready when the connection takes more.
"""

import asyncio
import time
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollplane.engines.base import whole_of
from rollplane.errors import InvalidRequest, RollplaneError, Unavailable, UnsupportedMedia, error_body
from rollplane.protocol.answer import WIRE_VERSION
from rollplane.protocol.events import ErrorEvent, Event, HopEvent
from rollplane.protocol.hop import FRAMES, WIRE_HEADER, decode_hop_request, encode_frame, frame_pieces
from rollplane.protocol.pieces import Piece
from rollplane.protocol.request import MSGPACK, GenerateRequest
from rollplane.server.engine_calls import BIG_BODY_BYTES, any_big, is_big, running, stream_answer
from rollplane.server.error_responses import as_rollplane_error, error_response
from rollplane.server.observe import REQUEST_ID
from rollplane.server.peer import head_of, peer_of
from rollplane.server.pieces import PiecesAnswer, send_pieces
from rollplane.server.service import Service
from rollplane.server.watch import read_body, run_unanswered
from rollplane.server.whole import WholeAnswer

WIRE: Final = str(WIRE_VERSION)
KIND: Final = FRAMES.encode()
SPOKEN: Final = ((WIRE_HEADER.encode(), WIRE.encode()),)


async def hop_generate(request: Request) -> ASGIApp:
    """Serve one request of a frontend.

    Raises:
        RollplaneError: before the first event.
    """
    service: Service = request.app.state.service
    arrived = time.monotonic()
    stream = False
    try:
        if service.lifecycle.draining:
            raise Unavailable("this worker is draining")
        asked = await _read(request, service)
        stream = asked.stream
        request.scope[REQUEST_ID] = asked.request_id
        if stream:
            return FrameStream(service, asked, arrived=arrived)
        with service.one_in_flight():
            frame = await run_unanswered(_one_frame(service, asked), request.receive, peer=peer_of(request.scope))
    except Exception as error:
        found = as_rollplane_error(error)
        service.metrics.count_error(found, stream=stream)
        raise found from error
    service.metrics.count_whole(time.monotonic() - arrived)
    if isinstance(frame, bytes):
        return WholeAnswer(frame, kind=KIND, headers=SPOKEN)
    return PiecesAnswer(frame, media_type=FRAMES, headers={WIRE_HEADER: WIRE}, stall_s=service.settings.write_stall_s)


async def _read(request: Request, service: Service) -> GenerateRequest:
    head = head_of(request.scope)
    wire = head.get(WIRE_HEADER)
    if wire != WIRE:
        raise InvalidRequest(
            f"header {WIRE_HEADER} is {wire!r}, this worker speaks wire version {WIRE_VERSION}", param=WIRE_HEADER
        )
    kind = head.get("content-type", "").split(";", 1)[0].strip().lower()
    if kind != MSGPACK:
        raise UnsupportedMedia(f"Content-Type {kind!r} is not read here; send {MSGPACK}")
    body = await read_body(
        request.receive,
        limit_bytes=service.settings.max_body_bytes,
        headers=head,
        timeout_s=service.settings.body_timeout_s,
        peer=peer_of(request.scope),
    )
    hop = await service.in_pool(decode_hop_request, body, big=len(body) > BIG_BODY_BYTES)
    if hop.deadline_s is not None:
        hop.request.options.deadline_s = max(hop.deadline_s, 0.001)
    return hop.request


async def _one_frame(service: Service, request: GenerateRequest) -> bytes | list[Piece]:
    events = await whole_of(service.engine, request)
    return await service.in_pool(frame_pieces, events) if any_big(events) else encode_frame(events)


class FrameStream:
    """The ASGI answer of one streamed hop request."""

    def __init__(self, service: Service, request: GenerateRequest, *, arrived: float) -> None:
        self._service = service
        self._request = request
        self._arrived = arrived
        self._ready: list[HopEvent] = []
        self._arrived_event = asyncio.Event()
        self._ended = False
        self._error: RollplaneError | None = None

    def __repr__(self) -> str:
        return f"<FrameStream {self._request.request_id}, {len(self._ready)} events ready{', ended' if self._ended else ''}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until the events end; hanging up stops the engine's work."""
        await stream_answer(self._service, self._serve(scope, receive, send), receive, arrived=self._arrived)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> RollplaneError | None:
        reader = asyncio.create_task(self._read(), name=f"events of {self._request.request_id}")
        try:
            await self._arrived_event.wait()
            if self._error is not None and not self._ready:
                await error_response(self._error)(scope, receive, send)
                return self._error
            headers = [(b"content-type", KIND), *SPOKEN]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while True:
                await self._arrived_event.wait()
                self._arrived_event.clear()
                events, self._ready = self._ready, []
                ended = self._ended
                if ended and self._error is not None:
                    events.append(ErrorEvent(status=self._error.status, error=error_body(self._error)))
                if events:
                    big = any(is_big(event) for event in events if not isinstance(event, ErrorEvent))
                    frame = await self._service.in_pool(frame_pieces, events) if big else [encode_frame(events)]
                    await send_pieces(send, frame, stall_s=self._service.settings.write_stall_s, more=not ended)
                elif ended:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                if ended:
                    return self._error
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async with running(self._service.engine, self._request) as events:
                async for event in events:
                    self._take(event)
        except Exception as error:
            self._error = as_rollplane_error(error)
        self._ended = True
        self._arrived_event.set()

    def _take(self, event: Event) -> None:
        self._ready.append(event)
        self._arrived_event.set()
