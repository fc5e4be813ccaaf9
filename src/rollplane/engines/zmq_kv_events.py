"""Follows vLLM's KV events on its ZMQ sockets: the published ones, and those missed by way of its replay socket.

Every published message is `[topic, sequence number as 8 bytes big-endian, payload]`. The replay socket takes
`["", first sequence number]` and answers `["", topic, number, payload]` for all it still has from there on, then number -1.
What can be neither heard nor replayed leaves the cache unknown: all of it is forgotten, and what follows is built on that.
"""

import asyncio
import contextlib
from typing import Final

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from rollplane.engines.kv_mirror import KvMirror
from rollplane.engines.vllm_kv_events import read_batch
from rollplane.errors import EngineProtocolError, InvalidRequest

log = structlog.get_logger("rollplane.engine")

REPLAY_TIMEOUT_S: Final = 10.0
RECEIVE_HIGH_WATER: Final = 100_000
_END: Final = -1


class ZmqKvEvents:
    """One publisher's events, into a mirror.

    Args:
        endpoint: the publisher's address as this side connects to it, such as `tcp://127.0.0.1:5557`.
        replay_endpoint: its replay socket's; None: what is missed is lost.
        topic: what it publishes under.
    """

    def __init__(
        self,
        mirror: KvMirror,
        *,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        self.mirror = mirror
        self.endpoint = connectable(endpoint)
        self.replay_endpoint = None if replay_endpoint is None else connectable(replay_endpoint)
        self.topic = topic
        self.replay_timeout_s = replay_timeout_s
        self.batches = 0
        self.replayed = 0
        """Batches that came by replay."""
        self.gaps = 0
        """Times that something was lost for good."""
        self._next = 0
        self._heard = _END
        """The last number that was published to us; numbers only grow while one process publishes."""
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"<ZmqKvEvents {self.endpoint} at {self._next}, {self.batches} batches, {self.replayed} replayed, "
            f"{self.gaps} gaps>"
        )

    def start(self) -> None:
        """Follow, in a task of its own. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow(), name=f"KV events of {self.endpoint}")

    async def close(self) -> None:
        """Stop, and end the mirror's feeds."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self.mirror.end()

    async def _follow(self) -> None:
        context = zmq.asyncio.Context()
        try:
            with context.socket(zmq.SUB) as published:
                published.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
                published.setsockopt(zmq.LINGER, 0)
                published.setsockopt_string(zmq.SUBSCRIBE, self.topic)
                monitor = published.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
                published.connect(self.endpoint)
                poller = zmq.asyncio.Poller()
                poller.register(published, zmq.POLLIN)
                poller.register(monitor, zmq.POLLIN)
                while True:
                    ready = dict(await poller.poll())
                    if monitor in ready:
                        event = parse_monitor_message(await monitor.recv_multipart())["event"]
                        await self._connection(context, up=event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
                    if published in ready:
                        await self._take(context, await published.recv_multipart())
        finally:
            context.destroy(linger=0)

    async def _connection(self, context: zmq.asyncio.Context, *, up: bool) -> None:
        """Connected: what was published before anyone listened. Disconnected: whoever comes back may be another process."""
        if up:
            await self._replay(context)
        else:
            self._lost("the connection ended")
            self._next, self._heard = 0, _END

    async def _take(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._lost(f"a message of {len(frames)} frames")
            return
        number = int.from_bytes(frames[1], "big", signed=True)
        if number <= self._heard:
            self._lost("its numbers began anew")
            self._next = 0
        self._heard = number
        if number > self._next:
            await self._replay(context)
        if number > self._next:
            self._lost(f"{number - self._next} batches")
            self._next = number
        if number == self._next:
            self._read(frames[2])
            self._next = number + 1
        # A number before the next one came by replay already.

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """Ask for everything from the next number on."""
        if self.replay_endpoint is None:
            return
        with context.socket(zmq.DEALER) as asked:
            asked.setsockopt(zmq.LINGER, 0)
            asked.connect(self.replay_endpoint)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.replay_timeout_s):
                    await asked.send_multipart([b"", self._next.to_bytes(8, "big")])
                    while True:
                        frames = await asked.recv_multipart()
                        number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) >= 3 else _END
                        if number == _END:
                            return
                        if number < self._next:
                            continue
                        if number > self._next:
                            self._lost(f"{number - self._next} batches, which are not kept any more")
                        self._read(frames[-1])
                        self.replayed += 1
                        self._next = number + 1

    def _read(self, payload: bytes) -> None:
        self.batches += 1
        try:
            events = read_batch(payload)
        except EngineProtocolError as error:
            self._lost(error.message)
            return
        self.mirror.take(events)

    def _lost(self, what: str) -> None:
        """The cache is unknown from here on; an empty mirror that lost nothing yet stays quiet."""
        if len(self.mirror) or self.batches:
            self.gaps += 1
            log.warning("kv_events_lost", endpoint=self.endpoint, what=what)
        self.mirror.clear()


def connectable(endpoint: str) -> str:
    """The address to connect to for one that a publisher binds: `*` and `0.0.0.0` are this machine.

    Raises:
        InvalidRequest: no ZMQ address over TCP, IPC or within the process.
    """
    kind, sign, rest = endpoint.partition("://")
    if not sign or kind not in ("tcp", "ipc", "inproc") or not rest:
        raise InvalidRequest(f"the KV event endpoint {endpoint!r} is no tcp://, ipc:// or inproc:// address")
    host, colon, port = rest.rpartition(":")
    if kind == "tcp" and colon and host in ("*", "0.0.0.0", "[::]"):
        return f"tcp://127.0.0.1:{port}"
    return endpoint
