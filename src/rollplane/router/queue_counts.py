"""What a queue has seen: how long requests waited and which were turned away, for metrics. Bounded, whatever callers send."""

import bisect
from collections import Counter
from typing import Final, Literal

import msgspec

BUCKETS_S: Final = (0.005, 0.05, 0.25, 1.0, 5.0, 15.0, 60.0, 300.0, 600.0)
MAX_LABELS: Final = 512
"""Sets of labels that are told apart; further ones are counted as `other`."""
OTHER: Final = "other"

Why = Literal["full", "key_full", "deadline"]


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """Whose requests: the class of traffic, the model asked for ("": the base model), the beginning of the key's digest."""

    traffic: str
    model: str
    caller: str


class WaitTimes:
    """How long the requests of one class waited, those that did not wait included. `counts`: by bucket, the last one over all."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def __repr__(self) -> str:
        return f"<WaitTimes {sum(self.counts)} requests, {self.sum_s:.3f} s>"


class QueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at a moment. `running`: sequences let in. `limits`: the configured ones, by setting."""

    fleet: str
    running: int
    limits: dict[str, int]
    waiting: dict[Who, int]
    turned_away: dict[tuple[Who, Why], int]
    waited: dict[str, WaitTimes]


class QueueCounts:
    """Counters of one queue."""

    def __init__(self) -> None:
        self.refused = 0
        """Over a limit, all together."""
        self.turned_away: Counter[tuple[Who, Why]] = Counter()
        self.waited: dict[str, WaitTimes] = {}

    def __repr__(self) -> str:
        return f"<QueueCounts {self.refused} refused, {len(self.waited)} classes>"

    def turn_away(self, who: Who, why: Why) -> None:
        """A request was refused, or left at its deadline."""
        self.refused += why != "deadline"
        if (who, why) not in self.turned_away and len(self.turned_away) >= MAX_LABELS:
            who = Who(traffic=OTHER, model=OTHER, caller=OTHER)
        self.turned_away[who, why] += 1

    def waited_s(self, traffic: str, seconds: float) -> None:
        """A request was let in, or gave up, after so long."""
        times = self.waited.get(traffic)
        if times is None:
            times = self.waited[traffic] = WaitTimes()
        times.counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        times.sum_s += seconds
