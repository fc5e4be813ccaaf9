"""Which workers may serve a request at all: version and adapter, held against what each last told. Pure."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from rollplane.errors import PreconditionFailed, RollplaneError, Unavailable
from rollplane.protocol.request import GenerateRequest
from rollplane.rl.fleet import Fleet
from rollplane.router.worker import RoutedWorker


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The allowed workers; or none: `wait` because that may change by itself, or `refuse` with the reason."""

    workers: list[RoutedWorker]
    verdict: Literal["go", "wait", "refuse"]
    error: RollplaneError


def fitting(request: GenerateRequest, workers: Sequence[RoutedWorker], fleet: Fleet) -> Fit:
    """The workers that satisfy a request now.

    A fleet that is held, starting or between versions is waited for; so is, by a request with a deadline, a version that
    nobody has. Without one that is a refusal with the versions that exist; a fleet that is asleep or failed always is.
    """
    if fleet.held_for is not None:
        return _wait(f"requests are held for a {fleet.held_for}")
    if request.model is not None and request.model in fleet.changing_adapters:
        return _wait(f"adapter {request.model!r} is being replaced")
    routable = [worker for worker in workers if worker.member.routable]
    if not routable:
        return _none_routable(workers)
    options = request.options
    lags = None if options.max_policy_lag is None else {v: fleet.lag(v) for v in {w.version for w in routable}}
    if options.policy_version is None and options.min_policy_version is None and lags is None:
        found = routable  # whoever is routable has told its version
    else:
        found = [worker for worker in routable if _has_version(request, worker, fleet, lags)]
    if not found:
        return _no_version(request, workers, routable, fleet)
    if request.model is not None and request.model in fleet.adapter_paths:
        # An adapter nobody here loaded may still be known to a worker, which then answers for itself.
        with_adapter = [worker for worker in found if worker.has_adapter(request.model)]
        if not with_adapter:
            return _wait(f"no routable worker has adapter {request.model!r}")
        found = with_adapter
    return Fit(workers=found, verdict="go", error=Unavailable("not used"))


def circuits(workers: Sequence[RoutedWorker]) -> list[RoutedWorker]:
    """The workers whose circuit lets a request through; all of them where none does: the last one is never left out."""
    admitted = [worker for worker in workers if worker.circuit.admits]
    return admitted or list(workers)


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
