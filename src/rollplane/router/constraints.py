"""Which workers may serve a request at all: version and adapter, held against what each last told. Pure."""

from collections.abc import Sequence
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

    A fleet that is held, starting or between versions is waited for; a version that nobody has while all serve is a
    refusal with the versions that exist, and a fleet that is asleep or failed is one too.
    """
    if fleet.held_for is not None:
        return _wait(f"requests are held for a {fleet.held_for}")
    if request.model is not None and request.model in fleet.changing_adapters:
        return _wait(f"adapter {request.model!r} is being replaced")
    routable = [worker for worker in workers if worker.member.routable]
    if not routable:
        return _none_routable(workers)
    found = [worker for worker in routable if _has_version(request, worker, fleet)]
    if not found:
        return _no_version(request, workers, routable)
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


def _has_version(request: GenerateRequest, worker: RoutedWorker, fleet: Fleet) -> bool:
    options = request.options
    version = worker.version
    if version is None:
        return False
    if options.policy_version is not None:
        return version == options.policy_version
    if options.min_policy_version is not None:
        return fleet.sequence is not None and fleet.sequence.at_least(version, options.min_policy_version)
    return True


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


def _no_version(request: GenerateRequest, workers: Sequence[RoutedWorker], routable: Sequence[RoutedWorker]) -> Fit:
    exact = request.options.policy_version
    name = "policy_version" if exact is not None else "min_policy_version"
    wanted = f"{exact!r}" if exact is not None else f"{request.options.min_policy_version!r} or later"
    versions = sorted({worker.version for worker in routable if worker.version is not None})
    error = PreconditionFailed(
        f"rollplane.{name}: no worker has policy version {wanted}; there is {', '.join(map(repr, versions))}",
        param=f"rollplane.{name}",
        details={"policy_versions": versions},
    )
    changing = any(
        worker.member.state in ("joining", "updating") and worker.member.worker.reachable for worker in workers
    )
    return Fit(workers=[], verdict="wait" if changing else "refuse", error=error)


def _wait(why: str) -> Fit:
    return Fit(workers=[], verdict="wait", error=Unavailable(why))
