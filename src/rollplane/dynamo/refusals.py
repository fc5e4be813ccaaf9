"""Which of Dynamo's few errors stands for each of ours. Pure.

Its frontend (1.6.1) keeps the message of an invalid argument only (a 400), says 503 for a busy worker, and leaves a worker out
for a few seconds where that says it is gone. Everything else is a 500 without its reason, which is in the worker's log.
"""

from typing import Literal

from rollplane.errors import CallerError, Cancelled, DeadlineExceeded, EngineDied, RollplaneError, ServiceError

Refusal = Literal["invalid", "busy", "gone", "cancelled", "failed"]


def refusal_of(error: RollplaneError) -> Refusal:
    """How an error of ours is said to Dynamo.

    A deadline that passed is the caller's own, and asking again with it fails again: `invalid`, so that its sentence arrives.
    """
    if isinstance(error, (CallerError, DeadlineExceeded)):
        return "invalid"
    if isinstance(error, Cancelled):
        return "cancelled"
    if isinstance(error, ServiceError):
        return "busy"
    if isinstance(error, EngineDied):
        return "gone"
    return "failed"
