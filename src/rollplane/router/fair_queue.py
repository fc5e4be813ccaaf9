"""Requests wait here once a fleet has as many as it may: fair between classes of traffic and between callers.

Without limits nothing waits and nothing is refused. With `max_running` the rest waits; only what is over `max_waiting` is
refused, with 429 and when to come back. Whose turn it is when room is made: the class that got the least for its share
(weighted fair queueing over sequences); in a class the lower `priority`, then who came first; a caller that is at its own
limit is passed over. Also what waits for a fleet's first worker counts as waiting here.
"""

import asyncio
import bisect
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Final

import msgspec

from rollplane.errors import DeadlineExceeded, Overloaded
from rollplane.protocol.request import GenerateRequest, RequestHead
from rollplane.router.queue_counts import QueueCounts, QueueReport, Who, Why

DEFAULT_CLASS: Final = "train"
MAX_CLASSES: Final = 64
"""Names of classes that are told apart; further ones count as the default class."""
WEIGHT: Final = 0.1
"""Of the newest pause between two ends in its moving mean."""
SHORTEST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0
CALLER_CHARS: Final = 8
"""Of a caller's name in metrics: as many as the audit log shows of a key's digest."""


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`max_running`: sequences that the fleet has at once. `max_running_per_key`: of one caller. `max_waiting`: requests that
    wait, `max_waiting_per_key`: of one caller. `shares`: a class's weight, 1 where it is not named. None: no limit.
    """

    max_running: int | None = None
    max_running_per_key: int | None = None
    max_waiting: int | None = None
    max_waiting_per_key: int | None = None
    shares: Mapping[str, float] = {}


LIMITS: Final = ("max_running", "max_running_per_key", "max_waiting", "max_waiting_per_key")


class Waiter:
    """A request in the queue, or past it."""

    __slots__ = ("caller", "model", "sequences", "started", "traffic", "turn")

    def __init__(self, sequences: int, *, traffic: str, caller: str | None, model: str | None = None) -> None:
        self.sequences = sequences
        self.traffic = traffic
        self.caller = caller
        self.model = model
        self.started = False
        self.turn: asyncio.Event | None = None
        """Set when it starts, of one that has to wait."""

    @property
    def who(self) -> Who:
        """What metrics tell it by."""
        return Who(traffic=self.traffic, model=self.model or "", caller=(self.caller or "")[:CALLER_CHARS])


class FairQueue:
    """The queue in front of one fleet.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, settings: QueueSettings | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings or QueueSettings()
        self.running = 0
        """Sequences that were let in and have not ended."""
        self.counts = QueueCounts()
        self._outside: list[Waiter] = []
        """Requests that wait for something else than room."""
        self._of_caller: Counter[str | None] = Counter()
        self._waiting_of_caller: Counter[str | None] = Counter()
        self._waiting: dict[str, list[tuple[int, int, Waiter]]] = {}
        self._served: dict[str, float] = {}
        """Sequences over share, by class: virtual time."""
        self._arrivals = itertools.count()
        self._clock = clock
        self._ended_at: float | None = None
        self._pause_s = 0.0

    def __repr__(self) -> str:
        return f"<FairQueue {self.running} running, {dict(self.waiting)} waiting, {self.refused} refused>"

    @property
    def refused(self) -> int:
        """Requests that were over a limit of those that wait."""
        return self.counts.refused

    @property
    def waiting(self) -> dict[str, int]:
        """Requests that wait, by class."""
        found = Counter({name: len(line) for name, line in self._waiting.items() if line})
        found.update(waiter.traffic for waiter in self._outside)
        return dict(found)

    def report(self, fleet: str) -> QueueReport:
        """The queue as metrics show it."""
        limits = {name: getattr(self.settings, name) for name in LIMITS}
        lines = [waiter for line in self._waiting.values() for _, _, waiter in line]
        return QueueReport(
            fleet=fleet,
            running=self.running,
            limits={name: limit for name, limit in limits.items() if limit is not None},
            waiting=dict(Counter(waiter.who for waiter in [*lines, *self._outside])),
            turned_away=dict(self.counts.turned_away),
            waited=dict(self.counts.waited),
        )

    @contextlib.contextmanager
    def outside(self, head: RequestHead) -> Generator[None, None, None]:
        """Counts a request as waiting while the block lasts, which waits for something else than room.

        Raises:
            Overloaded: too many wait already.
        """
        waiter = Waiter(1, traffic=self._class_of(head.traffic_class), caller=head.caller, model=head.model)
        self._check_waiting(waiter)
        self._outside.append(waiter)
        self._waiting_of_caller[head.caller] += 1
        try:
            yield
        except DeadlineExceeded:
            self.counts.turn_away(waiter.who, "deadline")
            raise
        finally:
            self._outside.remove(waiter)
            self._no_longer_waits(head.caller)

    async def enter(self, request: GenerateRequest, *, ends: float | None, woken: asyncio.Event) -> Waiter | None:
        """Wait for room; what `leave` takes back. None: `woken` was set first.

        Args:
            ends: monotonic seconds, after which it is too late.

        Raises:
            Overloaded: too many wait already.
            DeadlineExceeded: there was no room in time.
        """
        waiter = self._waiter(request)
        name = waiter.traffic
        if not any(self._waiting.values()) and self._has_room(waiter):
            self._start(waiter)
            self.counts.waited_s(name, 0.0)
            return waiter
        self._check_waiting(waiter)
        if not self._waiting.get(name):
            # A class that was idle has no claim on what it did not use.
            busy = [self._served.get(other, 0.0) for other, found in self._waiting.items() if found]
            self._served[name] = max(self._served.get(name, 0.0), min(busy, default=0.0))
        entry = (request.priority, next(self._arrivals), waiter)
        bisect.insort(self._waiting.setdefault(name, []), entry)
        self._waiting_of_caller[waiter.caller] += 1
        turn = waiter.turn = asyncio.Event()
        arrived = self._clock()
        self._start_next()
        try:
            await self._either(turn, woken, ends=ends)
        except asyncio.CancelledError:
            if waiter.started:
                self.leave(waiter)  # let in at the same moment
            raise
        finally:
            if not waiter.started:
                self._waiting[name].remove(entry)
            self._no_longer_waits(waiter.caller)
            self.counts.waited_s(name, self._clock() - arrived)
        if waiter.started:
            return waiter
        if woken.is_set():
            return None
        self.counts.turn_away(waiter.who, "deadline")
        raise DeadlineExceeded(
            "the request waited for room in the fleet until its deadline", param="rollplane.deadline_s"
        )

    def let_in(self, request: GenerateRequest) -> Waiter:
        """Count a request that runs already, whatever the limits say; what `leave` takes back."""
        waiter = self._waiter(request)
        self._start(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """The request has ended, in whatever way; the next ones start."""
        self.running -= waiter.sequences
        self._of_caller[waiter.caller] -= waiter.sequences
        if not self._of_caller[waiter.caller]:
            del self._of_caller[waiter.caller]
        now = self._clock()
        if self._ended_at is not None:
            self._pause_s += (now - self._ended_at - self._pause_s) * WEIGHT
        self._ended_at = now
        self._start_next()

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _waiter(self, request: GenerateRequest) -> Waiter:
        traffic = self._class_of(request.options.traffic_class)
        return Waiter(request.sampling.choices, traffic=traffic, caller=request.caller, model=request.model)

    def _class_of(self, traffic: str | None) -> str:
        name = traffic or DEFAULT_CLASS
        return name if name in self._served or len(self._served) < MAX_CLASSES else DEFAULT_CLASS

    def _no_longer_waits(self, caller: str | None) -> None:
        self._waiting_of_caller[caller] -= 1
        if not self._waiting_of_caller[caller]:
            del self._waiting_of_caller[caller]

    def _has_room(self, waiter: Waiter) -> bool:
        """A request larger than a limit runs alone rather than never."""
        total, own = self.settings.max_running, self.settings.max_running_per_key
        if total is not None and self.running and self.running + waiter.sequences > total:
            return False
        mine = self._of_caller[waiter.caller] if own is not None else 0
        return own is None or not mine or mine + waiter.sequences <= own

    def _check_waiting(self, waiter: Waiter) -> None:
        settings = self.settings
        count = sum(self.waiting.values())
        mine = self._waiting_of_caller[waiter.caller]
        limits: tuple[tuple[int | None, int, str, Why], ...] = (
            (settings.max_waiting, count, "requests", "full"),
            (settings.max_waiting_per_key, mine, "requests of this key", "key_full"),
        )
        for limit, there, whose, why in limits:
            if limit is not None and there >= limit:
                self.counts.turn_away(waiter.who, why)
                wait_s = min(max((there + 1) * self._pause_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
                raise Overloaded(f"{there} {whose} wait already, the limit is {limit}", retry_after_s=round(wait_s, 1))

    def _start(self, waiter: Waiter) -> None:
        self.running += waiter.sequences
        self._of_caller[waiter.caller] += waiter.sequences
        share = self.settings.shares.get(waiter.traffic, 1.0)
        self._served[waiter.traffic] = self._served.get(waiter.traffic, 0.0) + waiter.sequences / share
        waiter.started = True
        if waiter.turn is not None:
            waiter.turn.set()

    def _start_next(self) -> None:
        while self._waiting and (found := self._next()) is not None:
            name, at = found
            _, _, waiter = self._waiting[name].pop(at)
            self._start(waiter)

    def _next(self) -> tuple[str, int] | None:
        """The class whose turn it is, and which of its requests; None where nothing may start."""
        for name in sorted((n for n, found in self._waiting.items() if found), key=lambda n: self._served.get(n, 0.0)):
            for at, (_, _, waiter) in enumerate(self._waiting[name]):
                if self._has_room(waiter):
                    return name, at
                if self._is_full(waiter):
                    return None  # smaller requests of others do not overtake: it would wait for ever
        return None

    def _is_full(self, waiter: Waiter) -> bool:
        total = self.settings.max_running
        return total is not None and self.running > 0 and self.running + waiter.sequences > total

    @staticmethod
    async def _either(started: asyncio.Event, woken: asyncio.Event, *, ends: float | None) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (started, woken)]
        try:
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
