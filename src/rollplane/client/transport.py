"""HTTP calls with typed errors and safe repeats: what `Client` and `AdminClient` share."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import aiohttp
import msgspec
import stamina

from rollplane.errors import DeadlineExceeded, RollplaneError, TransportError
from rollplane.protocol.http import error_from_answer
from rollplane.protocol.request import JSON

T = TypeVar("T")

SILENCE_S: Final = 3600.0
"""Longest silence on a call without a time limit of its own."""
LIMIT_GRACE_S: Final = 2.0
"""The server ends a call at its deadline itself; the client waits this much longer for that answer."""
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0


class Closing(ABC):
    """What is closed at the end of its `async with` block."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Let go of what it holds. Idempotent."""


class Transport(Closing):
    """Connections to one server.

    Args:
        base_url: its address, with or without a trailing `/v1`.
        key: sent as a bearer token.
        attempts: how often a safe call is tried in all.
        connect_timeout_s: longest wait for a connection.
        mendable: whether another try can mend an error.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None,
        attempts: int,
        connect_timeout_s: float,
        mendable: Callable[[RollplaneError], bool] = lambda error: error.retryable,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.attempts = attempts
        self._key = key
        self._mendable = mendable
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<Transport {self.base_url} {'closed' if self._session is None else 'open'}>"

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def json(
        self, method: str, path: str, body: Any = None, *, limit_s: float | None = None, retry: bool = True
    ) -> Any:
        """The JSON answer of a call; None for an empty one.

        Raises:
            RollplaneError: the server's typed error, TransportError, or DeadlineExceeded after `limit_s`.
        """
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": JSON}

        async def once() -> Any:
            async with self.open(method, path, data=data, headers=headers, limit_s=limit_s) as answer:
                content = await answer.read()
            if not content:
                return None
            try:
                return msgspec.json.decode(content)
            except msgspec.DecodeError as error:
                raise TransportError(f"{self.base_url}{path} answered something else than JSON: {error}") from None

        return await self.repeated(once, limit_s=limit_s, retry=retry)

    async def repeated(self, once: Callable[[], Awaitable[T]], *, limit_s: float | None, retry: bool) -> T:
        """Call `once`, and again after errors that another try can mend, all within `limit_s` seconds.

        Raises:
            RollplaneError: the last try's error, or DeadlineExceeded.
        """
        if not retry or self.attempts == 1:
            return await once()
        try:
            async with asyncio.timeout(None if limit_s is None else limit_s + LIMIT_GRACE_S):
                async for attempt in stamina.retry_context(
                    on=self._pause_before_retry,
                    attempts=self.attempts,
                    timeout=limit_s,
                    wait_initial=FIRST_PAUSE_S,
                    wait_max=LONGEST_PAUSE_S,
                    wait_jitter=FIRST_PAUSE_S,
                ):
                    with attempt:
                        return await once()
        except TimeoutError:
            raise DeadlineExceeded(f"no answer from {self.base_url} within {limit_s:g} s") from None
        raise TransportError(f"no attempt at {self.base_url} was made")  # unreachable: the context runs at least once

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        limit_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One call whose answer has a 2xx status; leaving the block early closes the connection.

        Raises:
            RollplaneError: the server's typed error, TransportError, or DeadlineExceeded after `limit_s`.
        """
        url = self.base_url + path
        sent = dict(headers or {})
        if self._key is not None:
            sent["Authorization"] = f"Bearer {self._key}"
        timeout = aiohttp.ClientTimeout(
            total=None if limit_s is None else limit_s + LIMIT_GRACE_S,
            sock_connect=self._connect_timeout_s,
            sock_read=SILENCE_S if limit_s is None else None,
        )
        try:
            async with self._open_session().request(method, url, data=data, headers=sent, timeout=timeout) as answer:
                try:
                    if answer.status >= 300:
                        raise error_from_answer(answer.status, await answer.read(), answer.headers, url=url)
                    yield answer
                finally:
                    if not answer.content.is_eof():
                        answer.close()
        except (aiohttp.ClientError, OSError) as error:
            raise self._translate(error, limit_s=limit_s, url=url) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20)
        return self._session

    def _translate(self, error: Exception, *, limit_s: float | None, url: str) -> RollplaneError:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
            if limit_s is not None:
                return DeadlineExceeded(f"no answer from {url} within {limit_s:g} s")
            return TransportError(f"{url} was silent for {SILENCE_S:g} s")
        return TransportError(f"{url}: {type(error).__name__}{f': {error}' if str(error) else ''}")

    def _pause_before_retry(self, error: Exception) -> bool | float:
        """Whether to try again, or after how many seconds, as the server's Retry-After says."""
        if not isinstance(error, RollplaneError) or not self._mendable(error):
            return False
        return True if error.retry_after_s is None else error.retry_after_s


class Connected(Closing):
    """What the clients have in common: connections to one server, held as long as an `async with` block.

    Args:
        transport: the connections.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transport.base_url}>"

    async def close(self) -> None:
        """Close the connections; running calls end with TransportError. Idempotent."""
        await self._transport.close()
