"""Which workers may serve a request at all: version and adapter, held against what each last told. Pure."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from rollplane.errors import PreconditionFailed, RollplaneError, Unavailable
from rollplane.protocol.request import GenerateRequest
from rollplane.rl.fleet import Fleet
from rollplane.router.worker import Candidates, RoutedWorker

NARROWED_KEPT: Final = 64
"""Versions and adapters that requests ask for, of which a lineup remembers who has them."""
ANY_VERSION: Final = (None, None, None)
NOT_USED: Final = Unavailable("not used")


class Lineup:
    """A fleet's workers at a moment. `routable`: those that may get a request; `steady`: the circuits of all of these are closed.

    It holds until a worker, the fleet or a circuit tells something new: whoever keeps it makes another then.
    """

    __slots__ = ("_narrowed", "routable", "steady", "workers")

    def __init__(self, workers: Sequence[RoutedWorker]) -> None:
        self.workers = workers
        self.routable = Candidates(worker for worker in workers if worker.member.routable)
        self.steady = all(worker.circuit.closed for worker in self.routable)
        self._narrowed: dict[object, Candidates] = {}

    def __repr__(self) -> str:
        return f"<Lineup {len(self.routable)}/{len(self.workers)} routable{'' if self.steady else ', not all closed'}>"

    def narrowed(self, by: Hashable, choose: Callable[[Sequence[RoutedWorker]], Sequence[RoutedWorker]]) -> Candidates:
        """Those of the routable workers that `choose` returns of them; asked once for each `by`."""
        known = self._narrowed.get(by)
        if known is None:
            if len(self._narrowed) >= NARROWED_KEPT:
                self._narrowed.clear()
            known = self._narrowed[by] = Candidates(choose(self.routable))
        return known


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The allowed workers; or none: `wait` because that may change by itself, or `refuse` with the reason."""

    workers: Sequence[RoutedWorker]
    verdict: Literal["go", "wait", "refuse"]
    error: RollplaneError


def fitting(request: GenerateRequest, lineup: Lineup, fleet: Fleet) -> Fit:
    """The workers that satisfy a request now.

    A fleet that is held, starting or between versions is waited for; so is, by a request with a deadline, a version that
    nobody has. Without one that is a refusal with the versions that exist; a fleet that is asleep or failed always is.
    """
    if fleet.held_for is not None:
        return _wait(f"requests are held for a {fleet.held_for}")
    if request.model is not None and request.model in fleet.changing_adapters:
        return _wait(f"adapter {request.model!r} is being replaced")
    found = lineup.routable  # whoever is routable has told its version
    if not found:
        return _none_routable(lineup.workers)
    options = request.options
    wanted = (options.policy_version, options.min_policy_version, options.max_policy_lag)
    if wanted != ANY_VERSION:
        found = lineup.narrowed(wanted, lambda routable: _with_version(request, routable, fleet))
        if not found:
            return _no_version(request, lineup.workers, lineup.routable, fleet)
    name = request.model
    if name is not None and name in fleet.adapter_paths:
        # An adapter nobody here loaded may still be known to a worker, which then answers for itself.
        having = found
        found = lineup.narrowed((wanted, name), lambda _: [worker for worker in having if worker.has_adapter(name)])
        if not found:
            return _wait(f"no routable worker has adapter {name!r}")
    return Fit(workers=found, verdict="go", error=NOT_USED)


def circuits(workers: Sequence[RoutedWorker]) -> list[RoutedWorker]:
    """The workers whose circuit lets a request through; all of them where none does: the last one is never left out."""
    admitted = [worker for worker in workers if worker.circuit.admits]
    return admitted or list(workers)


def _with_version(request: GenerateRequest, routable: Sequence[RoutedWorker], fleet: Fleet) -> list[RoutedWorker]:
    lags = None
    if request.options.max_policy_lag is not None:
        lags = {version: fleet.lag(version) for version in {worker.version for worker in routable}}
    return [worker for worker in routable if _has_version(request, worker, fleet, lags)]


def _has_version(
    request: GenerateRequest, worker: RoutedWorker, fleet: Fleet, lags: Mapping[str | None, int | None] | None
) -> bool:
    options = request.options
    version = worker.version
    if version is None:
        return False
    if options.policy_version is not None:
        return version == options.policy_version
    least, most = options.min_policy_version, options.max_policy_lag
    if least is not None and (fleet.sequence is None or not fleet.sequence.at_least(version, least)):
        return False
    if most is None or lags is None:
        return True
    lag = lags[version]
    return lag is not None and lag <= most


def _none_routable(workers: Sequence[RoutedWorker]) -> Fit:
    if not workers:
        return _wait("there are no workers")
    health = [None if w.member.worker.state is None else w.member.worker.state.health.state for w in workers]
    why = "; ".join(f"{w.url} is {_place(w, told)}" for w, told in zip(workers, health, strict=True))
    hopeless = all(
        w.member.state == "fenced" or told in ("asleep", "failed") for w, told in zip(workers, health, strict=True)
    )
    if hopeless:
        return Fit(workers=[], verdict="refuse", error=Unavailable(f"no worker can serve: {why}"))
    return _wait(f"no worker can take requests now: {why}")


def _place(worker: RoutedWorker, told: str | None) -> str:
    member = worker.member
    if not member.worker.reachable:
        return "unreachable"
    return f"{told}" if member.state == "current" else f"{member.state} ({member.reason or told})"


def _no_version(
    request: GenerateRequest, workers: Sequence[RoutedWorker], routable: Sequence[RoutedWorker], fleet: Fleet
) -> Fit:
    options = request.options
    versions = sorted({worker.version for worker in routable if worker.version is not None})
    lags = {version: fleet.lag(version) for version in versions}
    details: dict[str, object] = {"policy_versions": versions}
    wanted = []
    name = "policy_version"
    if options.policy_version is not None:
        wanted.append(f"policy version {options.policy_version!r}")
    if options.min_policy_version is not None:
        name = "min_policy_version"
        wanted.append(f"policy version {options.min_policy_version!r} or later")
    there = ", ".join(map(repr, versions))
    if options.max_policy_lag is not None:
        name = "max_policy_lag"
        newest = None if fleet.sequence is None else fleet.sequence.current
        wanted.append(f"a version at most {options.max_policy_lag} updates behind the newest, {newest!r}")
        there = ", ".join(
            f"{v!r} ({'its order is not known' if n is None else f'{n} behind'})" for v, n in lags.items()
        )
        details |= {"newest": newest, "lags": lags}
    error = PreconditionFailed(
        f"rollplane.{name}: no worker has {' and '.join(wanted)}; there is {there}",
        param=f"rollplane.{name}",
        details=details,
    )
    changing = any(
        worker.member.state in ("joining", "updating") and worker.member.worker.reachable for worker in workers
    )
    return Fit(workers=[], verdict="wait" if changing or options.deadline_s is not None else "refuse", error=error)


def _wait(why: str) -> Fit:
    return Fit(workers=[], verdict="wait", error=Unavailable(why))
