"""Time counted in decode steps: every running sequence gets one token per step, however long a step is."""

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

_ROUNDING = 1e-6
_LOOK_S = 0.02
_HELD_UP_S = 0.05
"""Between two looks at the clock; what is more than this was a loop that did not run."""
_CLOSE_S = 1e-5
"""Nearer than a timer of the loop is exact."""


class Handle(Protocol):
    """A call that was put off."""

    def cancel(self) -> None:
        """Do not make it."""
        ...


class Clock(Protocol):
    """Monotonic seconds and calls put off; `rollplane.testing.FakeClock` is one whose time a test moves."""

    def __call__(self) -> float:
        """Seconds."""
        ...

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Handle:
        """Call `function` once, `delay_s` seconds from now, on the running event loop."""
        ...


class LoopClock:
    """The running event loop's time, less that for which the loop was held up while a call was put off.

    An engine whose process stood still has made nothing meanwhile: what was asked of it while it ran finds it running.
    """

    def __init__(self) -> None:
        self._seen = -math.inf
        self._lost_s = 0.0
        self._pending = 0

    def __repr__(self) -> str:
        return f"<LoopClock {self._pending} calls put off, {self._lost_s:g} s lost>"

    def __call__(self) -> float:
        """Seconds."""
        now = asyncio.get_running_loop().time()
        if self._pending:
            self._lost_s += max(now - self._seen - _HELD_UP_S, 0.0)
        self._seen = now
        return now - self._lost_s

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Handle:
        """See `Clock`."""
        return _Later(self, self() + delay_s, function)

    def putting_off(self, calls: int) -> None:
        """So many calls more, or fewer, are put off."""
        self._pending += calls


class _Later:
    """A call of `LoopClock.call_later`, which looks at the clock often enough to tell that the loop was held up."""

    __slots__ = ("_clock", "_due", "_function", "_timer")

    def __init__(self, clock: LoopClock, due: float, function: Callable[[], None]) -> None:
        self._clock = clock
        self._due = due
        self._function = function
        clock.putting_off(1)
        self._timer: asyncio.TimerHandle | None = None
        self._wait(due - clock())

    def _wait(self, left_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(left_s, _LOOK_S), self._look)

    def _look(self) -> None:
        left_s = self._due - self._clock()
        if left_s > _CLOSE_S:
            self._wait(left_s)
        else:
            self.cancel()
            self._function()

    def cancel(self) -> None:
        """See `Handle`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._clock.putting_off(-1)


class StepClock:
    """Turns seconds into steps at the rate of the moment.

    One step takes `step_s + step_per_sequence_s * sequences` seconds. With instant steps (0 seconds) time stands still
    between calls of `tick`.
    """

    def __init__(self, *, step_s: float, step_per_sequence_s: float) -> None:
        self.step_s = step_s
        self.step_per_sequence_s = step_per_sequence_s
        self.steps = 0.0
        self._at = 0.0
        self._duration_s = 0.0
        self._stopped = True

    def __repr__(self) -> str:
        return f"<StepClock {self.steps:.1f} steps, {'stopped' if self._stopped else f'{self._duration_s:g} s each'}>"

    @property
    def instant(self) -> bool:
        """Steps take no time."""
        return self.step_s == 0 and self.step_per_sequence_s == 0

    @property
    def whole(self) -> int:
        """Steps completed."""
        return math.floor(self.steps + _ROUNDING)

    def move_to(self, now: float) -> None:
        """Let time pass until `now`."""
        if not self._stopped and self._duration_s > 0:
            self.steps += max(now - self._at, 0.0) / self._duration_s
        self._at = now

    def run(self, now: float, *, sequences: int) -> None:
        """From `now` on, steps run `sequences` sequences each; none: the clock stops, at the end of a step."""
        self.move_to(now)
        if sequences == 0:
            self.stop(now)
            self.steps = float(self.whole)
            return
        self._stopped = False
        self._duration_s = self.step_s + self.step_per_sequence_s * sequences

    def stop(self, now: float) -> None:
        """No more steps until `run`."""
        self.move_to(now)
        self._stopped = True

    def tick(self) -> None:
        """One instant step."""
        self.steps = float(self.whole + 1)

    def seconds_until(self, step: int) -> float:
        """Seconds from the last `move_to` until so many steps are completed; infinite while stopped."""
        if self._stopped:
            return math.inf
        return max(step - self.steps, 0.0) * self._duration_s
