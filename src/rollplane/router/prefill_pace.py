"""Sends a worker only as much uncached prompt at a time as keeps it busy, so that what is cached already need not queue.

An engine computes prompts one after the other. A sibling whose prefix is cached would wait behind every long prompt that
was sent before it; held back here, the long prompts wait instead, for as long as they would have waited there. Only for
workers that say KV events: they tell when a prompt is computed.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

import msgspec

STUCK_S: Final = 2.0
"""A worker that reports nothing of what it was sent for so long is paced no longer: it gets all that waits."""


class PaceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`window_tokens`: uncached prompt tokens at a worker, over which more of them wait; 0 paces nothing. `small_tokens`: a
    request with no more to compute never waits.
    """

    window_tokens: int = 8192
    small_tokens: int = 512


class Ticket:
    """One request's blocks that its worker still has to compute: chained keys, the first unreported one first.

    `sent`: it may go. `gone`: it was given back.
    """

    __slots__ = ("_woken", "gone", "keys", "sent")

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys = keys
        self.sent = False
        self.gone = False
        self._woken = asyncio.Event()

    def send(self) -> None:
        """It may go."""
        self.sent = True
        self._woken.set()

    def wake(self) -> None:
        """Whoever waits for it has to look at something else."""
        self._woken.set()

    async def woken(self) -> bool:
        """Wait for either of the two; False after `STUCK_S` without."""
        try:
            async with asyncio.timeout(STUCK_S):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True


class _Line:
    """One worker: blocks that were sent to it and not reported, and requests that wait, in order.

    `by_first`: those that wait, by their first key: who shares any block with another shares that one.
    """

    __slots__ = ("by_first", "held", "moved_at", "outstanding")

    def __init__(self, now: float) -> None:
        self.outstanding: dict[int, Ticket] = {}
        self.held: dict[Ticket, None] = {}
        self.by_first: dict[int, dict[Ticket, None]] = {}
        self.moved_at = now

    def missing(self, ticket: Ticket) -> int:
        """How many of its blocks nobody computes yet."""
        keys = ticket.keys
        return len(keys) - sum(map(self.outstanding.__contains__, keys))

    def hold(self, ticket: Ticket) -> None:
        """Let it wait."""
        self.held[ticket] = None
        self.by_first.setdefault(ticket.keys[0], {})[ticket] = None

    def unhold(self, ticket: Ticket) -> None:
        """It waits no longer."""
        if self.held.pop(ticket, ...) is None:
            first = ticket.keys[0]
            kin = self.by_first[first]
            del kin[ticket]
            if not kin:
                del self.by_first[first]

    def send(self, ticket: Ticket) -> None:
        """It may go; what nobody else computes of it is its own."""
        outstanding = self.outstanding
        if outstanding.keys().isdisjoint(ticket.keys):
            outstanding.update(dict.fromkeys(ticket.keys, ticket))
        else:
            outstanding.update({key: ticket for key in ticket.keys if key not in outstanding})
        ticket.send()


class PrefillPace:
    """The pace of all workers.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, settings: PaceSettings | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings or PaceSettings()
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    def __repr__(self) -> str:
        return f"<PrefillPace {sum(len(line.held) for line in self._lines.values())} held>"

    def ask(self, worker: str, keys: Sequence[int], *, block_tokens: int) -> Ticket:
        """A request for a worker, with the blocks that it has not reported; `Ticket.sent` says when it may go."""
        line = self._lines.get(worker)
        if line is None:
            line = self._lines[worker] = _Line(self._clock())
        ticket = Ticket(keys)
        if not line.held and not line.outstanding:
            line.moved_at = self._clock()
        if self._is_full(line, block_tokens) and not self._is_small(line, ticket, block_tokens):
            line.hold(ticket)
        else:
            line.send(ticket)
        return ticket

    async def wait(self, worker: str, ticket: Ticket, *, block_tokens: int) -> None:
        """Return once the ticket may go, or was woken."""
        line = self._lines.get(worker)
        while line is not None and not ticket.sent:
            if await ticket.woken():
                return
            if self._clock() - line.moved_at >= STUCK_S:
                line.outstanding.clear()
                line.moved_at = self._clock()
                self._release(line, block_tokens)

    def learned(self, worker: str, reported: Callable[[Iterable[int]], Collection[int]], *, block_tokens: int) -> None:
        """A worker has said what it caches; `reported` gives those of some keys that it has."""
        line = self._lines.get(worker)
        if line is None or not line.outstanding:
            return
        found = reported(line.outstanding)
        for key in found:
            del line.outstanding[key]
        if found:
            line.moved_at = self._clock()
            self._release(line, block_tokens)

    def done(self, worker: str, ticket: Ticket, *, block_tokens: int) -> None:
        """The request has ended, or goes elsewhere: what it had to compute is waited for no longer."""
        line = self._lines.get(worker)
        if line is None or ticket.gone:
            return
        ticket.gone = True
        line.unhold(ticket)
        outstanding = line.outstanding
        if outstanding:
            for key in ticket.keys:
                if outstanding.get(key) is ticket:
                    del outstanding[key]
            self._release(line, block_tokens)
        if not line.held and not outstanding:
            del self._lines[worker]

    def _is_full(self, line: _Line, block_tokens: int) -> bool:
        window = self.settings.window_tokens
        return bool(window) and len(line.outstanding) * block_tokens >= window

    def _is_small(self, line: _Line, ticket: Ticket, block_tokens: int) -> bool:
        return line.missing(ticket) * block_tokens <= self.settings.small_tokens

    def _release(self, line: _Line, block_tokens: int) -> None:
        """Send those that wait, in order, until the worker has enough; and with each what has little of its own beside it."""
        while line.held and not self._is_full(line, block_tokens):
            ticket = next(iter(line.held))
            first = ticket.keys[0]
            line.unhold(ticket)
            line.send(ticket)
            for kin in list(line.by_first.get(first, ())):
                if self._is_small(line, kin, block_tokens):
                    line.unhold(kin)
                    line.send(kin)
