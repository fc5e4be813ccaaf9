"""A request as one worker gets it. Pure."""

import msgspec

from rollplane.protocol.request import GenerateRequest
from rollplane.rl.fleet import Fleet
from rollplane.router.worker import RoutedWorker

LEAST_LEFT_S = 0.001


def addressed(
    request: GenerateRequest, worker: RoutedWorker, fleet: Fleet, *, attempt: int, left_s: float | None
) -> GenerateRequest:
    """The request for this worker: its version as a precondition, the time that is left, and nothing that is the fleet's to judge.

    Args:
        left_s: seconds until the request's deadline, None without one.
    """
    options = request.options
    changes: dict[str, float | None] = {}
    if left_s is not None:
        changes["deadline_s"] = max(left_s, LEAST_LEFT_S)
    for name in ("min_policy_version", "max_policy_lag"):
        # A worker does not know the order of versions it never had.
        if getattr(options, name) is not None:
            changes[name] = None
    if changes:
        options = msgspec.structs.replace(options, **changes)
    addressed_to = msgspec.structs.replace(
        request,
        options=options,
        attempt=attempt,
        expects_policy_version=expected_version(request, worker, fleet),
        caller=None,  # of no use to a worker
    )
    if request.idempotency_key is not None and not worker.member.routable:
        addressed_to.attach_only = True
    return addressed_to


def expected_version(request: GenerateRequest, worker: RoutedWorker, fleet: Fleet) -> str | None:
    """The version that the worker must have when it admits the request; None where whatever it has is right."""
    options = request.options
    bounded = options.min_policy_version or options.policy_version or options.max_policy_lag is not None
    return worker.version if fleet.checkpoint is not None or bounded else None
