"""A worker behind the internal hop, as an engine: one POST out (`engines.hop_client`), frames of events back.

The worker's state is followed beside the requests (its stream where it has one, else polled), so `info` and `health`
never wait for the network. Closing the iterator closes the connection, and the worker aborts.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from rollplane.engines.hop_client import HopConnection, HopPool, watch_peer
from rollplane.errors import (
    DeadlineExceeded,
    EngineProtocolError,
    RollplaneError,
    TransportError,
    Unavailable,
    error_from_body,
)
from rollplane.protocol.answer import WIRE_VERSION
from rollplane.protocol.events import EndEvent, ErrorEvent, Event, HopEvent
from rollplane.protocol.hop import (
    BIG_FRAME_BYTES,
    FRAMES,
    GENERATE_PATH,
    STATE_PATH,
    WIRE_HEADER,
    FrameReader,
    decode_events,
    encode_hop_request,
    only_frame,
)
from rollplane.protocol.http import error_from_answer
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.kv_events import KV_EVENTS_PATH, KvBatch, KvBatchReader
from rollplane.protocol.rendered import RENDER_PATH, RenderBody, Rendered
from rollplane.protocol.request import JSON, MSGPACK, GenerateRequest
from rollplane.protocol.state import HEARTBEAT_S, StateReader, WorkerState, decode_state

ABORT_PATH: Final = "/engine/abort_request"
RENDER_S: Final = 120.0
DEADLINE_GRACE_S: Final = 5.0
"""The worker ends a request at its deadline itself; only then is it taken for gone."""
SILENT_S: Final = HEARTBEAT_S * 3
"""A worker whose state stream says nothing for so long is taken for lost; it beats about once a second."""
READ_BYTES: Final = 1 << 18
"""Twice as much is read ahead; all of it is copied in one go."""

T = TypeVar("T")

StateListener = Callable[["RemoteEngine"], None]


class _Call:
    """Something that is waited for; `drop` ends its wait, and every later one, with TransportError."""

    __slots__ = ("_dropped", "_scope")

    def __init__(self) -> None:
        self._dropped: str | None = None
        self._scope: asyncio.Timeout | None = None

    async def wait(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(None if self._dropped is None else 0) as self._scope:
                return await work
        except TimeoutError:
            if self._dropped is None:
                raise
            raise TransportError(self._dropped) from None
        finally:
            self._scope = None

    def drop(self, reason: str) -> None:
        self._dropped = reason
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(0)


class RemoteEngine:
    """One worker at `base_url`.

    Args:
        base_url: the worker's HTTP address, such as `http://10.0.0.7:8100`.
        key: sent as a bearer token.
        frontend: our name in the worker's logs.
        connect_timeout_s: longest wait for a connection.
        read_timeout_s: longest silence on a request without a deadline.
        poll_s: pause between two looks at the state of a worker that has no state stream.
        silent_s: a worker that says nothing for so long, though connected to, is lost: what waits for it is broken off.
        session: shared connections for all but Generate; the caller closes it. None: one of its own.
        socket_path: of the Unix socket where the worker listens for Generate; None: TCP, by `base_url`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None = None,
        frontend: str = "",
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 3600.0,
        poll_s: float = 1.0,
        silent_s: float = SILENT_S,
        session: aiohttp.ClientSession | None = None,
        socket_path: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.state: WorkerState | None = None
        """The last state heard, also when it is old; see `reachable`."""
        self.reachable = False
        self.trouble: str | None = None
        self.inflight = 0
        self._idle = asyncio.Event()
        self._calls: set[_Call | HopConnection] = set()
        self._watched: set[_Call] = set()
        self._key = key
        self._frontend = frontend
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._poll_s = poll_s
        self._silent_s = silent_s
        self._session = session
        self._owns_session = session is None
        self._pool = HopPool(
            self.base_url,
            GENERATE_PATH,
            headers=self._headers({"Content-Type": MSGPACK, "Accept": FRAMES}),
            connect_timeout_s=connect_timeout_s,
            socket_path=socket_path,
        )
        self._follower: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._listeners: list[StateListener] = []

    def __repr__(self) -> str:
        state = self.state
        if state is None:
            return f"<RemoteEngine {self.base_url} unknown: {self.trouble or 'not asked yet'}>"
        seen = "" if self.reachable else " unreachable"
        return (
            f"<RemoteEngine {self.base_url} {state.health.state}{seen} {state.policy_version} inflight={self.inflight}>"
        )

    @property
    def info(self) -> EngineInfo:
        """The worker's facts.

        Raises:
            Unavailable: the worker was never reached.
        """
        if self.state is None:
            raise Unavailable(f"worker {self.base_url} was never reached: {self.trouble or 'not started'}")
        return self.state.info

    @property
    def instance(self) -> str | None:
        """The worker's process, None before it was reached."""
        return None if self.state is None else self.state.instance

    def on_change(self, listener: StateListener) -> None:
        """Call `listener` after every look at the state that changed something, also reachability."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Follow the worker and wait for its first state.

        Raises:
            TransportError: it cannot be reached.
        """
        self.follow()
        await self._looked.wait()
        if self.state is None:
            raise TransportError(f"worker {self.base_url} cannot be reached: {self.trouble}")

    def follow(self) -> None:
        """Follow the worker's state without waiting for it. Idempotent."""
        if self._follower is None:
            self._follower = asyncio.get_running_loop().create_task(self._follow(), name=f"state of {self.base_url}")

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Stop following and drop the connections; the worker itself goes on."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
            self._follower = None
        if grace_s > 0 and self.inflight:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
        self._pool.close()
        if self._owns_session:
            self.drop_requests(f"the connections to worker {self.base_url} were closed")
        if self._session is not None and self._owns_session:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Send one request and yield what comes back.

        Raises:
            RollplaneError: the worker's own typed error.
            TransportError: the connection failed or ended early.
            DeadlineExceeded: nothing came within the request's deadline.
        """
        deadline_s = request.options.deadline_s
        connection: HopConnection | None = None
        self._enter()
        try:
            connection = self._pool.take() or await self._connected()
            await self._ask(connection, request, deadline_s=deadline_s)
            reader = FrameReader()
            ended = False
            while data := await connection.read():
                for frame in reader.cut(data):
                    for event in await _events_in(frame):
                        if isinstance(event, ErrorEvent):
                            raise error_from_body(event.error, status=event.status)
                        ended = ended or isinstance(event, EndEvent)
                        yield event
            reader.finish()
            if not ended:
                raise TransportError(f"worker {self.base_url} ended the answer to {request.request_id} early")
        except OSError as error:
            raise self._translate(error, deadline_s=deadline_s) from error
        finally:
            self._leave(connection)

    async def whole(self, request: GenerateRequest) -> list[Event]:
        """As `generate`, for a request that does not stream: its answer is one frame."""
        deadline_s = request.options.deadline_s
        connection: HopConnection | None = None
        self._enter()
        try:
            connection = self._pool.take() or await self._connected()
            await self._ask(connection, request, deadline_s=deadline_s)
            found: list[Event] = []
            for event in await _all_events(connection):
                if isinstance(event, ErrorEvent):
                    raise error_from_body(event.error, status=event.status)
                found.append(event)
            if not found or not isinstance(found[-1], EndEvent):
                raise TransportError(f"worker {self.base_url} ended the answer to {request.request_id} early")
            return found
        except OSError as error:
            raise self._translate(error, deadline_s=deadline_s) from error
        finally:
            self._leave(connection)

    def _enter(self) -> None:
        self.inflight += 1
        self._idle.clear()

    def _leave(self, connection: HopConnection | None) -> None:
        self.inflight -= 1
        if not self.inflight:
            self._idle.set()
        if connection is not None:
            self._calls.discard(connection)
            self._pool.give(connection)  # one that is not at its end hangs up, and the worker aborts

    def drop_requests(self, reason: str) -> int:
        """Break off every request in flight with TransportError(`reason`), so that a router may send it elsewhere.

        For a worker whose answers are no longer wanted. Returns how many there were.
        """
        for call in self._calls:
            call.drop(reason)
        return len(self._calls)

    async def while_heard(self, work: Awaitable[T]) -> T:
        """The result of a call to the worker, given up when the worker falls silent.

        Raises:
            TransportError: it did; whether the call was carried out is not known.
        """
        call = _Call()
        self._watched.add(call)
        try:
            return await call.wait(work)
        finally:
            self._watched.discard(call)

    async def kv_feed(self) -> AsyncGenerator[KvBatch, None]:
        """What the worker caches: first all of it, then every change. Ends with the worker's stream.

        Raises:
            NotFound: it says no KV events. TransportError: the connection failed, or was silent for too long.
        """
        url = self.base_url + KV_EVENTS_PATH
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s, sock_read=HEARTBEAT_S * 3)
        try:
            async with self._open_session().get(
                url, headers=self._headers({"Accept": FRAMES}), timeout=timeout
            ) as answer:
                if answer.status != 200:
                    raise error_from_answer(answer.status, await answer.read(), answer.headers, url=url)
                if answer.content_type != FRAMES:
                    raise EngineProtocolError(f"{url} answered {answer.content_type!r}, not {FRAMES}")
                reader = KvBatchReader()
                async for data in answer.content.iter_any():
                    for batch in reader.feed(data):
                        yield batch
        except (aiohttp.ClientError, OSError) as error:
            raise TransportError(f"the KV events of worker {self.base_url}: {_says(error)}") from error

    async def abort(self, request_id: str) -> int:
        """End a request on the worker; how many live ones had the id."""
        answer = await self.post_json(ABORT_PATH, {"request_id": request_id}, timeout_s=30.0)
        count = answer.get("aborted", 0)
        return count if isinstance(count, int) else 0

    async def render_media(self, body: RenderBody) -> Rendered:
        """See `MediaRenderer.render_media`.

        Raises:
            TransportError: no answer, or one of another shape.
        """
        answer = await self.post_json(RENDER_PATH, msgspec.to_builtins(body), timeout_s=RENDER_S)
        try:
            return msgspec.convert(answer, Rendered)
        except msgspec.ValidationError as error:
            raise TransportError(f"worker {self.base_url} rendered something else: {error}") from None

    async def health(self) -> EngineHealth:
        """The last health heard; not alive where the worker cannot be reached now."""
        if self.state is None:
            return EngineHealth(alive=False, state="starting", reason=self.trouble)
        if not self.reachable:
            return msgspec.structs.replace(self.state.health, alive=False, state="failed", reason=self.trouble)
        return self.state.health

    async def post_json(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """POST a JSON object to an admin route of the worker; its JSON answer.

        Raises:
            RollplaneError: the worker's typed error.
            TransportError: no answer.
        """
        url = self.base_url + path
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        data = msgspec.json.encode(body)
        try:
            async with self._open_session().post(
                url, data=data, headers=self._headers({"Content-Type": JSON}), timeout=timeout
            ) as answer:
                content = await answer.read()
                if answer.status >= 300:
                    raise error_from_answer(answer.status, content, answer.headers, url=url)
        except (aiohttp.ClientError, OSError) as error:
            raise self._translate(error, deadline_s=timeout_s) from error
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise TransportError(f"{url} answered something else than a JSON object: {error}") from None

    async def refresh(self) -> WorkerState:
        """Ask for the state now, whatever the follower is doing.

        Raises:
            RollplaneError: no state; the worker counts as unreachable until it is heard again.
        """
        url = self.base_url + STATE_PATH
        timeout = aiohttp.ClientTimeout(total=self._connect_timeout_s * 2, sock_connect=self._connect_timeout_s)
        try:
            async with self._open_session().get(url, headers=self._headers({}), timeout=timeout) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise error_from_answer(answer.status, content, answer.headers, url=url)
            state = decode_state(content)
        except (aiohttp.ClientError, OSError) as error:
            found = TransportError(f"worker {self.base_url} does not say its state: {_says(error)}")
            self._lost(found.message)
            raise found from error
        except RollplaneError as error:
            self._lost(error.message)
            raise
        self._heard(state)
        return state

    # -- following -------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch_once()
            except RollplaneError as error:
                self._lost(error.message)
            except (aiohttp.ClientError, OSError) as error:
                self._lost(_says(error))
                if isinstance(error, TimeoutError):
                    # Stopped, hung or cut off: no connection will say so, and nothing that waits for it would end.
                    reason = f"worker {self.base_url} has been silent for {self._silent_s:g} s"
                    self.drop_requests(reason)
                    for call in self._watched:
                        call.drop(reason)
            self._looked.set()
            await asyncio.sleep(self._poll_s)

    async def _watch_once(self) -> None:
        """Follow the state stream until it ends, or look once where there is none."""
        url = f"{self.base_url}{STATE_PATH}?watch=1"
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=min(self._connect_timeout_s, self._silent_s), sock_read=self._silent_s
        )
        async with self._open_session().get(url, headers=self._headers({"Accept": FRAMES}), timeout=timeout) as answer:
            if answer.status != 200:
                raise error_from_answer(answer.status, await answer.read(), answer.headers, url=url)
            if answer.content_type != FRAMES:
                self._heard(decode_state(await answer.read()))
                return
            reader = StateReader()
            async for data in answer.content.iter_any():
                for state in reader.feed(data):
                    self._heard(state)
                    self._looked.set()
        raise TransportError("the state stream ended")

    def _heard(self, state: WorkerState) -> None:
        news = state is not self.state and state != self.state
        changed = news or not self.reachable
        if news:
            self.state = state
        self.reachable, self.trouble = True, None
        if changed:
            self._tell()

    def _lost(self, trouble: str) -> None:
        changed = self.reachable or self.trouble is None
        self.reachable, self.trouble = False, trouble
        if changed:
            self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self)

    # -- requests --------------------------------------------------------------------------------------------------

    async def _connected(self) -> HopConnection:
        call = _Call()
        self._calls.add(call)
        try:
            return await call.wait(self._pool.open())
        finally:
            self._calls.discard(call)

    async def _ask(self, connection: HopConnection, request: GenerateRequest, *, deadline_s: float | None) -> None:
        """Send a request and read the head of its answer."""
        self._calls.add(connection)
        body = encode_hop_request(request, frontend=self._frontend, deadline_s=deadline_s)
        headers = {"X-Request-Id": request.request_id}
        if request.traceparent is not None:
            headers["traceparent"] = request.traceparent
        connection.post(
            self._pool.head(length=len(body), headers=headers),
            body,
            limit_s=self._read_timeout_s if deadline_s is None else deadline_s + DEADLINE_GRACE_S,
            in_all=deadline_s is not None,
        )
        status = await connection.head()
        if status == 200 and connection.content_type == FRAMES:
            return
        url = self.base_url + GENERATE_PATH
        if status != 200:
            raise error_from_answer(status, await connection.rest(), connection.headers, url=url)
        raise EngineProtocolError(f"{url} answered {connection.headers.get('content-type', '')!r}, not {FRAMES}")

    # -- connections -----------------------------------------------------------------------------------------------

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = worker_session()
        return self._session

    def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        headers = {WIRE_HEADER: str(WIRE_VERSION), **more}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _translate(self, error: Exception, *, deadline_s: float | None) -> RollplaneError:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
            if deadline_s is not None:
                return DeadlineExceeded(f"worker {self.base_url} did not answer within {deadline_s:g} s")
            return TransportError(f"worker {self.base_url} was silent for {self._read_timeout_s:g} s")
        return TransportError(f"worker {self.base_url}: {_says(error)}")


async def _all_events(connection: HopConnection) -> list[HopEvent]:
    """Every event of an answer, up to an error: one frame, which is mostly here at the first look."""
    data = await connection.read()
    if connection.ended and len(data) <= BIG_FRAME_BYTES:
        frame = only_frame(data)
        if frame is not None:
            return decode_events(frame)
    reader, found = FrameReader(), list[HopEvent]()
    while data:
        for body in reader.cut(data):
            found += await _events_in(body)
            if found and isinstance(found[-1], ErrorEvent):
                return found
        data = await connection.read()
    reader.finish()
    return found


async def _events_in(frame: bytes | memoryview) -> list[HopEvent]:
    return await asyncio.to_thread(decode_events, frame) if len(frame) > BIG_FRAME_BYTES else decode_events(frame)


def worker_session() -> aiohttp.ClientSession:
    """Connections to workers: as many as there are requests, watched by TCP keep-alive.

    A machine that vanishes sends no reset; keep-alive ends its connections after about 25 seconds.
    """
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=60.0, ttl_dns_cache=60, socket_factory=_keepalive_socket
    )
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=READ_BYTES)


def _keepalive_socket(address: Any) -> socket.socket:
    family, kind, protocol = address[:3]
    sock = socket.socket(family=family, type=kind, proto=protocol)
    watch_peer(sock)
    return sock


def _says(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
