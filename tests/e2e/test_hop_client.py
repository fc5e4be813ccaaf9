"""The internal hop's own HTTP client against servers that keep HTTP and servers that do not, on both event loops' transports."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from rollplane.engines.hop_client import HIGH_WATER_BYTES, MAX_HEAD_BYTES, HopConnection, HopPool
from rollplane.errors import TransportError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 2\r\n\r\nok"


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


@asynccontextmanager
async def pool_to(serve: Serve, *, path: str = "/hop", **headers: str) -> AsyncIterator[HopPool]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = HopPool(f"http://127.0.0.1:{port}/base", path, headers=headers, connect_timeout_s=5.0)
    try:
        yield pool
    finally:
        pool.close()
        server.close()


def answering(*answers: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await request_of(reader)
            writer.write(answer)
        await reader.read()

    return serve


async def asked(
    pool: HopPool, body: bytes = b"body", *, limit_s: float = 5.0, in_all: bool = False, **headers: str
) -> HopConnection:
    connection = pool.take() or await pool.open()
    connection.post(pool.head(length=len(body), headers=headers), body, limit_s=limit_s, in_all=in_all)
    return connection


async def test_a_request_says_what_every_request_says_and_what_is_its_own() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_of(reader))
        writer.write(OK)

    async with pool_to(serve, Accept="frames") as pool:
        injected = "a\r\nX-Evil: 1"
        connection = await asked(pool, b"12345", **{"X-Request-Id": "r1", "traceparent": injected})
        assert await connection.head() == 200
        assert await connection.read() == b"ok"
        assert connection.headers["content-type"] == "text/x"

    head, _, body = seen[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/hop HTTP/1.1"
    assert lines[1].startswith("Host: 127.0.0.1:")
    assert lines[2:] == ["Accept: frames", "X-Request-Id: r1", "Content-Length: 5"]
    assert body == b"12345"


async def test_a_connection_is_used_again_and_one_that_the_worker_closes_is_not() -> None:
    async with pool_to(answering(OK, OK)) as pool:
        first = await asked(pool)
        assert await first.rest() == b"ok"
        pool.give(first)
        assert repr(pool).endswith("1 idle>")
        second = await asked(pool)
        assert second is first
        assert await second.rest() == b"ok"
        pool.give(second)

    async with pool_to(answering(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) as pool:
        connection = await asked(pool)
        assert await connection.rest() == b"ok"
        pool.give(connection)
        assert pool.take() is None


async def test_an_answer_that_was_not_taken_whole_hangs_up() -> None:
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK[:-1])
        try:
            await reader.read()
        finally:
            left.set()

    async with pool_to(serve) as pool:
        connection = await asked(pool)
        assert await connection.read() == b"o"
        pool.give(connection)
        async with asyncio.timeout(5):
            await left.wait()
        assert pool.take() is None


async def test_chunks_and_interim_answers_are_read() -> None:
    chunked = b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with pool_to(answering(chunked)) as pool:
        connection = await asked(pool)
        assert await connection.head() == 200
        assert await connection.rest() == b"abcde"
        assert await connection.read() == b""
        assert connection.reusable


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", OSError, "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * (MAX_HEAD_BYTES + 1), TransportError, "head"),
    ],
)
async def test_what_is_no_answer_is_an_error(answer: bytes, error: type[Exception], says: str) -> None:
    async with pool_to(answering(answer)) as pool:
        connection = await asked(pool)
        with pytest.raises(error, match=says):
            await connection.head()
        assert connection.closed


@pytest.mark.parametrize("sent", [b"", OK[:20], OK[:-1]])
async def test_a_lost_connection_is_an_error_wherever_the_answer_is(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(sent)

    async with pool_to(serve) as pool:
        connection = await asked(pool)
        with pytest.raises(OSError, match="closed"):
            await connection.rest()


async def test_silence_and_a_deadline_are_time_outs() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1\r\na\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with pool_to(answering()) as pool:
        connection = await asked(pool, limit_s=0.05)
        with pytest.raises(TimeoutError):
            await connection.head()
    async with pool_to(drip) as pool:
        connection = await asked(pool, limit_s=0.3, in_all=True)
        with pytest.raises(TimeoutError):
            await connection.rest()


async def test_each_request_of_a_kept_connection_has_its_own_limit() -> None:
    async def slow_then_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(OK)
        await request_of(reader)
        await asyncio.sleep(0.3)
        writer.write(OK)
        await request_of(reader)
        await reader.read()

    async with pool_to(slow_then_silent) as pool:
        for limit_s in (0.1, 5.0):  # the timer of the first would end the second
            connection = await asked(pool, limit_s=limit_s)
            assert await connection.rest() == b"ok"
            pool.give(connection)
        last = await asked(pool, limit_s=0.05)
        assert last is connection
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await last.head()
        assert last.closed


async def test_dropping_ends_the_present_wait_and_every_later_one() -> None:
    async with pool_to(answering()) as pool:
        connection = await asked(pool)
        waiting = asyncio.create_task(connection.head())
        await asyncio.sleep(0)
        connection.drop("it was fenced")
        for wait in (waiting, connection.read()):
            with pytest.raises(TransportError, match="it was fenced"):
                await wait
        pool.give(connection)
        assert pool.take() is None


async def test_a_reader_who_takes_nothing_holds_the_worker_up() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n")
        for _ in range(1024):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    async with pool_to(flood) as pool:
        connection = await asked(pool)
        assert await connection.head() == 200
        still = 0
        while still < 5:  # until the socket is full
            before = sent
            await asyncio.sleep(0.05)
            still = still + 1 if sent == before else 0
        assert sent < 67108864
        first = await connection.read()
        assert HIGH_WATER_BYTES <= len(first) < 4 * HIGH_WATER_BYTES
        assert len(first) + len(await connection.rest()) == 67108864
        assert connection.ended


class Endless(asyncio.Transport):
    """A socket that always has more, until reading it is paused: uvloop reads one 32 times before anybody else has a turn."""

    reading = True

    def writelines(self, list_of_data: object) -> None: ...

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None: ...


async def test_no_more_is_read_than_a_reader_takes_who_was_woken_and_has_not_run_yet() -> None:
    connection, socket = HopConnection(asyncio.get_running_loop()), Endless()
    connection.connection_made(socket)
    connection.post(b"head", b"body", limit_s=5.0, in_all=True)
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n")
    assert await connection.head() == 200
    piece, taken = bytes(65536), 0
    for _ in range(3):
        reading = asyncio.ensure_future(connection.read())
        await asyncio.sleep(0)  # it waits
        assert socket.reading
        pieces = 0
        while socket.reading and pieces < 1000:
            connection.data_received(piece)
            pieces += 1
        assert pieces * len(piece) <= HIGH_WATER_BYTES + len(piece)
        taken += len(await reading)
        assert taken % len(piece) == 0
    connection.close()


async def test_idle_connections_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_to(answering(OK, OK)) as pool:
        connection = await asked(pool)
        await connection.rest()
        pool.give(connection)
        monkeypatch.setattr("rollplane.engines.hop_client.KEPT_IDLE_S", -1.0)
        assert pool.take() is None
        assert connection.closed


async def test_on_uvloop_as_on_asyncio() -> None:
    found: list[bytes] = []

    async def one() -> None:
        async with pool_to(answering(OK, OK)) as pool:
            for _ in range(2):
                connection = await asked(pool)
                found.append(await connection.rest())
                pool.give(connection)

    thread = threading.Thread(target=lambda: uvloop.run(one()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert found == [b"ok", b"ok"]
