"""Administration by the routes that a worker of a Dynamo deployment advertises, under whichever names it has them. Pure.

Ours and Dynamo's own vLLM worker (1.6.1) have the canonical names, Dynamo's vLLM sidecar has `control/*` and `update/*`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollplane.errors import CallerError, EngineFailed, InvalidRequest, NotFound, RollplaneError

ROUTES: Final[dict[str, tuple[str, ...]]] = {
    "pause": ("pause_generation", "control/pause_generation"),
    "resume": ("resume_generation", "control/resume_generation"),
    "is_paused": ("control/is_paused",),
    "get_version": ("get_weight_version", "control/get_weight_version"),
    "set_version": ("set_weight_version", "update/update_weight_version"),
    "update_from_disk": ("update_weights_from_disk",),
    "flush": ("flush_cache",),
    "load_adapter": ("load_lora", "update/load_lora"),
    "unload_adapter": ("unload_lora", "update/unload_lora"),
}
"""What is done -> the names of its route; the first that is advertised is used."""


def route_of(call: str, routes: Sequence[str], *, worker: str) -> str:
    """The advertised route of a call.

    Raises:
        InvalidRequest: the worker advertises none; it is named, and so is what it has.
    """
    found = next((name for name in ROUTES[call] if name in routes), None)
    if found is None:
        raise InvalidRequest(
            f"worker {worker} advertises no route {' or '.join(ROUTES[call])}, which this operation needs; "
            f"it has {', '.join(sorted(routes)) or 'none'}"
        )
    return found


def version_body(route: str, version: str) -> dict[str, str]:
    """The body that names a version to a route of `set_version`."""
    return {"new_version" if route == "update/update_weight_version" else "weight_version": version}


def version_in(answer: Mapping[str, Any]) -> str | None:
    """The version that an answer of `get_version` names, None where the worker was told none yet."""
    found = answer.get("weight_version", answer.get("version"))
    return found if isinstance(found, str) and found else None


def check_answer(status: int, answer: Any, *, worker: str, route: str) -> dict[str, Any]:
    """The answer of a route that did what it was asked.

    Raises:
        RollplaneError: it did not: by the HTTP status, or by the answer's own `status` (Dynamo's server answers 200 to both).
    """
    tree = answer if isinstance(answer, dict) else {}
    refused = tree.get("status") in ("error", "failed") or tree.get("success") is False
    if status < 400 and not refused:
        return tree
    said = tree.get("message") or tree.get("error") or f"HTTP {status}"
    text = f"worker {worker}, {route}: {said if isinstance(said, str) else said.get('message', said)}"
    kind: type[RollplaneError] = EngineFailed
    if "not found" in text.lower():
        kind = NotFound
    elif "InvalidRequest" in text or 400 <= status < 500:
        kind = InvalidRequest
    error = kind(text)
    if isinstance(error, CallerError):
        error.details = {"worker": worker, "route": route}
    raise error
