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
        self._keepers: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<KeyBook {len(self._keepers)} keys>"

    def claim(self, key: str, keeper: str, *, instead_of: str | None = None) -> str:
        """The keeper of a key: who is written down, else `keeper`, which is written down then.

        Args:
            instead_of: a keeper that is known to be of no use any more; `keeper` takes its place.
        """
        now = self._clock()
        known = self._keepers.pop(key, None)
        if known is not None and known[0] != instead_of and now - known[1] <= self._max_age_s:
            keeper = known[0]
        self._keepers[key] = (keeper, now)
        while len(self._keepers) > self._max_keys or self._oldest_is_stale(now):
            self._keepers.popitem(last=False)
        return keeper

    def _oldest_is_stale(self, now: float) -> bool:
        return now - next(iter(self._keepers.values()))[1] > self._max_age_s
