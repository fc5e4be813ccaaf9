"""What a connection may leave unsaid, on real sockets: heads without end, bodies without end, too many connections."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.e2e.server_support import GENERATE, Served, serving
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from rollplane.engines.mock.engine import MockEngine
from rollplane.server import connections, ops
from rollplane.worker import Worker

BODY = msgspec.json.encode({"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}})
HEAD = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
WHOLE = HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(served: Served) -> AsyncIterator[Streams]:
    url = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, dict[str, Any]]:
    """Status, head and JSON body of one answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return int(head.split()[1]), head.lower(), msgspec.json.decode(await reader.readexactly(length))


async def write_for_ever(writer: asyncio.StreamWriter, part: bytes) -> None:
    while True:
        writer.write(part)
        await writer.drain()


@pytest.mark.parametrize("sent", [b"", b"POST ", HEAD, b"\r\n", b"GET /health HTTP/1.1\r\nA: b"])
async def test_a_head_that_does_not_come_is_a_408_and_the_end(sent: bytes) -> None:
    async with serving(Worker(MockEngine()), head_timeout_s=0.2) as served, connected(served) as (reader, writer):
        writer.write(sent)
        status, head, tree = await answer(reader)
        assert (status, tree["error"]["code"]) == (408, "head_timeout")
        assert b"connection: close" in head
        assert "within 0.2 s" in tree["error"]["message"]
        assert await reader.read() == b""


async def test_bytes_now_and_then_do_not_prolong_a_head() -> None:
    async with serving(Worker(MockEngine()), head_timeout_s=0.3) as served, connected(served) as (reader, writer):

        async def trickle() -> None:
            for byte in HEAD * 100:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert (await answer(reader))[0] == 408
        trickling.cancel()


async def test_the_second_head_of_a_connection_is_bounded_too_but_not_its_silence() -> None:
    async with serving(Worker(MockEngine()), head_timeout_s=0.5) as served, connected(served) as (reader, writer):
        for _ in range(2):
            writer.write(WHOLE)
            assert (await answer(reader))[0] == 200
            with pytest.raises(TimeoutError):  # idle for longer than a head may take, and still open
                async with asyncio.timeout(0.7):
                    await reader.read(1)
        writer.write(b"POST ")
        assert (await answer(reader))[0] == 408


async def test_a_connection_is_closed_when_it_was_idle_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "KEEP_ALIVE_S", 1)
    async with serving(Worker(MockEngine())) as served, connected(served) as (reader, writer):
        began = asyncio.get_running_loop().time()
        for pause_s in (0.6, 0.6, 0.0):  # the timer of the first answer would end the third request
            writer.write(WHOLE)
            assert (await answer(reader))[0] == 200
            await asyncio.sleep(pause_s)
        assert await reader.read() == b""
        assert asyncio.get_running_loop().time() - began >= 2.2


async def test_an_answered_request_is_not_left_to_the_garbage_collector() -> None:
    async with serving(Worker(MockEngine())) as served, connected(served) as (reader, writer):
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                writer.write(WHOLE)
                assert (await answer(reader))[0] == 200
            await asyncio.sleep(0)
            assert sum(type(one) is RequestResponseCycle for one in gc.get_objects()) <= 1
        finally:
            gc.enable()


async def test_a_slow_body_is_not_a_slow_head() -> None:
    async with serving(Worker(MockEngine()), head_timeout_s=0.5) as served, connected(served) as (reader, writer):
        writer.write(WHOLE[:-4])
        await writer.drain()
        await asyncio.sleep(1.0)  # twice what a head may take
        writer.write(WHOLE[-4:])
        assert (await answer(reader))[0] == 200


async def test_a_head_without_end_is_a_431() -> None:
    async with serving(Worker(MockEngine())) as served, connected(served) as (reader, writer):
        writer.write(HEAD)
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            for number in range(64):
                writer.write(f"X-{number}: {'x' * 32_768}\r\n".encode())
                await writer.drain()
        status, _, tree = await answer(reader)
        assert (status, tree["error"]["code"]) == (431, "head_too_large")


