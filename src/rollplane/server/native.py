"""An engine's own weight transfer and its sleep, under vLLM's names and as `POST /engine/<route>`.

They act on one worker: a trainer joins each server with ranks of its own, and asks each for its memory. On a frontend they
are a 404 that says so; an engine that has neither refuses them by name.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from rollplane.errors import InvalidRequest, NotFound
from rollplane.protocol.admin import SleepReport, TransferReport
from rollplane.protocol.opaque import check_opaque
from rollplane.protocol.versions import check_version_name
from rollplane.rl.native import SLEEP_LEVEL
from rollplane.server.admin import MAX_MANIFEST_BYTES
from rollplane.server.admin_calls import Empty, OperationBody, VersionName, audited, canonical, decode_body, plain
from rollplane.server.error_responses import json_response
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service
from rollplane.worker import Worker

ERRORS = (400, 404, 409, 413, 415, 502, 503, 504)


class InitTransferBody(OperationBody, frozen=True, kw_only=True):
    """`init_info`: the backend's own object, such as a rendezvous address and this server's ranks."""

    init_info: dict[str, Any]


class StartUpdateBody(OperationBody, frozen=True, kw_only=True):
    """`deadline_s`: of the whole update, until its finish. `is_checkpoint_format`: some trainers send true; it changes nothing."""

    is_checkpoint_format: Literal[True] | None = None


class UpdatePartBody(OperationBody, frozen=True, kw_only=True):
    """`update_info`: the backend's own object, such as names, dtypes and shapes of what is sent now."""

    update_info: dict[str, Any]


class FinishUpdateBody(OperationBody, frozen=True, kw_only=True):
    """The new weights' name; without one `update-<n>` is made up."""

    weight_version: VersionName | None = None


class SleepBody(OperationBody, frozen=True, kw_only=True):
    """`level`: only 1, which keeps the weights in the processor's memory. `mode`: what becomes of running requests."""

    level: int = SLEEP_LEVEL
    mode: Literal["abort", "wait", "keep"] = "abort"


class WakeUpBody(OperationBody, frozen=True, kw_only=True):
    """`tags`: what to take back (`weights`, `kv_cache`); null: everything."""

    tags: Annotated[list[str], Meta(min_length=1, max_length=8)] | None = None


class SleepingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether not all of the engine's memory is back."""

    is_sleeping: bool


async def init_transfer(service: Service, body: InitTransferBody) -> TransferReport:
    """Join a trainer's group with the engine's own backend."""
    check_opaque(body.init_info, param="init_info")
    return await worker_of(service).init_weight_transfer(body.init_info, operation=body.operation())


async def start_update(service: Service, body: StartUpdateBody) -> TransferReport:
    """Pause and open an update."""
    return await worker_of(service).start_weight_update(operation=body.operation())


async def update_part(service: Service, body: UpdatePartBody) -> TransferReport:
    """Receive a part of the weights."""
    check_opaque(body.update_info, param="update_info")
    return await worker_of(service).update_weights(body.update_info, operation=body.operation())


async def finish_update(service: Service, body: FinishUpdateBody) -> TransferReport:
    """Close the update, name the weights and go on."""
    if body.weight_version is not None:
        check_version_name(body.weight_version, param="weight_version")
    return await worker_of(service).finish_weight_update(body.weight_version, operation=body.operation())


async def sleep(service: Service, body: SleepBody) -> SleepReport:
    """End what runs and give the device's memory back."""
    return await worker_of(service).sleep(level=body.level, mode=body.mode, operation=body.operation())


async def wake_up(service: Service, body: WakeUpBody) -> SleepReport:
    """Take the memory back and go on."""
    return await worker_of(service).wake_up(body.tags, operation=body.operation())


async def is_sleeping(service: Service, _: Empty) -> SleepingReport:
    """Whether the engine sleeps; one without a sleep never does."""
    native = worker_of(service).native
    return SleepingReport(is_sleeping=native is not None and native.is_sleeping())


def worker_of(service: Service) -> Worker:
    """The worker behind this server.

    Raises:
        NotFound: it is a frontend, or serves an engine without administration.
    """
    if service.worker is None:
        raise NotFound(
            "an engine's own weight transfer and sleep are a worker's routes: each server has ranks and memory of its own. Ask "
            "each worker, or update all of them by POST /v1/rl/policy or a weight group"
        )
    return service.worker


# -- vLLM's names ------------------------------------------------------------------------------------------------------


def _plain_call(name: str, kind: Any, call: Any, message: str) -> Any:
    async def handler(request: Request) -> Response:
        service: Service = request.app.state.service

        async def run() -> Any:
            return await call(service, await decode_body(request, kind, limit_bytes=MAX_MANIFEST_BYTES))

        return json_response({"message": message, **plain(await audited(request, name, run()))})

    handler.__name__ = name
    return handler


