"""Sends a worker only as much uncached prompt at a time as keeps it busy, so that what is cached already need not queue.

An engine computes prompts one after the other. A sibling whose prefix is cached would wait behind every long prompt that
was sent before it; held back here, the long prompts wait instead, for as long as they would have waited there. Only for
workers that say KV events: they tell when a prompt is computed.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
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
    """One request's blocks that its worker still has to compute."""

    __slots__ = ("gone", "keys", "sent")

    def __init__(self, keys: Sequence[int]) -> None:
        self.keys = keys
        self.sent = asyncio.Event()
        self.gone = False


class _Line:
    """One worker: blocks that were sent to it and not reported, and requests that wait, in order."""

    __slots__ = ("held", "moved_at", "outstanding")

    def __init__(self, now: float) -> None:
        self.outstanding: dict[int, Ticket] = {}
        self.held: list[Ticket] = []
        self.moved_at = now


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
        """A request for a worker, with the blocks that it has not reported; `Ticket.sent` is set once it may go."""
        line = self._lines.get(worker)
        if line is None:
            line = self._lines[worker] = _Line(self._clock())
        ticket = Ticket(keys)
        if not line.held and not line.outstanding:
            line.moved_at = self._clock()
        line.held.append(ticket)
        self._release(line, block_tokens)
        return ticket

    async def wait(self, worker: str, ticket: Ticket, *, woken: asyncio.Event, block_tokens: int) -> None:
        """Return once the ticket may go, or `woken` is set."""
        line = self._lines.get(worker)
        while line is not None and not ticket.sent.is_set() and not woken.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (ticket.sent, woken)]
            try:
                await asyncio.wait(waits, timeout=STUCK_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if self._clock() - line.moved_at >= STUCK_S:
                line.outstanding.clear()
                line.moved_at = self._clock()
                self._release(line, block_tokens)

    def learned(self, worker: str, has: Callable[[int], bool], *, block_tokens: int) -> None:
        """A worker has reported blocks; `has` says of which keys."""
        line = self._lines.get(worker)
        if line is None or not line.outstanding:
            return
        found = [key for key in line.outstanding if has(key)]
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
        if ticket in line.held:
            line.held.remove(ticket)
        for key in ticket.keys:
            if line.outstanding.get(key) is ticket:
                del line.outstanding[key]
        self._release(line, block_tokens)
        if not line.held and not line.outstanding:
            del self._lines[worker]

    def _release(self, line: _Line, block_tokens: int) -> None:
        outstanding, settings = line.outstanding, self.settings
        kept: list[Ticket] = []
        for ticket in line.held:
            own = [key for key in ticket.keys if key not in outstanding]
            full = bool(settings.window_tokens) and len(outstanding) * block_tokens >= settings.window_tokens
            if full and len(own) * block_tokens > settings.small_tokens:
                kept.append(ticket)
                continue
            outstanding.update(dict.fromkeys(own, ticket))
            ticket.sent.set()
        line.held = kept
