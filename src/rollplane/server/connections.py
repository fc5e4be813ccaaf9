"""One client's connection: uvicorn's, with bounds on what a caller may leave unsaid.

    accepted ──first byte──► head ──complete──► request runs ──answered──► idle (uvicorn's keep-alive limit) ──► head ...
        └─ head_timeout_s: 408 ──┘                               └─ its body is still coming: `REST_S`, `REST_BYTES`

uvicorn bounds idle connections alone: one that sends a byte of a head now and then, or a body without end after its
413, would be kept for ever.
"""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final, cast

import structlog
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rollplane.config import ServerSettings
from rollplane.errors import HeadTimeout, HeadTooLarge, InvalidRequest, RollplaneError, Unavailable
from rollplane.server.error_responses import error_response
from rollplane.server.peer import PEER

MAX_HEAD_BYTES: Final = 64 * 2**10
"""Of a request line and headers that come in pieces; uvicorn takes at most 256 KiB at once."""
REST_BYTES: Final = 4 * 2**20
REST_S: Final = 5.0
"""How much of a body is thrown away after its answer. Closing at once would reset the connection, and the caller that
is still sending would see that instead of its answer."""
REFUSALS: Final = 256
"""Connections above the limit that are still told so; further ones are closed without a word."""

log = structlog.get_logger("rollplane.server")


class _Peer:
    """See `server.peer.Peer`.

    A request's scope has its peer, and its cycle has the scope: were the cycle held here too, each request would be left to
    the garbage collector. It lives as long as the app's call, whose task holds it.
    """

    __slots__ = ("_cycle", "hang_ups")

    def __init__(self, cycle: RequestResponseCycle, hang_ups: set[Callable[[], Any]]) -> None:
        self._cycle = weakref.ref(cycle)
        self.hang_ups = hang_ups

    @property
    def gone(self) -> bool:
        cycle = self._cycle()
        return cycle is None or cycle.disconnected

    def take_body(self) -> bytes | None:
        cycle = self._cycle()
        if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        return body

    def answer(self, head: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        cycle = self._cycle()
        if (
            cycle is None
            or cycle.response_started
            or cycle.disconnected
            or cycle.flow.write_paused
            or cycle.scope["method"] == "HEAD"
            or cycle.transport.is_closing()
        ):
            return False
        lines = [name + b": " + value for name, value in (*cycle.default_headers, *head)]
        if not cycle.keep_alive:
            lines.append(b"connection: close")
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.writelines((b"".join((STATUS_LINE[200], b"\r\n".join(lines), b"\r\n\r\n")), body))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


class Connection(HttpToolsProtocol):
    """See the module; `settings` has the limits."""

    def __init__(self, *args: Any, settings: ServerSettings, **options: Any) -> None:
        super().__init__(*args, **options)
        self._settings = settings
        self._busy = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._rest_timer: asyncio.TimerHandle | None = None
        self._rest_bytes = 0
        self._hang_ups: set[Callable[[], Any]] = set()
        self._idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, also above the limit: its request is answered with a 503 then."""
        super().connection_made(transport)
        over = len(self.connections) - self._settings.max_connections
        if over > REFUSALS:
            transport.abort()
        elif over > 0:
            self.app = self._refuse_request
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._head_arrived()
        self._end_rest()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().connection_lost(exc)
        for tell in list(self._hang_ups):
            tell()

    def data_received(self, data: bytes) -> None:
        """Read on; a head that is not whole yet, or what is left of an answered body, only within its bounds."""
        if self._rest_timer is not None:
            self._rest_bytes += len(data)
            if self._rest_bytes > REST_BYTES:
                self.transport.abort()
                return
        elif self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._rest_timer is not None:
            return
        if self._head_timer is not None:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadTooLarge(f"the request's head is larger than the limit of {MAX_HEAD_BYTES} bytes"))
        elif not self._busy:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._busy = True
        self._head_arrived()
        super().on_headers_complete()
        # The task that serves it has been made, and has not run yet.
        self.cycle.scope["extensions"] = cast("Any", {PEER: _Peer(self.cycle, self._hang_ups)})

    def on_message_complete(self) -> None:
        """The body is whole, so the connection may be used again."""
        self._end_rest()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Bound what still comes of a body whose answer is sent."""
        self._busy = bool(self.pipeline)
        if self.cycle.more_body and not self._busy and not self.transport.is_closing():
            self._rest_bytes = 0
            self._rest_timer = self.loop.call_later(REST_S, self.transport.abort)
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self._look_idle)

    def _unset_keepalive_if_required(self) -> None:
        """Not idle. The timer stays and looks again when it is due: every request would make and end one of its own."""
        self._idle_since = None

    def _look_idle(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self._look_idle)
        else:
            self.timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the shape of every error here."""
        self._refuse(InvalidRequest(msg))

    def _await_head(self) -> None:
        limit_s = self._settings.head_timeout_s
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(
            limit_s, self._refuse, HeadTimeout(f"the request's head did not arrive within {limit_s:g} s")
        )

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_rest(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _refuse(self, error: RollplaneError) -> None:
        """Answer without the app, and close."""
        if self.transport.is_closing():
            return
        log.info("connection_refused", client=self.client, code=error.code, reason=error.message)
        response = error_response(error)
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
        head += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.transport.close()

    async def _refuse_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._settings.max_connections
        response = error_response(
            Unavailable(f"this server has its limit of {limit} connections (server.max_connections)", retry_after_s=1.0)
        )
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
