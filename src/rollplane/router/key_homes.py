"""Who keeps the answer to an idempotency key, agreed on by all frontends without a store of their own.

Each key has homes: the first three workers that answer, in the order of rendezvous hashing over the workers' addresses.
Their books (`engines.wrappers.key_book`) say which worker was given the key. The first is asked before the others, so
that two frontends with one key agree; a home that has lost its book is told by another one. One home suffices, and
what this frontend placed itself it remembers too.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from rollplane.errors import RollplaneError
from rollplane.router.worker import RoutedWorker

HOMES: Final = 3
ASK_S: Final = 1.0
"""Limit of asking one home: a request does not wait for a worker that hangs."""
AVOIDED_S: Final = 5.0
"""A home that did not answer is not asked again for so long."""
MAX_REMEMBERED: Final = 65_536


class KeyHomes:
    """The keepers of keys, as this frontend finds them.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._avoided: dict[str, float] = {}
        self._remembered: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<KeyHomes {len(self._remembered)} keys remembered>"

    async def claim(
        self, key: str, keeper: str, *, workers: Sequence[RoutedWorker], instead_of: str | None = None
    ) -> str:
        """The address of the key's keeper: `keeper` where nobody has the key yet, or where `instead_of` had it.

        Args:
            workers: every worker of the fleet, whatever its state.
            instead_of: the keeper of the last claim, which is of no use any more.
        """
        best = self._remembered.get(key) or (keeper, 1)
        if best[0] == instead_of:
            best = (keeper, best[1] + 1)
        left = [home for home in homes(key, workers) if self._may_answer(home)] if len(workers) > 1 else []
        told: list[tuple[RoutedWorker, tuple[str, int]]] = []
        while left and len(told) < HOMES:
            count = HOMES - len(told) if told else 1
            now, left = left[:count], left[count:]
            said = await asyncio.gather(*(self._ask(home, key, best) for home in now))
            told += [(home, found) for home, found in zip(now, said, strict=True) if found is not None]
            # The higher number stands. Another keeper of the same number was written down before ours.
            earlier = [found for found in said if found is not None and found != best and found[1] >= best[1]]
            best = max(earlier, key=lambda found: found[1], default=best)
        if any(found[1] == best[1] and found != best for _, found in told):
            best = (best[0], best[1] + 1)  # so that it stands in every book
        for home, found in told:
            if found != best:  # it lost its book, or missed a move
                await self._ask(home, key, best)
        self._remember(key, best)
        return best[0]

    def _may_answer(self, home: RoutedWorker) -> bool:
        """Not where it is known to be out of reach; one that was never heard yet is asked."""
        heard = home.member.worker
        return (heard.reachable or heard.state is None) and self._avoided.get(home.url, 0.0) <= self._clock()

    async def _ask(self, home: RoutedWorker, key: str, best: tuple[str, int]) -> tuple[str, int] | None:
        try:
            return await home.member.worker.claim_key(key, best[0], number=best[1], limit_s=ASK_S)
        except RollplaneError:
            self._avoided[home.url] = self._clock() + AVOIDED_S
            return None

    def _remember(self, key: str, best: tuple[str, int]) -> None:
        self._remembered.pop(key, None)
        self._remembered[key] = best
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def homes(key: str, workers: Sequence[RoutedWorker]) -> list[RoutedWorker]:
    """The workers in the order in which they are homes of a key.

    Rendezvous hashing over their addresses: every frontend finds the same order, and the end of one worker moves only the
    keys it was a home of.
    """
    return sorted(workers, key=lambda worker: xxhash.xxh3_64_intdigest(f"{worker.url}\0{key}".encode()), reverse=True)
