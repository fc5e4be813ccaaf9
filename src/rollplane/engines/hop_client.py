"""HTTP/1.1 for the internal hop: one POST at a time on each kept connection, as little work per request as that takes.

A general client builds a request, a response, a URL, cookies, tracing and several timers for every call; here all of that is
known before. What is kept: keep-alive, TLS, back-pressure, bounds on every wait, a hang-up that the worker sees.

    idle ──post──► asked ──head──► answering ──end──► idle (or closed, where the worker or a bound says so)
                     └───────────────┴── drop, silence, deadline, lost connection: closed, the wait ends with the error
"""

import asyncio
import functools
import socket
import ssl
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools

from rollplane.errors import TransportError
from rollplane.protocol.hop import MAX_FRAME_BYTES

_TYPE_CHARS: Final = len("content-type")
KEPT_IDLE_S: Final = 60.0
"""A worker of ours closes after 75 s, so that it is never the first."""
MAX_HEAD_BYTES: Final = 64 * 2**10
HIGH_WATER_BYTES: Final = 2**19
"""Of an answer that nobody has taken; beyond, no more is read from the socket, for all of it is copied in one go."""
KEEPALIVE_IDLE_S: Final = 10
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3


class HopConnection(asyncio.Protocol):
    """One connection to a worker; see the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._error: Exception | None = None
        self._asked = False
        self._paused = False
        self._keep_alive = False
        self._limit_s = 0.0
        self._in_all = False
        self._heard_at = 0.0
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._head_bytes = 0
        self._has_head = False
        self._ended = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "answering" if self._has_head else "asked" if self._asked else "idle"
        return f"<HopConnection {state}, {self._size} bytes waiting>"

    # -- one request ---------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked here any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer, names in lower case."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._headers}

    @property
    def content_type(self) -> str:
        """What the answer says its body is, without parameters; empty where it says nothing."""
        kind = b""
        for name, value in self._headers:
            if len(name) == _TYPE_CHARS and name.lower() == b"content-type":
                kind = value
        return kind.decode("latin-1").partition(";")[0]

    @property
    def ended(self) -> bool:
        """Whether the whole answer is here."""
        return self._ended

    @property
    def reusable(self) -> bool:
        """Whether the answer has ended, and another request may be sent."""
        return (
            self._ended
            and self._keep_alive
            and self._error is None
            and self._transport is not None
            and not self._transport.is_closing()
            and self._transport.get_write_buffer_size() == 0
        )

    def post(self, head: bytes, body: bytes, *, limit_s: float, in_all: bool) -> None:
        """Send a request.

        Args:
            limit_s: seconds until `TimeoutError`.
            in_all: from now, whatever comes; else of silence.
        """
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._reset()
        self._asked = True
        self._limit_s = limit_s
        self._in_all = in_all
        now = self._heard_at = self._loop.time()
        if self._timer is None or self._due > now + limit_s:
            self._look_in(limit_s, now=now)
        self._transport.writelines((head, body))

    async def head(self) -> int:
        """The status of the answer, once its head is here.

        Raises:
            OSError, TransportError: the connection was lost, dropped, or broke the protocol.
            TimeoutError: it was silent for too long.
        """
        while self._error is not None or not self._has_head:
            await self._more()
        return self.status

    async def read(self) -> bytes:
        """What has come of the body, at least one byte; empty at its end. Raises what `head` does."""
        while self._error is not None or not (self._parts or self._ended):
            await self._more()
        return self._take()

    async def rest(self) -> bytes:
        """All that is left of the body. Raises what `head` does."""
        while self._error is not None or not self._ended:
            await self._more()
        return self._take()

    def drop(self, reason: str) -> None:
        """End the present wait, and every later one, with TransportError(`reason`); the worker sees a hang-up."""
        self._fail(TransportError(reason))

    def rest_idle(self) -> None:
        """The answer was taken."""
        self._asked = False
        self.idle_since = self._loop.time()

    def close(self) -> None:
        """Hang up."""
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _take(self) -> bytes:
        parts, self._parts, self._size = self._parts, [], 0
        if len(parts) == 1:
            return parts[0]
        return b"".join(parts)

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready for the first request."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        watch_peer(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Read on, then wake whoever waits, once."""
        if not self._asked or self._ended:
            self._fail(ConnectionAbortedError("the worker said something that nobody asked"))
            return
        if not self._in_all:
            self._heard_at = self._loop.time()
        self._head_bytes += 0 if self._has_head else len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionAbortedError(f"the worker's answer is no HTTP: {error}"))
            return
        self._go_on(has_head=self._has_head, ended=self._ended)

    def _go_on(self, *, has_head: bool, ended: bool) -> None:
        """After what the parser has seen: refuse what is too large, wake the reader, or wait for it."""
        waiter = self._waiter
        if not has_head and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(TransportError(f"the head of the answer is over the limit of {MAX_HEAD_BYTES} bytes"))
        elif self._size > MAX_FRAME_BYTES + 4:
            self._fail(TransportError(f"a frame of {self._size} bytes or more is over the limit of {MAX_FRAME_BYTES}"))
        else:
            if waiter is not None and has_head and not waiter.done():
                waiter.set_result(None)
            if self._size > HIGH_WATER_BYTES and not ended and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()

    def eof_received(self) -> None:
        """The worker sends no more; the connection closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer that is not whole is lost."""
        self._transport = None
        self._stop_timer()
        if self._asked and not self._ended:
            self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the connection was closed"))

    # -- httptools -----------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is whole; that of a 1xx announces another one."""
        self.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()
        self._has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._parts.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._has_head:
            self._ended = True
        else:
            self._reset()

    # -- bounds --------------------------------------------------------------------------------------------------------

    def _look_in(self, delay_s: float, *, now: float) -> None:
        self._stop_timer()
        self._due = now + delay_s
        self._timer = self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        """Whether the present request is late. A timer outlives its request, for most are over long before it."""
        self._timer = None
        if not self._asked:
            return
        now = self._loop.time()
        left_s = self._heard_at + self._limit_s - now
        if self._paused and not self._in_all:  # it is the reader who is slow
            left_s = self._limit_s
        if left_s > 0:
            self._look_in(left_s, now=now)
        elif not self._ended:
            self._fail(TimeoutError())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HopPool:
    """Kept connections to one worker, the last used first.

    Args:
        base_url: `http` or `https`, with or without a path before the hop's.
        headers: of every request.
        connect_timeout_s: longest wait for a connection.
        socket_path: of the Unix socket where the worker listens, whose host is then a name only; None: TCP.
    """

    def __init__(
        self,
        base_url: str,
        path: str,
        *,
        headers: dict[str, str],
        connect_timeout_s: float,
        socket_path: str | None = None,
    ) -> None:
        url = urlsplit(base_url + path)
        self._socket_path = socket_path
        self._tls = url.scheme == "https"
        self._host = url.hostname or ""
        self._port = url.port or (443 if self._tls else 80)
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[HopConnection] = []
        self._closed = False
        lines = [f"POST {url.path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._start = ("\r\n".join(lines) + "\r\n").encode("latin-1")

    def __repr__(self) -> str:
        return f"<HopPool {self._host}:{self._port}, {len(self._idle)} idle>"

    def head(self, *, length: int, headers: dict[str, str]) -> bytes:
        """The head of one request. Values that no header can carry are left out."""
        more = ""
        for name, value in headers.items():
            if value.isascii() and value.isprintable():
                more += f"{name}: {value}\r\n"
        return b"%b%bContent-Length: %d\r\n\r\n" % (self._start, more.encode(), length)

    def take(self) -> HopConnection | None:
        """A kept connection, None where there is none."""
        idle = self._idle
        oldest = asyncio.get_running_loop().time() - KEPT_IDLE_S
        while idle and (idle[0].closed or idle[0].idle_since < oldest):
            idle.pop(0).close()
        while idle:
            found = idle.pop()
            if not found.closed:
                return found
        return None

    async def open(self) -> HopConnection:
        """A new connection.

        Raises:
            OSError: nobody there, or not in time (TimeoutError).
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if self._socket_path is not None:
                    _, connection = await loop.create_unix_connection(lambda: HopConnection(loop), self._socket_path)
                else:
                    _, connection = await loop.create_connection(
                        lambda: HopConnection(loop), self._host, self._port, ssl=_tls() if self._tls else None
                    )
        except TimeoutError:
            raise ConnectionError(f"no connection within {self._connect_timeout_s:g} s") from None
        return connection

    def give(self, connection: HopConnection) -> None:
        """Keep a connection whose answer was taken, or close it."""
        if connection.reusable and not self._closed:
            connection.rest_idle()
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close what is idle now, and the rest when its answer was taken."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def watch_peer(sock: Any) -> None:
    """TCP keep-alive: a machine that vanishes sends no reset; its connections end after about 25 seconds."""
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        option = getattr(socket, name, None)  # not every system has all three
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
