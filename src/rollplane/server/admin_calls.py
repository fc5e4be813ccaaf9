"""What every administration route shares: bodies by type, allowed paths, the audit line, and answers that say their status."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from rollplane.errors import InvalidRequest, NotFound, RollplaneError, Unavailable, UnsupportedMedia
from rollplane.protocol.arrays import enc_hook
from rollplane.protocol.sampling import invalid_from_msgspec
from rollplane.protocol.undecodable import undecodable
from rollplane.protocol.versions import MAX_VERSION_CHARS
from rollplane.rl.base import Operation, PolicyAdmin
from rollplane.server.error_responses import as_rollplane_error, error_response, json_response
from rollplane.server.paths import check_directory
from rollplane.server.service import Service
from rollplane.server.watch import read_body

MAX_ADMIN_BODY_BYTES = 1 << 20
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
"""A name, an id or a path in an administration body."""
Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1)]
VersionName = Annotated[str, Meta(min_length=1, max_length=MAX_VERSION_CHARS)]
Body = TypeVar("Body", bound=msgspec.Struct)
Call = Callable[[Service, Any], Awaitable[Any]]

log = structlog.get_logger("rollplane.admin")


class Empty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No fields."""


class OperationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that make an operation safe to ask for again; see `rl.base.Operation`."""

    operation_id: Text | None = None
    step: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    epoch: Epoch | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None

    def operation(self) -> Operation | None:
        """The operation, None where the caller named none."""
        if self.operation_id is None and self.epoch is None and self.deadline_s is None:
            return None
        limit = {} if self.deadline_s is None else {"deadline_s": self.deadline_s}
        return Operation(id=self.operation_id, step=self.step, epoch=self.epoch, **limit)


def admin_of(service: Service) -> PolicyAdmin:
    """The administration behind this server.

    Raises:
        NotFound: there is none.
    """
    if service.admin is None:
        raise NotFound("this server serves an engine without administration")
    return service.admin


async def decode_body(request: Request, kind: type[Body], *, limit_bytes: int = MAX_ADMIN_BODY_BYTES) -> Body:
    """The typed JSON body; an empty one is an object without fields.

    Raises:
        InvalidRequest: naming the field. UnsupportedMedia: not JSON.
    """
    body = await read_body(
        request.receive,
        limit_bytes=limit_bytes,
        headers=request.headers,
        timeout_s=60.0,
    )
    content_type = request.headers.get("content-type", "application/json").split(";", 1)[0].strip().lower()
    if body and content_type != "application/json":
        raise UnsupportedMedia(f"Content-Type {content_type!r} is not read here; send application/json")
    try:
        return msgspec.json.decode(body or b"{}", type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Not the shape that is asked for, or nothing that can be decoded at all.
        shape = invalid_from_msgspec(error, root="body") if isinstance(error, msgspec.ValidationError) else None
        raise undecodable(body, root="body") or shape or InvalidRequest("the body cannot be decoded") from None


async def allowed_directory(service: Service, path: str, *, param: str) -> str:
    """The canonical directory that a caller may name here; see `server.paths`.

    A frontend without roots of its own leaves the check to its workers, which read the files.
    """
    roots: list[str] | None = service.settings.root
    if not roots and (service.keys.open or service.role == "frontend"):
        if service.role == "frontend":
            return path
        roots = None
    return await asyncio.to_thread(check_directory, path, roots=roots, param=param)


async def audited(request: Request, name: str, work: Awaitable[Any]) -> Any:
    """The result of an administration call, with one line in the log and one count, whatever came of it."""
    service: Service = request.app.state.service
    caller = request.scope.get("rollplane.caller", "unknown")
    client = request.client.host if request.client is not None else None
    began = time.monotonic()
    try:
        result = await work
    except BaseException as error:
        found = as_rollplane_error(error) if isinstance(error, Exception) else Unavailable("cancelled")
        service.metrics.admin.labels(call=name, result=found.code).inc()
        log.warning(
            "admin_call",
            call=name,
            route=request.url.path,
            caller=caller,
            client=client,
            result=found.code,
            status=found.status,
            reason=found.message,
            seconds=round(time.monotonic() - began, 3),
        )
        if isinstance(error, Exception):
            raise found from error
        raise
    service.metrics.admin.labels(call=name, result="ok").inc()
    log.info(
        "admin_call",
        call=name,
        route=request.url.path,
        caller=caller,
        client=client,
        result="ok",
        seconds=round(time.monotonic() - began, 3),
    )
    return result


def canonical(
    name: str, kind: type[Body], call: Call, *, limit_bytes: int = MAX_ADMIN_BODY_BYTES
) -> Callable[[Request], Awaitable[Response]]:
    """The handler of one `/engine/*` route: `{"status": "ok", ...}`, or `{"status": "error", "error": {...}}`."""

    async def handler(request: Request) -> Response:
        service: Service = request.app.state.service

        async def run() -> Any:
            return await call(service, await decode_body(request, kind, limit_bytes=limit_bytes))

        try:
            result = await audited(request, name, run())
        except RollplaneError as error:
            return with_status(error_response(error))
        return json_response({"status": "ok", **plain(result)})

    handler.__name__ = name
    return handler


def plain(result: Any) -> dict[str, Any]:
    """A record (or a map) as a map of JSON values."""
    if result is None:
        return {}
    tree = msgspec.to_builtins(result, enc_hook=enc_hook)
    return tree if isinstance(tree, dict) else {"result": tree}


def with_status(response: Response) -> Response:
    """The same error answer with `"status": "error"` in front."""
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    tree = msgspec.json.decode(response.body)
    return json_response({"status": "error", **tree}, status=response.status_code, headers=headers)


def query_flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    """A true/false query parameter.

    Raises:
        InvalidRequest: another word.
    """
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"query parameter {name} must be true or false, got {text[:32]!r}", param=name)
    return text.lower() in ("true", "1")
