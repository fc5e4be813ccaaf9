"""Several processes of one frontend behind one port, which act as one.

    process 0      the control owner: administration, the fleets' truth, the queue, the metrics page
    process 1..N   followers: they place requests by what the owner tells, and pass the rest on to it

Each listens on a socket of its own in a private directory too, where the others reach it (`server.crew_app`). Ids of live
requests are claimed in that directory (`engines.wrappers.claimed`). What the owner holds of a fleet is told by a long
poll whose next asking says that the last answer was taken; an administration call answers once every follower has.
"""

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import structlog

from rollplane.engines.base import Engine
from rollplane.engines.remote import RemoteEngine
from rollplane.engines.wrappers.claimed import Claims
from rollplane.errors import RollplaneError, TransportError, Unavailable
from rollplane.protocol.http import error_from_answer
from rollplane.rl.fleet import Fleet
from rollplane.rl.followed import FleetView, FollowedFleet, view_of

OWNER: Final = 0
VIEW_PATH: Final = "/internal/v1/fleets"
QUEUE_PATH: Final = "/internal/v1/queue/"
FLEET_PATH: Final = "/fleet/"
ABORT_ALL_PATH: Final = "/internal/v1/abort_all"
METRICS_PATH: Final = "/internal/v1/metrics/"
HOLD_S: Final = 1.0
"""How long the owner waits with an answer when there is nothing new."""
SETTLE_S: Final = 2.0
"""An administration call does not wait longer for a follower, which then is hung; workers refuse what is out of date."""
LOST_S: Final = 3.0
ASK_S: Final = 2.0
RETRY_S: Final = 0.1

log = structlog.get_logger("rollplane.crew")


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's fleets. `owner`: its life; `number` grows with every change."""

    owner: str
    number: int
    fleets: dict[str, FleetView]


_decoder = msgspec.msgpack.Decoder(Told)


