"""vLLM's KV event wire on real sockets: a publisher with a replay buffer, as vLLM has one, and what is missed on the way."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import zmq
import zmq.asyncio

from rollplane.engines.kv_mirror import KvMirror
from rollplane.engines.zmq_kv_events import ZmqKvEvents, connectable
from rollplane.errors import InvalidRequest

WAIT_S = 20.0
MARK = 1_000_000
"""The block of what is published until the subscription is heard of; how many such batches come, and when, is left open."""


class Publisher:
    """A PUB socket and a ROUTER socket that answers `["", first number]`; `keep` batches can be asked for again."""

    def __init__(self, port: int = 0, replay_port: int = 0, *, keep: int = 100) -> None:
        self.context = zmq.asyncio.Context()
        self.published = self.context.socket(zmq.PUB)
        self.asked = self.context.socket(zmq.ROUTER)
        self.port = self._bind(self.published, port)
        self.replay_port = self._bind(self.asked, replay_port)
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self.number = 0
        self._task = asyncio.create_task(self._answer())

    @staticmethod
    def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
        if port:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return port
        return socket.bind_to_random_port("tcp://127.0.0.1")

    async def publish(self, block: int, *, heard: bool = True) -> None:
        """One batch with one block of that name; `heard` False: it is lost on the way."""
        event = {
            "type": "BlockStored",
            "block_hashes": [block],
            "parent_block_hash": None,
            "token_ids": [block] * 4,
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        payload = msgspec.msgpack.encode([0.0, [event]])
        self.kept.append((self.number, payload))
        if heard:
            await self.published.send_multipart([b"kv", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    async def _answer(self) -> None:
        while True:
            who, _, first = await self.asked.recv_multipart()
            for number, payload in list(self.kept):
                if number >= int.from_bytes(first, "big"):
                    await self.asked.send_multipart([who, b"", b"kv", number.to_bytes(8, "big"), payload])
            await self.asked.send_multipart([who, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.context.destroy(linger=0)


class Followed:
    def __init__(self, publisher: Publisher, events: ZmqKvEvents) -> None:
        self.publisher = publisher
        self.events = events
        self.mirror = events.mirror
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._watch())

    @property
    def blocks(self) -> list[int]:
        return sorted(block for block in self.mirror._blocks if block != MARK)

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once the condition holds; it is looked at after every change of the mirror."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def listening(self) -> None:
        """The subscription has reached the publisher: what it sends now is heard."""
        async with asyncio.timeout(WAIT_S):
            while self.events._heard < 0:
                self._changed.clear()
                await self.publisher.publish(MARK)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.2)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        async for _ in self.mirror.feed():
            self._changed.set()


@contextlib.asynccontextmanager
async def following(*, keep: int = 100, replay: bool = True, before: int = 0) -> AsyncIterator[Followed]:
    publisher = Publisher(keep=keep)
    for block in range(before):
        await publisher.publish(block)
    events = ZmqKvEvents(
        KvMirror(),
        endpoint=f"tcp://*:{publisher.port}",
        replay_endpoint=f"tcp://*:{publisher.replay_port}" if replay else None,
        topic="kv",
        replay_timeout_s=2.0,
    )
    followed = Followed(publisher, events)
    events.start()
    try:
        yield followed
    finally:
        await events.close()
        await followed.close()
        await followed.publisher.close()


async def test_what_was_published_before_anyone_listened_is_replayed_and_then_heard() -> None:
    async with following(before=5) as followed:
        await followed.until(lambda: followed.blocks == [0, 1, 2, 3, 4])
        assert followed.events.replayed == 5
        await followed.listening()
        for block in (10, 11):
            await followed.publisher.publish(block)
        await followed.until(lambda: followed.blocks == [0, 1, 2, 3, 4, 10, 11])
        assert followed.events.gaps == 0


async def test_batches_that_were_missed_are_replayed_in_order_and_none_is_lost() -> None:
    async with following() as followed:
        await followed.listening()
        await followed.publisher.publish(1)
        for block in (2, 3, 4):
            await followed.publisher.publish(block, heard=False)
        await followed.publisher.publish(5)
        await followed.until(lambda: followed.blocks == [1, 2, 3, 4, 5])
        assert followed.events.gaps == 0
        assert followed.events.replayed >= 3


async def test_what_cannot_be_replayed_any_more_leaves_nothing_that_may_be_wrong() -> None:
    async with following(keep=2) as followed:
        await followed.listening()
        await followed.publisher.publish(1)
        for block in (2, 3, 4):
            await followed.publisher.publish(block, heard=False)
        await followed.publisher.publish(5)
        await followed.until(lambda: followed.blocks == [4, 5])
        assert followed.events.gaps == 1


async def test_without_a_replay_socket_a_gap_forgets_what_was_known() -> None:
    async with following(replay=False) as followed:
        await followed.listening()
        gaps = followed.events.gaps
        await followed.publisher.publish(1)
        await followed.publisher.publish(2, heard=False)
        await followed.publisher.publish(3)
        await followed.until(lambda: followed.blocks == [3])
        assert followed.events.gaps == gaps + 1


async def test_another_process_on_the_same_address_begins_with_an_empty_cache() -> None:
    async with following() as followed:
        await followed.listening()
        for block in range(5):
            await followed.publisher.publish(block)
        await followed.until(lambda: followed.blocks == [0, 1, 2, 3, 4])
        old = followed.publisher
        await old.close()
        await followed.until(lambda: not followed.blocks)
        followed.publisher = Publisher(old.port, old.replay_port)
        # More than the first one had: numbers alone would not tell them apart.
        for block in range(100, 100 + old.number + 3):
            await followed.publisher.publish(block)
        await followed.until(lambda: followed.blocks == list(range(100, 100 + old.number + 3)))


async def test_a_batch_that_cannot_be_read_forgets_what_was_known_and_the_next_one_counts_again() -> None:
    async with following() as followed:
        await followed.listening()
        await followed.publisher.publish(1)
        await followed.until(lambda: followed.blocks == [1])
        number = followed.publisher.number
        await followed.publisher.published.send_multipart([b"kv", number.to_bytes(8, "big"), b"\xc1"])
        followed.publisher.number += 1
        await followed.until(lambda: followed.blocks == [])
        await followed.publisher.publish(2)
        await followed.until(lambda: followed.blocks == [2])


@pytest.mark.parametrize(
    ("given", "reached"),
    [
        ("tcp://*:9110", "tcp://127.0.0.1:9110"),
        ("tcp://0.0.0.0:9110", "tcp://127.0.0.1:9110"),
        ("tcp://10.0.0.7:9110", "tcp://10.0.0.7:9110"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv"),
    ],
)
def test_an_address_to_bind_becomes_one_to_connect_to(given: str, reached: str) -> None:
    assert connectable(given) == reached


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'http://x' is no tcp"):
        connectable("http://x")
