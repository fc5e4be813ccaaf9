"""Where the answers to idempotency keys are made: a small map that each worker keeps for its frontends.

A frontend places a keyed request like any other, and writes the worker it chose into the books of a few workers that the
key itself names; see `router.key_homes`. Bounded in number and time; the oldest entries go first.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_KEYS: Final = 200_000
"""About 60 MB of entries."""
MAX_AGE_S: Final = 7200.0
"""Since the key was last asked about: longer than any answer is kept after the longest generation."""


class KeyBook:
    """Key -> address of the worker that runs, or keeps the answer of, its request.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, *, max_keys: int = MAX_KEYS, max_age_s: float = MAX_AGE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_keys = max_keys
        self._max_age_s = max_age_s
        self._clock = clock
        self._keepers: OrderedDict[str, tuple[str, int, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<KeyBook {len(self._keepers)} keys>"

    def claim(self, key: str, keeper: str, *, number: int = 1) -> tuple[str, int]:
        """The keeper of a key and its number: who is written down, else `keeper`, which is written down then.

        Args:
            number: 1 for the first keeper of a key, one more for each that took the place of another. The higher one
                stands, so a book that missed a move cannot undo it.
        """
        now = self._clock()
        known = self._keepers.pop(key, None)
        if known is not None and known[1] >= number and now - known[2] <= self._max_age_s:
            keeper, number, _ = known
        self._keepers[key] = (keeper, number, now)
        while len(self._keepers) > self._max_keys or self._oldest_is_stale(now):
            self._keepers.popitem(last=False)
        return keeper, number

    def _oldest_is_stale(self, now: float) -> bool:
        return now - next(iter(self._keepers.values()))[2] > self._max_age_s