class Crew:
    """The processes as one of them sees them.

    Args:
        directory: private to them.
        index: which one this is; 0 is the owner.
        count: how many there are.
    """

    def __init__(self, directory: Path, *, index: int, count: int) -> None:
        self.directory = directory
        self.index = index
        self.count = count
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._engines: dict[tuple[int, str], RemoteEngine] = {}

    def __repr__(self) -> str:
        return f"<Crew process {self.index} of {self.count}>"

    @property
    def owns(self) -> bool:
        """Whether this process is the control owner."""
        return self.index == OWNER

    @property
    def others(self) -> list[int]:
        """The other processes."""
        return [i for i in range(self.count) if i != self.index]

    def socket_of(self, index: int) -> Path:
        """Where a process listens for the others."""
        return self.directory / f"process-{index}.sock"

    def claims(self, fleet: str) -> Claims:
        """The ids of a fleet's live requests; those that an earlier life of this process left are dropped."""
        directory = self.directory / f"ids-{fleet}"
        directory.mkdir(exist_ok=True)
        claims = Claims(directory, process=self.index)
        claims.drop_all_of(self.index)
        return claims

    def session(self, index: int) -> aiohttp.ClientSession:
        """Connections to a process; its name is `http://process-<index>`."""
        if index not in self._sessions:
            connector = aiohttp.UnixConnector(str(self.socket_of(index)), limit=0)
            self._sessions[index] = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._sessions[index]

    def engine(self, index: int, fleet: str) -> Engine | None:
        """Another process as an engine of a fleet; None where nobody listens there."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self.socket_of(index)))
            except BlockingIOError:
                pass  # it listens, and has much to do
            except OSError:
                return None
        if (index, fleet) not in self._engines:
            url = f"http://process-{index}{FLEET_PATH}{fleet}"
            self._engines[index, fleet] = RemoteEngine(
                url, session=self.session(index), socket_path=str(self.socket_of(index))
            )
        return self._engines[index, fleet]

    async def ask(self, index: int, method: str, path: str, *, limit_s: float = ASK_S, **options: Any) -> bytes:
        """One short call to another process.

        Raises:
            TransportError: no answer. RollplaneError: its own.
        """
        url = f"http://process-{index}{path}"
        try:
            async with self.session(index).request(
                method, url, timeout=aiohttp.ClientTimeout(total=limit_s), **options
            ) as answer:
                content = await answer.read()
                if answer.status >= 300:
                    raise error_from_answer(answer.status, content, answer.headers, url=url)
                return content
        except (aiohttp.ClientError, OSError) as error:
            raise TransportError(f"process {index} of this server does not answer: {error!r}") from error

    async def close(self) -> None:
        """Drop the connections."""
        for session in self._sessions.values():
            await session.close()


class Teller:
    """The owner's end: what it holds of its fleets, and which follower has taken it."""

    def __init__(self, fleets: Mapping[str, Fleet]) -> None:
        self._fleets = fleets
        self._life = uuid.uuid4().hex
        self._number = 0
        self._views: dict[str, FleetView] = {}
        self._taken: dict[int, int] = {}
        self._heard_at: dict[int, float] = {}
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Teller number {self._number}, taken {self._taken}>"

    async def told(self, process: int, *, owner: str, after: int) -> bytes:
        """What a follower does not know yet, waited for; it has what it was told as `after`."""
        self._heard_at[process] = time.monotonic()
        known = after if owner == self._life else 0
        self._taken[process] = known
        self._tell()
        ends = time.monotonic() + HOLD_S
        while self._look() <= known and (left := ends - time.monotonic()) > 0:
            await self._change(left)
        self._heard_at[process] = time.monotonic()
        return msgspec.msgpack.encode(Told(owner=self._life, number=self._number, fleets=self._views))

    async def settled(self) -> None:
        """Return when every follower has what there is now; those that were not heard for a while are not waited for."""
        number, ends = self._look(), time.monotonic() + SETTLE_S
        while self._behind(number) and (left := ends - time.monotonic()) > 0:
            news = self._news
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await news.wait()

    def _behind(self, number: int) -> list[int]:
        since = time.monotonic() - LOST_S
        return [i for i, taken in self._taken.items() if taken < number and self._heard_at[i] > since]

    def _look(self) -> int:
        views = {name: view_of(fleet) for name, fleet in self._fleets.items()}
        if views != self._views:
            self._views, self._number = views, self._number + 1
            self._tell()
        return self._number

    async def _change(self, limit_s: float) -> None:
        events = [self._news, *(fleet.changed for fleet in self._fleets.values())]
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Follower:
    """A follower's end: keeps its fleets as the owner tells them."""

    def __init__(self, crew: Crew, fleets: Mapping[str, FollowedFleet]) -> None:
        self._crew = crew
        self._fleets = fleets
        self._owner, self._number = "", 0
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Follower at number {self._number} of {self._owner or 'nobody'}>"

    def start(self) -> None:
        """Follow in a task of its own."""
        self._task = asyncio.get_running_loop().create_task(self._follow(), name="follow the control owner")

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        heard = True
        while True:
            query = {"process": str(self._crew.index), "owner": self._owner, "after": str(self._number)}
            try:
                content = await self._crew.ask(OWNER, "GET", VIEW_PATH, limit_s=HOLD_S + ASK_S, params=query)
                told = _decoder.decode(content)
            except (RollplaneError, msgspec.MsgspecError) as error:
                if heard:
                    log.warning("owner_lost", reason=str(error))
                heard = False
                await asyncio.sleep(RETRY_S)
                continue
            if not heard:
                log.info("owner_heard", owner=told.owner)
            heard = True
            if (told.owner, told.number) != (self._owner, self._number):
                for name, view in told.fleets.items():
                    if name in self._fleets:
                        self._fleets[name].take(view)
                self._owner, self._number = told.owner, told.number


def owner_gone(error: RollplaneError) -> Unavailable:
    """What a caller hears while the owner is being started again."""
    return Unavailable(f"the process that administers this server is not there: {error.message}", retry_after_s=1.0)
