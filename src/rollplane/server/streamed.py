"""What every streamed answer has: a reader at the engine's pace, a writer at the client's, an error as the last event.

Between the two stand `Deltas`: what a slow client has not taken is merged, so that it costs one chunk and not many.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import structlog
from starlette.types import Receive, Scope, Send

from rollplane.errors import RollplaneError
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import TokenLogprobs
from rollplane.protocol.events import ChoiceEvent
from rollplane.protocol.response import Choice
from rollplane.server.engine_calls import is_big, stream_answer
from rollplane.server.error_responses import as_rollplane_error, error_event, error_response
from rollplane.server.pieces import send_pieces
from rollplane.server.service import Service

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
log = structlog.get_logger("rollplane.server")

Parts = dict[int, tuple[list[Int32Array], list[TokenLogprobs]]]


@dataclass(frozen=True)
class Taken:
    """What one chunk says: new ids and logprobs by choice, and the choices that ended. `big`: too much for the event loop."""

    parts: Parts
    finished: dict[int, Choice]
    big: bool


class Deltas:
    """What came since the last chunk, merged per choice."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.ended = False
        self.error: RollplaneError | None = None
        self._parts: Parts = {}
        self._finished: dict[int, Choice] = {}
        self._big = False

    def __repr__(self) -> str:
        return f"<Deltas of {len(self._parts)} choices{', ended' if self.ended else ''}>"

    def add(self, event: ChoiceEvent, whole: Choice | None, *, index: int | None = None) -> None:
        """Take one event of the choice `index`, by default its own; `whole` is the checked choice when the event ended it."""
        index = event.index if index is None else index
        ids, logprobs = self._parts.setdefault(index, ([], []))
        ids.append(event.token_ids)
        if event.logprobs is not None:
            logprobs.append(event.logprobs)
        if whole is not None:
            self._finished[index] = whole
            self._big = self._big or is_big(event)
        self.arrived.set()

    def end(self, error: RollplaneError | None = None) -> None:
        """Nothing more will come."""
        self.ended, self.error = True, error
        self.arrived.set()

    @property
    def waiting(self) -> bool:
        """Whether there is something to write."""
        return bool(self._parts)

    def take(self) -> Taken:
        """What is there, out of the way of what comes next."""
        taken = Taken(self._parts, self._finished, self._big)
        self._parts, self._finished, self._big = {}, {}, False
        return taken


class StreamedAnswer(ABC):
    """The ASGI answer of one streamed body, by server-sent events.

    Args:
        service: what serves it.
        request_id: for logs and names of tasks.
        arrived: when the request came, by `time.monotonic`.
    """

    def __init__(self, service: Service, request_id: str, *, arrived: float) -> None:
        self._service = service
        self._request_id = request_id
        self._arrived = arrived
        self._deltas = Deltas()
        self._first_token_seen = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the answer; hanging up stops the engine's work."""
        serving = self._serve(scope, receive, send)
        error = await stream_answer(self._service, serving, receive, arrived=self._arrived)
        if error is not None:
            log.info("stream_failed", request_id=self._request_id, code=error.code, reason=error.message)

    @abstractmethod
    async def _read(self) -> None:
        """The engine's events into the deltas, at the engine's pace; raises what ended them early."""

    @abstractmethod
    async def _write_chunk(self, send: Send, taken: Taken) -> None:
        """Write what came since the last chunk."""

    @abstractmethod
    def _close(self) -> bytes:
        """Count the whole answer; its last events before `[DONE]`."""

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> RollplaneError | None:
        """Write the whole stream; the error that ended it, if one did."""
        deltas = self._deltas
        reader = asyncio.create_task(self._read_all(), name=f"events of {self._request_id}")
        try:
            await deltas.arrived.wait()
            if deltas.error is not None and not deltas.waiting:
                await error_response(deltas.error)(scope, receive, send)
                return deltas.error
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                await self._write(send)
            except Exception as error:
                deltas.error = as_rollplane_error(error)
            if deltas.error is not None:
                await self._send(send, b"data: " + error_event(deltas.error) + b"\n\n", more=False)
            return deltas.error
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_all(self) -> None:
        try:
            await self._read()
        except Exception as error:
            self._deltas.end(as_rollplane_error(error))
        else:
            self._deltas.end()

    async def _write(self, send: Send) -> None:
        """Chunks until the events end; then, unless an error ended them, the last chunk."""
        deltas = self._deltas
        while True:
            await deltas.arrived.wait()
            deltas.arrived.clear()
            if deltas.waiting:
                await self._write_chunk(send, deltas.take())
            if deltas.ended and not deltas.waiting:
                break
        if deltas.error is None:
            await self._send(send, self._close() + DONE, more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Write; the server waits here while the reader is slow, up to the setting's limit.

        Raises:
            TransportError: the reader took nothing for too long.
        """
        await send_pieces(send, [body], stall_s=self._service.settings.write_stall_s, more=more)

    def _time_first_token(self, event: ChoiceEvent) -> None:
        if not self._first_token_seen and event.token_ids.size:
            self._first_token_seen = True
            self._service.metrics.first_token.observe(time.monotonic() - self._arrived)
