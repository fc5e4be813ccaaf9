"""An answer in pieces: written in order, its length said first, a reader that stops reading cut off."""

import asyncio
from typing import Any

import pytest

from rollplane.errors import TransportError
from rollplane.server.pieces import PiecesAnswer, send_pieces


async def receive() -> Any:
    raise AssertionError("nothing is read")


async def test_pieces_are_sent_in_order_and_the_last_one_ends_the_body() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answer = PiecesAnswer([b"ab", memoryview(b"cde"), b""], media_type="x/y", stall_s=1.0, headers={"a": "b"})
    assert repr(answer) == "<PiecesAnswer 3 pieces, 5 bytes>"
    await answer({}, receive, send)

    start, *rest = sent
    assert start["headers"] == [(b"content-length", b"5"), (b"content-type", b"x/y"), (b"a", b"b")]
    assert b"".join(message["body"] for message in rest) == b"abcde"
    assert [message["more_body"] for message in rest] == [True, True, False]


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TransportError, match=r"took nothing for 0\.01 s"):
        await send_pieces(send, [b"a"], stall_s=0.01, more=False)
