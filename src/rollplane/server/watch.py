"""Runs work for a caller and stops it when the caller hangs up.

Servers that announce ASGI 2.3 do not raise when a send has nobody to go to, so a disconnect is only ever seen by
waiting for it.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from rollplane.errors import Cancelled, PayloadTooLarge, Unavailable, UnsupportedMedia
from rollplane.server.peer import Peer

T = TypeVar("T")


async def read_body(
    receive: Receive, *, limit_bytes: int, headers: Mapping[str, str], timeout_s: float, peer: Peer | None = None
) -> bytes:
    """The request's whole body.

    Args:
        limit_bytes: largest body; a declared Content-Length over it is refused before anything is read.
        headers: the request's; a Content-Encoding is refused, since a small body could unpack to any size.
        timeout_s: longest time for all of it to arrive.
        peer: the caller's end, where it is known: a body that is here already takes no wait.

    Raises:
        PayloadTooLarge: the message says the limit. UnsupportedMedia: the body is compressed.
        Cancelled: the caller went away.
        Unavailable: it did not arrive in time.
    """
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        raise UnsupportedMedia(
            f"Content-Encoding {coding[:64]!r} is not read here; send the body as it is", param="Content-Encoding"
        )
    declared = headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise PayloadTooLarge(f"the body has {int(declared)} bytes, the limit is {limit_bytes}")
    whole = None if peer is None else peer.take_body()
    if whole is not None:
        if len(whole) > limit_bytes:
            raise PayloadTooLarge(f"the body is larger than the limit of {limit_bytes} bytes")
        return whole
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the caller went away while it sent its request")
                part = message.get("body", b"")
                size += len(part)
                if size > limit_bytes:
                    raise PayloadTooLarge(f"the body is larger than the limit of {limit_bytes} bytes")
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise Unavailable(f"the request's body did not arrive within {timeout_s:g} s") from None


async def hung_up(receive: Receive) -> None:
    """Returns once the caller is gone (or has its whole answer)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_watched(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`, which is cancelled at once when the caller hangs up; its clean-up is waited for.

    Raises:
        Cancelled: the caller hung up first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the caller hung up")
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
        with contextlib.suppress(asyncio.CancelledError):
            await gone


async def run_unanswered(work: Coroutine[Any, Any, T], receive: Receive, *, peer: Peer | None = None) -> T:
    """As `run_watched`, for work that sends nothing itself: what it makes is sent later.

    Such work may run in the present task: one of its own, and a wait for either, cost a small request a tenth of its
    time. Work that sends its answer would be cancelled by its own last byte, which ends the wait for a hang-up too.

    Args:
        peer: the caller's end, where it is known: it tells of the hang-up itself. None: a task waits for it.

    Raises:
        Cancelled: the caller hung up first.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("there is no task to run this in")
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        task.cancel()

    gone: asyncio.Future[None] | None = None
    if peer is None:
        gone = asyncio.ensure_future(_tell_hang_up(receive, leave))
    elif peer.gone:
        work.close()
        raise Cancelled("the caller hung up")
    else:
        peer.hang_ups.add(leave)
    try:
        return await work
    except BaseException as error:
        if left and task.uncancel() == 0 and isinstance(error, asyncio.CancelledError | Exception):
            raise Cancelled("the caller hung up") from None
        raise
    finally:
        if peer is not None:
            peer.hang_ups.discard(leave)
        if gone is not None:
            gone.cancel()


async def _tell_hang_up(receive: Receive, tell: Callable[[], None]) -> None:
    await hung_up(receive)
    tell()


class WatchedAnswer(ABC):
    """An ASGI answer that is sent until it ends or its reader leaves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a reader that leaves ends it."""
        with contextlib.suppress(Cancelled):
            await run_watched(self.send_all(send), receive)

    @abstractmethod
    async def send_all(self, send: Send) -> None:
        """Send the whole answer, head and body."""
