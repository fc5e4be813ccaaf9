"""How fast workers make tokens, seen from outside: in a closed loop every worker has the same number of requests in flight,
and only their pace tells the slow one.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final, Protocol, TypeVar

WEIGHT: Final = 0.25
"""Of the newest answer in the moving mean."""
LEAST_TOKENS: Final = 16
"""Shorter answers tell more of their prompt than of the worker."""
LARGEST: Final = 10.0
LEAST_ANSWERS: Final = 3
"""A pace is believed from so many answers on."""
FORGOTTEN_AFTER_S: Final = 30.0
"""A worker that got nothing for so long is given another chance."""
TOLERATED: Final = 1.5
"""A worker is slow from so many times the median on."""


class Pace:
    """Seconds per token of one worker's answers, as a moving mean."""

    def __init__(self) -> None:
        self.s_per_token = 0.0
        self.answers = 0
        self.at = 0.0

    def __repr__(self) -> str:
        return f"<Pace {self.s_per_token * 1000:.1f} ms per token over {self.answers} answers>"

    def add(self, seconds: float, *, tokens: int, now: float) -> None:
        """An answer took `seconds`, with so many tokens per choice; very short ones say nothing."""
        if tokens < LEAST_TOKENS:
            return
        if now - self.at > FORGOTTEN_AFTER_S:
            self.answers = 0
        new = seconds / tokens
        self.s_per_token = new if not self.answers else self.s_per_token + (new - self.s_per_token) * WEIGHT
        self.answers += 1
        self.at = now


class Paced(Protocol):
    """Something that makes tokens at a pace."""

    pace: Pace


Worker = TypeVar("Worker", bound=Paced)


def slowdowns(workers: Sequence[Worker], *, now: float) -> dict[Worker, float]:
    """How many times slower than the median worker each slow one is; the others are left out."""
    paces = {
        worker: worker.pace.s_per_token
        for worker in workers
        if worker.pace.answers >= LEAST_ANSWERS and now - worker.pace.at <= FORGOTTEN_AFTER_S
    }
    if len(paces) < 2:
        return {}
    usual = median(paces.values())
    if usual <= 0:
        return {}
    return {worker: min(pace / usual, LARGEST) for worker, pace in paces.items() if pace > usual * TOLERATED}
