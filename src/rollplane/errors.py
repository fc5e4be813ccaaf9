"""The error tree: whose fault each failure is, its HTTP status, and whether asking again can help.

    RollplaneError
    |-- CallerError            the request is wrong; asking again with the same request fails again
    |   |-- InvalidRequest         400  a field is missing, mistyped, out of range, or cannot be served here
    |   |   `-- ContextOverflow    400  the prompt does not fit the model's context
    |   |-- Unauthenticated        401  no key, or an unknown one
    |   |-- Forbidden              403  a key without the scope, or a path outside the allowed roots
    |   |-- NotFound               404  unknown model, adapter, request, route or file
    |   |-- HeadTimeout            408  the request's line and headers did not arrive in time
    |   |-- Conflict               409  a state forbids it: a live request id with another body, a version nobody has, a reset that could not reset
    |   |   `-- PreconditionFailed  409  a worker has another policy version or adapter generation than was asked for
    |   |-- PayloadTooLarge        413  over a body or payload limit; the message says the limit
    |   |-- UnsupportedMedia       415  a content type nobody reads here
    |   |-- IdempotencyMismatch    422  an idempotency key that was used with another body
    |   `-- HeadTooLarge           431  the request's line and headers are longer than the server reads
    |-- ServiceError           the service cannot do it now; asking again later may help
    |   |-- Overloaded             429  over a configured limit
    |   |-- Unavailable            503  asleep, draining, no worker
    |   |-- DeadlineExceeded       504  the request's deadline passed
    |   `-- Cancelled              499  the caller went away (seen in logs only)
    `-- PeerError              something we depend on broke its promise
        |-- EngineProtocolError    502  an answer that breaks an invariant; the message has the numbers
        |-- EngineFailed           502  the engine refused or crashed on one request
        |-- EngineDied             503  the engine is gone; another worker may serve
        `-- TransportError         502  a connection failed or ended early

Nothing here imports anything of ours. `server.error_responses` is the one place that turns these into HTTP answers and
`client` the one that turns answers back into these.
"""

import math
from typing import Any, ClassVar, Final

MAX_MESSAGE_CHARS: Final = 2000
MAX_PARAM_CHARS: Final = 256


class RollplaneError(Exception):
    """Base of every error that crosses a boundary of ours.

    Args:
        message: a sentence for a person; names the field, the value's kind and the limit. Cut at `MAX_MESSAGE_CHARS`: a
            refused value may be megabytes long and its error is logged and sent back.
        param: dotted path of the offending field (`sampling_params.top_k`), or None.
        details: extra numbers for programs (JSON-able), e.g. the versions that exist.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, details: dict[str, Any] | None = None) -> None:
        super().__init__(_cut(message, MAX_MESSAGE_CHARS))
        self.message = _cut(message, MAX_MESSAGE_CHARS)
        self.param = None if param is None else _cut(param, MAX_PARAM_CHARS)
        self.details = details
        self.retry_after_s: float | None = None


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


class CallerError(RollplaneError):
    """The request is wrong. Never counts against a worker's health."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidRequest(CallerError):
    """400: a field is missing, mistyped, out of range, or cannot be served by this engine."""


class ContextOverflow(InvalidRequest):
    """400: the prompt leaves no room; the message contains `maximum context length`, which clients look for."""

    code = "context_length_exceeded"


class Unauthenticated(CallerError):
    """401: no key, or an unknown one."""

    status = 401
    type = "authentication_error"
    code = "unauthenticated"


class Forbidden(CallerError):
    """403: a key without the needed scope, or a path outside the allowed roots."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(CallerError):
    """404: an unknown model, adapter, request, route or file."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class HeadTimeout(CallerError):
    """408: the request's line and headers did not arrive in time."""

    status = 408
    code = "head_timeout"


class Conflict(CallerError):
    """409: the state forbids it."""

    status = 409
    type = "conflict_error"
    code = "conflict"


