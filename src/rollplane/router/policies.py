"""Which worker a request is sent to: a pure function of what is known at the moment of choosing."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from rollplane.errors import InvalidRequest
from rollplane.protocol.kv_events import KvBatch
from rollplane.protocol.request import GenerateRequest
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.worker import RoutedWorker


class Policy(Protocol):
    """Chooses a worker; when that one fails, the router asks again without it."""

    def choose(self, request: GenerateRequest, workers: Sequence[RoutedWorker]) -> RoutedWorker:
        """The best of `workers` (at least one, all of them allowed). Decides only; the caller counts."""
        ...

    def placed(self, request: GenerateRequest, worker: RoutedWorker) -> int | None:
        """A request is sent to a worker now; how many prompt tokens it is expected to find cached, None: no idea."""
        ...

    def answered(self, request: GenerateRequest, worker: RoutedWorker) -> None:
        """The worker has computed the request's prompt."""
        ...

    def learn(self, worker: RoutedWorker, batch: KvBatch) -> None:
        """A worker said what it caches. Raises what `PrefixIndex.apply` raises."""
        ...

    def lost_track(self, worker: RoutedWorker) -> None:
        """A worker's events have a gap: what is known of its cache may be wrong."""
        ...

    def forget(self, worker: RoutedWorker) -> None:
        """A worker has left the fleet."""
        ...


class LoadOnly:
    """What a policy that knows no caches has in common with others: it learns nothing."""

    def placed(self, request: GenerateRequest, worker: RoutedWorker) -> int | None:
        """See `Policy.placed`."""
        return None

    def answered(self, request: GenerateRequest, worker: RoutedWorker) -> None:
        """See `Policy.answered`."""

    def learn(self, worker: RoutedWorker, batch: KvBatch) -> None:
        """See `Policy.learn`."""

    def lost_track(self, worker: RoutedWorker) -> None:
        """See `Policy.lost_track`."""

    def forget(self, worker: RoutedWorker) -> None:
        """See `Policy.forget`."""


class RoundRobin(LoadOnly):
    """One after the other."""

    def __init__(self) -> None:
        self._turn: Iterator[int] = itertools.count()

    def __repr__(self) -> str:
        return "<RoundRobin>"

    def choose(self, request: GenerateRequest, workers: Sequence[RoutedWorker]) -> RoutedWorker:
        """See `Policy.choose`."""
        return workers[next(self._turn) % len(workers)]


class LeastLoaded(LoadOnly):
    """The fewest sequences in flight, then the fewest prompt tokens; among equals, one after the other."""

    def __init__(self) -> None:
        self._turn: Iterator[int] = itertools.count()

    def __repr__(self) -> str:
        return "<LeastLoaded>"

    def choose(self, request: GenerateRequest, workers: Sequence[RoutedWorker]) -> RoutedWorker:
        """See `Policy.choose`."""
        at = next(self._turn) % len(workers)
        return min([*workers[at:], *workers[:at]], key=lambda worker: (worker.load, worker.tokens))


POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "prefix_aware": PrefixAware,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
"""Policy name -> its maker."""

DEFAULT_POLICY: Final = "prefix_aware"


def make_policy(name: str | None = None) -> Policy:
    """The policy of a name, the default one for None.

    Raises:
        InvalidRequest: no such policy.
    """
    maker = POLICIES.get(name or DEFAULT_POLICY)
    if maker is None:
        raise InvalidRequest(f"router policy {name!r} is unknown; known: {', '.join(sorted(POLICIES))}", param="router")
    return maker()