async def sleep_(request: Request) -> Response:
    """vLLM's sleep: level and mode in the query."""
    service: Service = request.app.state.service

    async def run() -> SleepReport:
        body = await decode_body(request, SleepBody)
        level, mode = request.query_params.get("level", str(body.level)), request.query_params.get("mode", body.mode)
        if not level.isdecimal() or len(level) > 3:
            raise InvalidRequest(f"query parameter level must be a number, got {level[:32]!r}", param="level")
        if mode not in ("abort", "wait", "keep"):
            raise InvalidRequest(f"query parameter mode must be abort or wait, got {mode[:32]!r}", param="mode")
        return await sleep(service, msgspec.structs.replace(body, level=int(level), mode=mode))

    return json_response(plain(await audited(request, "sleep", run())))


async def wake_up_(request: Request) -> Response:
    """vLLM's waking up: tags in the query, each under its own `tags`."""
    service: Service = request.app.state.service

    async def run() -> SleepReport:
        body = await decode_body(request, WakeUpBody)
        tags = [tag for tag in request.query_params.getlist("tags") if tag] or body.tags
        return await wake_up(service, msgspec.structs.replace(body, tags=tags))

    return json_response(plain(await audited(request, "wake_up", run())))


async def is_sleeping_(request: Request) -> Response:
    """Whether the engine sleeps."""
    return json_response(await is_sleeping(request.app.state.service, Empty()))


def native_routes() -> list[ApiRoute]:
    """The `/engine/*` routes and vLLM's own; its `/update_weights` is shared with prime-rl's, see `server.compat`."""
    table: list[tuple[str, Any, Any, Any, str]] = [
        (
            "init_weight_transfer_engine",
            InitTransferBody,
            init_transfer,
            TransferReport,
            "Join a trainer's own transfer",
        ),
        ("start_weight_update", StartUpdateBody, start_update, TransferReport, "Pause and open a weight update"),
        ("update_weights", UpdatePartBody, update_part, TransferReport, "Receive a part of the weights"),
        ("finish_weight_update", FinishUpdateBody, finish_update, TransferReport, "Close the weight update"),
        ("sleep", SleepBody, sleep, SleepReport, "Give the device's memory back"),
        ("wake_up", WakeUpBody, wake_up, SleepReport, "Take the device's memory back"),
        ("is_sleeping", Empty, is_sleeping, SleepingReport, "Whether the engine sleeps"),
    ]
    required = (InitTransferBody, UpdatePartBody)
    messages = {
        "init_weight_transfer_engine": "Weight transfer initialized",
        "start_weight_update": "Weight update started",
        "finish_weight_update": "Weight update finished",
    }
    text = {"schema": {"type": "string"}}
    queried: list[tuple[str, Any, Any, dict[str, dict[str, Any]]]] = [
        ("sleep", sleep_, SleepBody, {"level": {"schema": {"type": "integer", "enum": [SLEEP_LEVEL]}}, "mode": text}),
        ("wake_up", wake_up_, WakeUpBody, {"tags": {"schema": {"type": "array", "items": {"type": "string"}}}}),
    ]
    by_name = {name: (body, call, summary) for name, body, call, _, summary in table}
    return [
        *(
            ApiRoute(
                f"/engine/{name}",
                canonical(name, body, call, limit_bytes=MAX_MANIFEST_BYTES),
                methods=["GET", "POST"] if name == "is_sleeping" else ["POST"],
                access="admin",
                doc=Doc(
                    summary=summary,
                    tag="administration",
                    body=body,
                    body_required=body in required,
                    answer=answer,
                    errors=ERRORS,
                ),
            )
            for name, body, call, answer, summary in table
        ),
        *(
            ApiRoute(
                f"/{name}",
                _plain_call(name, by_name[name][0], by_name[name][1], message),
                methods=["POST"],
                access="admin",
                doc=Doc(
                    summary=by_name[name][2],
                    tag="compatibility",
                    body=by_name[name][0],
                    body_required=by_name[name][0] in required,
                    errors=ERRORS,
                ),
            )
            for name, message in messages.items()
        ),
        *(
            ApiRoute(
                f"/{name}",
                handler,
                methods=["POST"],
                access="admin",
                doc=Doc(
                    summary=by_name[name][2],
                    tag="compatibility",
                    body=body,
                    body_required=False,
                    query=query,
                    errors=ERRORS,
                ),
            )
            for name, handler, body, query in queried
        ),
        ApiRoute(
            "/is_sleeping",
            is_sleeping_,
            methods=["GET"],
            access="admin",
            doc=Doc(summary="Whether the engine sleeps", tag="compatibility", errors=(404, 503)),
        ),
    ]