class PreconditionFailed(Conflict):
    """409 from a worker whose policy version or adapter generation is not the one that was asked for.

    A router tries another worker; the original caller sees it only when no worker fits.
    """

    code = "precondition_failed"


class PayloadTooLarge(CallerError):
    """413: over a body or payload limit; the message says the limit."""

    status = 413
    code = "payload_too_large"


class UnsupportedMedia(CallerError):
    """415: a content type nobody reads here."""

    status = 415
    code = "unsupported_media_type"


class IdempotencyMismatch(CallerError):
    """422: an idempotency key that was used with another body."""

    status = 422
    code = "idempotency_mismatch"


class HeadTooLarge(CallerError):
    """431: the request's line and headers are longer than the server reads."""

    status = 431
    code = "head_too_large"


class ServiceError(RollplaneError):
    """The service cannot do it now. `retry_after_s` becomes the Retry-After header."""

    status = 503
    type = "service_error"
    code = "unavailable"
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = 1.0,
        param: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, param=param, details=details)
        self.retry_after_s = retry_after_s


class Overloaded(ServiceError):
    """429: over a configured limit."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class Unavailable(ServiceError):
    """503: asleep, awake without weights, draining, or no worker that could serve."""


class DeadlineExceeded(ServiceError):
    """504: the request's own deadline, or the server's longest hold, passed."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    retryable = False


class Cancelled(ServiceError):
    """499: the caller went away (seen in logs and metrics only), or the request was aborted before the model was known."""

    status = 499
    code = "cancelled"
    retryable = False


class PeerError(RollplaneError):
    """Something we depend on broke its promise. Counts against the worker's health."""

    status = 502
    type = "engine_error"
    code = "engine_error"
    retryable = True


class EngineProtocolError(PeerError):
    """502: an engine's answer breaks an invariant of the response contract. Never repaired; the message has the numbers."""

    code = "engine_protocol_error"
    retryable = False


class EngineFailed(PeerError):
    """502: the engine refused or crashed on one request and lives on."""

    code = "engine_failed"


class EngineDied(PeerError):
    """503: the engine is gone. The request may be asked again; another worker may serve it."""

    status = 503
    code = "engine_died"


class TransportError(PeerError):
    """502: a connection to a worker or server failed or ended early."""

    code = "transport_error"


def error_classes() -> dict[str, type[RollplaneError]]:
    """Every concrete error by its `code`: how a peer's error body becomes a typed error again."""
    found: dict[str, type[RollplaneError]] = {}
    todo: list[type[RollplaneError]] = [RollplaneError]
    while todo:
        cls = todo.pop()
        found.setdefault(cls.code, cls)
        todo.extend(reversed(cls.__subclasses__()))
    found["invalid_request"] = InvalidRequest
    found["unavailable"] = Unavailable
    found["engine_error"] = PeerError
    return found


def error_body(error: RollplaneError) -> dict[str, Any]:
    """The wire form, the same on HTTP and on the internal hop: `{message, type, param, code, details?}`."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if error.details is not None:
        body["details"] = error.details
    if error.retry_after_s is not None:
        body["retry_after_s"] = error.retry_after_s
    return body


def error_from_body(body: dict[str, Any], *, status: int | None = None) -> RollplaneError:
    """The typed error that a peer's error body describes; by code, else by HTTP status."""
    classes = error_classes()
    cls = classes.get(str(body.get("code")))
    if cls is None:
        by_status = {c.status: c for c in reversed(list(classes.values()))}
        cls = by_status.get(status or 500, RollplaneError)
    details, param = body.get("details"), body.get("param")
    error = cls(
        str(body.get("message", "no message")),
        param=param if isinstance(param, str) else None,
        details=details if isinstance(details, dict) else None,
    )
    retry_after_s = body.get("retry_after_s")
    if isinstance(retry_after_s, bool) or not isinstance(retry_after_s, (int, float)):
        return error
    if 0 <= retry_after_s < math.inf:
        error.retry_after_s = float(retry_after_s)
    return error
