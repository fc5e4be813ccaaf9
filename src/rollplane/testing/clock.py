"""A monotonic clock whose time a test moves."""

import asyncio
import heapq
import itertools
from collections.abc import Callable


class _Call:
    __slots__ = ("cancelled", "function")

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Seconds that pass only in `advance`. Call it for the time, as one calls `time.monotonic`.

    Args:
        start_s: the first reading.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now = start_s
        self._calls: list[tuple[float, int, _Call]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        """Seconds."""
        return self._now

    def __repr__(self) -> str:
        return f"<FakeClock {self._now:g} s, {self.pending} calls put off>"

    @property
    def pending(self) -> int:
        """Calls put off."""
        return sum(not call.cancelled for _, _, call in self._calls)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> _Call:
        """Call `function` when `delay_s` seconds have passed; `.cancel()` of what comes back prevents it."""
        call = _Call(function)
        heapq.heappush(self._calls, (self._now + max(delay_s, 0.0), next(self._order), call))
        return call

    async def sleep(self, delay_s: float) -> None:
        """Return when `delay_s` seconds have passed."""
        done = asyncio.get_running_loop().create_future()
        call = self.call_later(delay_s, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            call.cancel()

    async def advance(self, seconds: float) -> None:
        """Let time pass: calls due on the way are made in order, each at its own time, and tasks run in between."""
        end = self._now + seconds
        await settle()
        while self._calls and self._calls[0][0] <= end:
            at, _, call = heapq.heappop(self._calls)
            self._now = max(self._now, at)
            if not call.cancelled:
                call.function()
                await settle()
        self._now = end
        await settle()


async def settle(turns: int = 20) -> None:
    """Let the event loop run what is ready, and what that makes ready, some turns deep."""
    for _ in range(turns):
        await asyncio.sleep(0)