async def test_what_is_no_http_is_a_400_in_the_shape_of_every_error() -> None:
    async with serving(Worker(MockEngine())) as served, connected(served) as (reader, writer):
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        status, _, tree = await answer(reader)
        assert (status, tree["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("framing", ["chunked", "declared"])
async def test_a_body_without_end_is_read_no_further_after_its_413(
    framing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REST_S", 60.0)
    async with serving(Worker(MockEngine()), max_body_bytes=1024) as served, connected(served) as (reader, writer):
        part = b"x" * 65_536
        if framing == "chunked":
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            part = f"{len(part):x}\r\n".encode() + part + b"\r\n"
        else:
            writer.write(HEAD + b"Content-Length: 1000000000000\r\n\r\n")
        writer.write(part)
        status, _, tree = await answer(reader)
        assert (status, tree["error"]["code"]) == (413, "payload_too_large")
        with pytest.raises(ConnectionError):
            await write_for_ever(writer, part)


async def test_a_body_that_stops_coming_after_its_413_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REST_S", 0.1)
    async with serving(Worker(MockEngine()), max_body_bytes=16) as served, connected(served) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 100\r\n\r\n")
        assert (await answer(reader))[0] == 413
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


async def test_a_connection_whose_refused_body_came_whole_is_used_again() -> None:
    async with serving(Worker(MockEngine()), max_body_bytes=len(BODY)) as served, connected(served) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n" + b"x" * 1000)
        assert (await answer(reader))[0] == 413
        writer.write(WHOLE)
        assert (await answer(reader))[0] == 200


async def test_requests_of_connections_above_the_limit_are_told_so_and_others_go_on() -> None:
    async with serving(Worker(MockEngine()), max_connections=1) as served, connected(served) as (reader, writer):
        writer.write(WHOLE)
        assert (await answer(reader))[0] == 200
        async with connected(served) as (second_reader, second_writer):
            second_writer.write(WHOLE)
            status, head, tree = await answer(second_reader)
            assert (status, tree["error"]["code"]) == (503, "unavailable")
            assert "limit of 1 connections (server.max_connections)" in tree["error"]["message"]
            assert b"retry-after: 1" in head
            assert await second_reader.read() == b""
        writer.write(WHOLE)
        assert (await answer(reader))[0] == 200


async def test_connections_far_above_the_limit_are_closed_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REFUSALS", 0)
    async with serving(Worker(MockEngine()), max_connections=1) as served, connected(served) as (reader, writer):
        writer.write(WHOLE)
        assert (await answer(reader))[0] == 200
        async with connected(served) as (second_reader, _):
            with contextlib.suppress(ConnectionResetError):
                assert await second_reader.read() == b""


async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with serving(Worker(MockEngine()), head_timeout_s=5.0) as served, connected(served) as (reader, writer):
        writer.write(WHOLE * 3)
        assert [(await answer(reader))[0] for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize("says", ["1.1 close", "1.1 keep-alive", "1.0"])
async def test_an_answer_says_its_length_its_request_and_what_becomes_of_its_connection(says: str) -> None:
    version, _, connection = says.partition(" ")
    asked = WHOLE.replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    if connection:
        asked = asked.replace(b"Host:", f"Connection: {connection}\r\nX-Request-Id: r-7\r\nHost:".encode())
    async with serving(Worker(MockEngine())) as served, connected(served) as (reader, writer):
        writer.write(asked)
        status, head, body = await answer(reader)
        assert (status, len(body["choices"][0]["token_ids"])) == (200, 2)
        assert f"x-request-id: {body['request_id']}".encode() in head
        assert b"content-type: application/json" in head
        assert b"date: " in head
        assert (b"connection: close" in head) == (connection != "keep-alive")
        if connection == "keep-alive":
            writer.write(asked)
            assert (await answer(reader))[0] == 200
        else:
            assert await reader.read() == b""
