"""prime-rl's and vLLM's names for the same calls. A name whose backing is absent has no route here and is a 404.

Defaults are the owner's of each name: vLLM's `/pause` aborts and clears the cache unless told otherwise. `/update_weights`
is told apart by its key: `weight_dir` is prime-rl's, `update_info` is vLLM's.
"""

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollplane.errors import InvalidRequest
from rollplane.protocol.opaque import check_opaque
from rollplane.protocol.versions import check_version_name
from rollplane.server.admin import (
    MAX_MANIFEST_BYTES,
    AbortBody,
    FlushBody,
    PauseBody,
    VersionBody,
    abort,
    abort_all,
    flush,
    get_version,
    set_version,
    world_size,
)
from rollplane.server.admin_calls import (
    Empty,
    OperationBody,
    Text,
    VersionName,
    admin_of,
    allowed_directory,
    audited,
    decode_body,
    plain,
    query_flag,
)
from rollplane.server.error_responses import json_response
from rollplane.server.native import worker_of
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service

NO_BROADCAST: Final = (
    "weight broadcast over NCCL or NIXL is not offered here: its stream carries pickled metadata, which this server does not "
    "read; use the filesystem broadcast (weight_dir with safetensors files)"
)


class UpdateWeightsBody(OperationBody, frozen=True, kw_only=True):
    """prime-rl's `weight_dir` (null: its NIXL transfer) or vLLM's `update_info`; exactly one."""

    weight_dir: Text | None = None
    update_info: dict[str, Any] | None = None
    weight_version: VersionName | None = None


class LoadAdapterBody(OperationBody, frozen=True, kw_only=True):
    """An adapter's name and directory. `load_inplace` is taken and changes nothing: a load is always a new generation."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool | None = None


class UnloadAdapterBody(OperationBody, frozen=True, kw_only=True):
    """An adapter's name."""

    lora_name: Text
    lora_int_id: int | None = None


class NewVersionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy version's name."""

    new_version: VersionName


class ResetBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reset_running_requests`: running requests give their blocks up."""

    reset_running_requests: bool | None = None


class AbortManyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ids of requests, as the callers sent them; without the field every live request is meant, as in vLLM."""

    request_ids: list[Text] | None = None


async def pause_(request: Request) -> Response:
    """vLLM's pause: mode and clear_cache in the query."""
    service: Service = request.app.state.service
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:  # a slip of the pen would otherwise abort every request, which is the default
        if name not in ("mode", "clear_cache") or names.count(name) > 1:
            what = "is not known" if names.count(name) == 1 else "is there more than once"
            raise InvalidRequest(
                f"query parameter {name[:32]!r} {what}; known are mode and clear_cache", param=name[:32]
            )
    mode = request.query_params.get("mode", "abort")
    clear = query_flag(request.query_params, "clear_cache", default=True)
    if mode not in ("keep", "wait", "abort"):
        raise InvalidRequest(f"query parameter mode must be keep, wait or abort, got {mode[:32]!r}", param="mode")
    body = PauseBody(mode=mode, clear_cache=clear)  # type: ignore[arg-type]
    report = await audited(request, "pause", admin_of(service).pause(body.mode, clear_cache=body.clear_cache))
    return json_response({"status": "paused", **plain(report)})


async def resume_(request: Request) -> Response:
    """Make tokens again."""
    service: Service = request.app.state.service
    report = await audited(request, "resume", admin_of(service).resume())
    return json_response({"status": "resumed", **plain(report)})


async def is_paused(request: Request) -> Response:
    """Whether requests are held."""
    service: Service = request.app.state.service
    health = await service.health()
    return json_response(
        {"is_paused": health.state in ("paused", "pausing", "updating", "asleep"), "state": health.state}
    )


async def get_world_size(request: Request) -> Response:
    """How many ranks receive weights."""
    return json_response(await world_size(request.app.state.service, Empty()))


async def weight_info(request: Request) -> Response:
    """The version that makes tokens."""
    return json_response(await get_version(request.app.state.service, Empty()))


async def update_weight_version(request: Request) -> Response:
    """Change the version's label."""

    async def run() -> Any:
        body = await decode_body(request, NewVersionBody)
        check_version_name(body.new_version, param="new_version")
        return await set_version(request.app.state.service, VersionBody(weight_version=body.new_version))

    return json_response({"status": "ok", **plain(await audited(request, "set_weight_version", run()))})


async def update_weights(request: Request) -> Response:
    """Replace the weights; see the module.

    Raises:
        InvalidRequest: a transfer that is not offered here.
    """
    service: Service = request.app.state.service

    async def run() -> Any:
        body = await decode_body(request, UpdateWeightsBody, limit_bytes=MAX_MANIFEST_BYTES)
        if body.update_info is not None:
            if body.weight_dir is not None or body.weight_version is not None:
                raise InvalidRequest(
                    "update_info is a part of weights without a name yet: weight_dir and weight_version exclude it",
                    param="update_info",
                )
            check_opaque(body.update_info, param="update_info")
            return await worker_of(service).update_weights(body.update_info, operation=body.operation())
        if body.weight_dir is None:
            raise InvalidRequest(NO_BROADCAST, param="weight_dir")
        path = await allowed_directory(service, body.weight_dir, param="weight_dir")
        if await asyncio.to_thread(is_broadcast_marker, path):
            raise InvalidRequest(NO_BROADCAST, param="weight_dir")
        return await admin_of(service).update_from_disk(path, version=body.weight_version, operation=body.operation())

    return json_response({"status": "ok", **plain(await audited(request, "update_weights", run()))})


BROADCAST_MARKERS: Final = frozenset({"NCCL_READY", "STABLE"})


def is_broadcast_marker(path: str) -> bool:
    """Whether a directory only marks a broadcast (prime-rl's NCCL_READY) and holds nothing else. Reads the file system."""
    try:
        names = {entry.name for entry in Path(path).iterdir()}
    except OSError:
        return False  # a frontend may not see its workers' directories; theirs is the check then
    return "NCCL_READY" in names and names <= BROADCAST_MARKERS


async def init_broadcaster(request: Request) -> Response:
    """Refused, with the reason.

    Raises:
        InvalidRequest: always.
    """

    async def run() -> Any:
        raise InvalidRequest(NO_BROADCAST)

    return json_response(await audited(request, "init_broadcaster", run()))


async def load_adapter(request: Request) -> Response:
    """Load an adapter, also under a name that exists: then its next generation."""
    service: Service = request.app.state.service

    async def run() -> Any:
        body = await decode_body(request, LoadAdapterBody)
        path = await allowed_directory(service, body.lora_path, param="lora_path")
        return await admin_of(service).load_adapter(body.lora_name, path, operation=body.operation())

    return json_response({"status": "ok", **plain_adapter(await audited(request, "load_lora", run()))})


async def unload_adapter(request: Request) -> Response:
    """Drop an adapter."""
    service: Service = request.app.state.service

    async def run() -> Any:
        body = await decode_body(request, UnloadAdapterBody)
        return await admin_of(service).unload_adapter(body.lora_name, operation=body.operation())

    return json_response({"status": "ok", **plain_adapter(await audited(request, "unload_lora", run()))})


def plain_adapter(record: Any) -> dict[str, Any]:
    """An adapter's record with `lora_name` beside its own fields."""
    tree = plain(record)
    return {**tree, "lora_name": tree.get("name")}


async def reset_prefix_cache(request: Request) -> Response:
    """Drop cached KV; 409 where running requests hold it."""

    async def run() -> Any:
        body = await decode_body(request, ResetBody)
        preempt = query_flag(
            request.query_params, "reset_running_requests", default=body.reset_running_requests or False
        )
        return await flush(request.app.state.service, FlushBody(preempt=preempt))

    return json_response({"success": True, **plain(await audited(request, "flush_cache", run()))})


async def abort_requests(request: Request) -> Response:
    """End requests by the callers' ids, keeping their tokens."""

    async def run() -> int:
        body = await decode_body(request, AbortManyBody)
        service: Service = request.app.state.service
        if body.request_ids is None:
            return (await abort_all(service)).aborted
        counts = [await abort(service, AbortBody(request_id=one)) for one in body.request_ids]
        return sum(report.aborted for report in counts)

    return json_response({"aborted": await audited(request, "abort_requests", run())})


def compat_routes() -> list[ApiRoute]:
    """Every name of prime-rl's and vLLM's that has something behind it here."""
    flag = {"schema": {"type": "boolean"}}
    mode = {"schema": {"type": "string", "enum": ["keep", "wait", "abort"], "default": "abort"}}
    errors = (400, 404, 409, 413, 415, 502, 503, 504)
    posts: list[tuple[str, Any, Any, str, dict[str, dict[str, Any]]]] = [
        ("/pause", pause_, None, "Stop making tokens (vLLM's defaults)", {"mode": mode, "clear_cache": flag}),
        ("/resume", resume_, None, "Make tokens again", {}),
        (
            "/update_weights",
            update_weights,
            UpdateWeightsBody,
            "Weights of a directory, or a part by vLLM's transfer",
            {},
        ),
        ("/update_weight_version", update_weight_version, NewVersionBody, "Change the version's label only", {}),
        ("/load_lora_adapter", load_adapter, LoadAdapterBody, "Load an adapter", {}),
        ("/v1/load_lora_adapter", load_adapter, LoadAdapterBody, "Load an adapter", {}),
        ("/unload_lora_adapter", unload_adapter, UnloadAdapterBody, "Drop an adapter", {}),
        ("/v1/unload_lora_adapter", unload_adapter, UnloadAdapterBody, "Drop an adapter", {}),
        ("/reset_prefix_cache", reset_prefix_cache, ResetBody, "Drop cached KV", {"reset_running_requests": flag}),
        ("/abort_requests", abort_requests, AbortManyBody, "End requests, keeping their tokens", {}),
        ("/init_broadcaster", init_broadcaster, None, "Refused: no NCCL broadcast here", {}),
    ]
    gets: list[tuple[str, Any, str]] = [
        ("/is_paused", is_paused, "Whether requests are held"),
        ("/get_world_size", get_world_size, "How many ranks receive weights"),
        ("/weight_info", weight_info, "The version that makes tokens"),
    ]
    return [
        *(
            ApiRoute(
                path,
                handler,
                methods=["POST"],
                access="admin",
                doc=Doc(
                    summary=summary,
                    tag="compatibility",
                    body=body,
                    body_required=body not in (ResetBody, AbortManyBody),
                    query=query,
                    errors=errors,
                ),
            )
            for path, handler, body, summary, query in posts
        ),
        *(
            ApiRoute(
                path,
                handler,
                methods=["GET"],
                access="admin",
                doc=Doc(summary=summary, tag="compatibility", errors=(404, 409, 502, 503)),
            )
            for path, handler, summary in gets
        ),
    ]
