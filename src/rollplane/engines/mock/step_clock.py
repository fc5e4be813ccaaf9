"""Time counted in decode steps: every running sequence gets one token per step, however long a step is."""

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

_ROUNDING = 1e-6


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
    """The running event loop's own time."""

    def __call__(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Handle:
        """See `Clock`."""
        return asyncio.get_running_loop().call_later(delay_s, function)


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
