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
        self._remembered: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<KeyHomes {len(self._remembered)} keys remembered>"

    async def claim(
        self, key: str, keeper: str, *, workers: Sequence[RoutedWorker], instead_of: str | None = None
    ) -> str:
        """The address of the key's keeper: `keeper` where nobody has the key yet, or where `instead_of` had it.

        Args:
            workers: every worker of the fleet, whatever its state.
        """
        found = keeper
        known = self._remembered.get(key)
        if known is not None and known != instead_of:
            found = known
        left = [home for home in homes(key, workers) if self._may_answer(home)] if len(workers) > 1 else []
        told: list[tuple[RoutedWorker, str]] = []
        while left and len(told) < HOMES:
            now, left = left[: HOMES - len(told) if told else 1], left[HOMES - len(told) if told else 1 :]
            said = await asyncio.gather(*(self._ask(home, key, found, instead_of) for home in now))
            told += [(home, keeper) for home, keeper in zip(now, said, strict=True) if keeper is not None]
            # Whoever says another one than was proposed has had the key before.
            found = next((keeper for keeper in said if keeper not in (None, found)), found) or found
        for home, keeper in told:
            if keeper != found:  # it had lost its book, and the next one had not
                await self._ask(home, key, found, keeper)
        self._remember(key, found)
        return found

    def _may_answer(self, home: RoutedWorker) -> bool:
        """Not where it is known to be out of reach; one that was never heard yet is asked."""
        heard = home.member.worker
        return (heard.reachable or heard.state is None) and self._avoided.get(home.url, 0.0) <= self._clock()

    async def _ask(self, home: RoutedWorker, key: str, keeper: str, instead_of: str | None) -> str | None:
        try:
            return await home.member.worker.claim_key(key, keeper, instead_of=instead_of, limit_s=ASK_S)
        except RollplaneError:
            self._avoided[home.url] = self._clock() + AVOIDED_S
            return None

    def _remember(self, key: str, keeper: str) -> None:
        self._remembered.pop(key, None)
        self._remembered[key] = keeper
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def homes(key: str, workers: Sequence[RoutedWorker]) -> list[RoutedWorker]:
    """The workers in the order in which they are homes of a key.

    Rendezvous hashing over their addresses: every frontend finds the same order, and the end of one worker moves only the
    keys it was a home of.
    """
    return sorted(workers, key=lambda worker: xxhash.xxh3_64_intdigest(f"{worker.url}\0{key}".encode()), reverse=True)
