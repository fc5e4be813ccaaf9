"""Bodies within limits, and work that ends with its caller."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollplane.errors import Cancelled, InvalidRequest, PayloadTooLarge, Unavailable, UnsupportedMedia
from rollplane.server.watch import read_body, run_unanswered, run_watched

Messages = list[dict[str, Any]]


def receiver(messages: Messages) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Gives the messages, then nothing more."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


HANG_UP = {"type": "http.disconnect"}


async def read(messages: Messages, *, limit: int = 10, timeout_s: float = 5.0, **headers: str) -> bytes:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await read_body(receiver(messages), limit_bytes=limit, headers=named, timeout_s=timeout_s)


async def test_a_body_is_its_parts_joined() -> None:
    assert await read([part(b"ab"), part(b""), part(b"cd", more=False)]) == b"abcd"


async def test_a_body_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    assert len(await read([part(b"x" * 10, more=False)])) == 10
    with pytest.raises(PayloadTooLarge, match="10 bytes"):
        await read([part(b"x" * 6), part(b"x" * 5)])


async def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(PayloadTooLarge, match="has 11 bytes, the limit is 10"):
        await read([], content_length="11")


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip", "Zstd"])
async def test_a_compressed_body_is_refused_unread(coding: str) -> None:
    with pytest.raises(UnsupportedMedia, match="is not read here") as refused:
        await read([], content_encoding=coding)
    assert refused.value.param == "Content-Encoding"
    assert await read([part(b"ab", more=False)], content_encoding="identity") == b"ab"


async def test_hanging_up_inside_the_body_is_seen() -> None:
    with pytest.raises(Cancelled):
        await read([part(b"x"), HANG_UP])


async def test_a_body_that_never_ends_is_given_up() -> None:
    with pytest.raises(Unavailable, match="did not arrive"):
        await read([part(b"x")], timeout_s=0.01)


Run = Callable[..., Awaitable[Any]]
EITHER = pytest.mark.parametrize("run", [run_watched, run_unanswered])


@EITHER
async def test_watched_work_gives_its_result_and_its_error(run: Run) -> None:
    async def good() -> int:
        return 7

    async def bad() -> int:
        raise InvalidRequest("no")

    assert await run(good(), receiver([])) == 7
    with pytest.raises(InvalidRequest):
        await run(bad(), receiver([]))


@EITHER
async def test_hanging_up_cancels_the_work_and_waits_for_its_clean_up(run: Run) -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(Cancelled):
        await run(work(), receiver([HANG_UP]))
    assert cleaned == [True]


@EITHER
async def test_cancelling_the_watcher_cancels_the_work(run: Run) -> None:
    started, cleaned = asyncio.Event(), []

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    watcher = asyncio.create_task(run(work(), receiver([])))
    await started.wait()
    watcher.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watcher
    assert cleaned == [True]


async def test_an_error_of_the_clean_up_is_not_the_callers_who_is_gone() -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise InvalidRequest("too late")

    with pytest.raises(Cancelled):
        await run_unanswered(work(), receiver([HANG_UP]))


class AtHand:
    """A caller's end of which all is known."""

    def __init__(self, body: bytes | None = None, *, gone: bool = False) -> None:
        self.body = body
        self.gone = gone
        self.hang_ups: set[Callable[[], Any]] = set()

    def take_body(self) -> bytes | None:
        return self.body


async def test_a_body_that_is_here_is_taken_within_the_limit() -> None:
    async def take(body: bytes | None, messages: Messages) -> bytes:
        return await read_body(receiver(messages), limit_bytes=4, headers={}, timeout_s=5.0, peer=AtHand(body))

    assert await take(b"abcd", []) == b"abcd"
    assert await take(None, [part(b"ab"), part(b"c", more=False)]) == b"abc"
    with pytest.raises(PayloadTooLarge, match="4 bytes"):
        await take(b"abcde", [])


async def test_a_caller_who_says_that_it_leaves_ends_the_work_and_one_who_is_gone_begins_none() -> None:
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    peer = AtHand()
    running = asyncio.create_task(run_unanswered(work(), receiver([]), peer=peer))
    await began.wait()
    for leave in peer.hang_ups:
        leave()
    with pytest.raises(Cancelled):
        await running
    assert not peer.hang_ups

    began.clear()
    with pytest.raises(Cancelled):
        await run_unanswered(work(), receiver([]), peer=AtHand(gone=True))
    assert not began.is_set()


async def test_work_that_ends_leaves_nobody_to_call() -> None:
    async def work() -> int:
        return 7

    peer = AtHand()
    assert await run_unanswered(work(), receiver([]), peer=peer) == 7
    assert not peer.hang_ups
