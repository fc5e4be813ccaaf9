"""The one translator from errors to HTTP answers: `{"error": {message, type, param, code}}` and its headers."""

import math
from typing import Any, Final

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rollplane.errors import Cancelled, RollplaneError, Unauthenticated, error_body

log = structlog.get_logger("rollplane.server")

_encoder = msgspec.json.Encoder()
_BY_STATUS: Final = {
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "payload_too_large"),
}


def error_response(error: RollplaneError) -> Response:
    """The whole answer for one of our errors."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if error.status >= 500 and not error.retryable:
        headers["x-should-retry"] = "false"  # the OpenAI SDKs ask again after every 5xx that does not say so
    return json_response({"error": error_body(error)}, status=error.status, headers=headers)


def error_event(error: RollplaneError) -> bytes:
    """The JSON of an error inside a stream."""
    return _encoder.encode({"error": error_body(error)})


def as_rollplane_error(error: BaseException) -> RollplaneError:
    """Our error for any exception; one that is not ours is logged and becomes a 500 without its text."""
    if isinstance(error, RollplaneError):
        return error
    log.error("unexpected_error", exc_info=error)
    return RollplaneError("the server failed on this request; its log has the reason")


async def on_rollplane_error(request: Request, error: Exception) -> Response:
    """Handler for our errors that leave a route."""
    found = as_rollplane_error(error)
    if not isinstance(found, Cancelled) and found.status >= 500:
        log.warning("request_failed", path=request.url.path, status=found.status, code=found.code, reason=found.message)
    return error_response(found)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler for the router's own 404 and 405."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    kind, code = _BY_STATUS.get(status, ("invalid_request_error", "invalid_request"))
    words = {
        404: f"there is no route {request.url.path}",
        405: f"{request.method} is not a method of {request.url.path}",
    }
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    body = {"message": words.get(status, str(error)), "type": kind, "param": None, "code": code}
    return json_response({"error": body}, status=status, headers=headers)


def json_response(tree: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer of records, maps and lists."""
    return Response(_encoder.encode(tree), status_code=status, headers=headers, media_type="application/json")
