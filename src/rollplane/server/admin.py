"""Administration under its own names: `POST /engine/<route>`, `GET /v1/rl/workers`, `POST /v1/rl/policy`.

On a worker these act on that worker, on a frontend on the whole fleet. Bodies are typed and refuse unknown fields; every answer says
`status`, and the HTTP status says the same.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from rollplane.errors import Conflict, EngineDied, InvalidRequest, NotFound, Unavailable
from rollplane.protocol.admin import (
    AdapterRecord,
    AllowTensors,
    FlushReport,
    PauseMode,
    PauseReport,
    ResumeReport,
    TensorMismatch,
    UpdateReport,
    WorkerRecord,
)
from rollplane.protocol.broadcast import ALIGN_BYTES, DEFAULT_BUCKET_BYTES, MAX_BUCKET_BYTES, Manifest, TensorSpec
from rollplane.protocol.versions import check_version_name
from rollplane.rl.base import BroadcastAdmin, OnFailure, PolicyAdmin
from rollplane.server.admin_calls import (
    Empty,
    Epoch,
    OperationBody,
    Text,
    VersionName,
    admin_of,
    allowed_directory,
    audited,
    canonical,
    decode_body,
    plain,
)
from rollplane.server.error_responses import json_response
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service

RL_PROTOCOL_VERSION = 1
MAX_MANIFEST_BYTES = 16 * 2**20
"""A hundred thousand tensors by name, dtype and shape."""


class PauseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to pause; `clear_cache` drops cached KV too. `epoch`: the control owner's; an older one is a 409."""

    mode: PauseMode = "keep"
    clear_cache: bool = False
    epoch: Epoch | None = None


class ResumeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`epoch`: see `PauseBody`."""

    epoch: Epoch | None = None


class FlushBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`preempt`: running requests give their blocks up and recompute them."""

    preempt: bool = False


class AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which request to end with finish reason `abort`."""

    request_id: Text


class AbortReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many live requests had the id."""

    aborted: int


class VersionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy version's name. `epoch`: see `PauseBody`."""

    weight_version: VersionName
    epoch: Epoch | None = None


class VersionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The version that makes tokens."""

    weight_version: str


class StageBody(OperationBody, frozen=True, kw_only=True):
    """A checkpoint directory to read and check; `weight_version` may already be named and is not used."""

    model_path: Text
    weight_version: VersionName | None = None
    allow_tensors: list[AllowTensors] = msgspec.field(default_factory=list)


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that fits the model. `digest`: 64 hex digits."""

    path: str
    digest: str
    tensors: int
    bytes: int
    ignored: TensorMismatch | None = None


class UpdateBody(OperationBody, frozen=True, kw_only=True):
    """A checkpoint directory to serve from now on; see `PolicyAdmin.update_from_disk`."""

    model_path: Text
    weight_version: VersionName | None = None
    mode: PauseMode = "keep"
    clear_cache: bool = False
    on_failure: OnFailure = "rollback"
    expected_digest: Text | None = None
    allow_tensors: list[AllowTensors] = msgspec.field(default_factory=list)


class PolicyBody(OperationBody, frozen=True, kw_only=True):
    """A policy to serve from now on: a checkpoint directory (`model_path`), or `tensors` that rank 0 of the weight group now
    broadcasts. Exactly one.
    """

    model_path: Text | None = None
    tensors: Annotated[list[TensorSpec], Meta(min_length=1)] | None = None
    bucket_bytes: Annotated[int, Meta(ge=ALIGN_BYTES, le=MAX_BUCKET_BYTES)] = DEFAULT_BUCKET_BYTES
    weight_version: VersionName | None = None
    mode: PauseMode = "keep"
    clear_cache: bool = False
    on_failure: OnFailure = "rollback"
    expected_digest: Text | None = None
    allow_tensors: list[AllowTensors] = msgspec.field(default_factory=list)


class LoraSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an adapter's files are: an absolute path or a `file://` URI."""

    uri: Text


class LoadLoraBody(OperationBody, frozen=True, kw_only=True):
    """An adapter to load as the next generation of its name."""

    lora_name: Text
    source: LoraSource


class UnloadLoraBody(OperationBody, frozen=True, kw_only=True):
    """An adapter name to drop."""

    lora_name: Text


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    """Every generation that is loading, ready or draining."""

    adapters: list[AdapterRecord]


class WorldSizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many ranks receive weights; the trainer is one more."""

    world_size: int


class LivenessReport(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state."""

    state: str


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """Discovery, protocol version 1."""

    protocol_version: int
    namespace: str
    workers: list[WorkerRecord]


async def liveness_probe(service: Service, _: Empty) -> LivenessReport:
    """The engine lives.

    Raises:
        EngineDied: it does not.
    """
    health = await service.health()
    if not health.alive:
        raise EngineDied(f"the engine is {health.state}: {health.reason or 'no reason known'}")
    return LivenessReport(state=health.state)


async def pause(service: Service, body: PauseBody) -> PauseReport:
    """Stop making tokens; answers when idle."""
    return await admin_of(service).pause(body.mode, clear_cache=body.clear_cache, epoch=body.epoch)


async def resume(service: Service, body: ResumeBody) -> ResumeReport:
    """Make tokens again."""
    return await admin_of(service).resume(epoch=body.epoch)


async def flush(service: Service, body: FlushBody) -> FlushReport:
    """Drop caches.

    Raises:
        Conflict: running requests hold blocks; nothing was reset.
    """
    report = await admin_of(service).flush_cache(preempt=body.preempt)
    if not report.reset:
        raise Conflict(
            f"the cache was not reset: {report.reason or 'running requests hold blocks'}; "
            "with preempt (reset_running_requests) they give them up",
            details=plain(report),
        )
    return report


async def abort(service: Service, body: AbortBody) -> AbortReport:
    """End one request, keeping its tokens; an unknown id counts 0."""
    return AbortReport(aborted=await service.engine.abort(body.request_id))


async def get_version(service: Service, _: Empty) -> VersionReport:
    """The version that makes tokens."""
    return VersionReport(weight_version=await admin_of(service).policy_version())


async def set_version(service: Service, body: VersionBody) -> VersionReport:
    """Change the label only; touches no request."""
    version = check_version_name(body.weight_version, param="weight_version")
    await admin_of(service).set_policy_version(version, epoch=body.epoch)
    return VersionReport(weight_version=version)


async def stage(service: Service, body: StageBody) -> StageReport:
    """Read and check a checkpoint while tokens are made.

    Raises:
        NotFound: only a worker stages on its own; a fleet's update does it on all.
    """
    if service.worker is None:
        raise NotFound("staging alone is a worker's route; a fleet's update stages on all workers first")
    path = await allowed_directory(service, body.model_path, param="model_path")
    staged = await service.worker.stage_weights(path, allow_tensors=body.allow_tensors, operation=body.operation())
    return StageReport(
        path=staged.path, digest=staged.digest, tensors=staged.tensors, bytes=staged.bytes, ignored=staged.ignored
    )


async def update(service: Service, body: UpdateBody) -> UpdateReport:
    """Replace the weights by a checkpoint; the version advances after success."""
    path = await allowed_directory(service, body.model_path, param="model_path")
    if body.weight_version is not None:
        check_version_name(body.weight_version, param="weight_version")
    return await admin_of(service).update_from_disk(
        path,
        version=body.weight_version,
        mode=body.mode,
        clear_cache=body.clear_cache,
        on_failure=body.on_failure,
        expected_digest=body.expected_digest,
        allow_tensors=body.allow_tensors,
        operation=body.operation(),
    )


async def load_lora(service: Service, body: LoadLoraBody) -> AdapterRecord:
    """Load files as the next generation of a name and make it current."""
    path = await allowed_directory(service, body.source.uri, param="source.uri")
    return await admin_of(service).load_adapter(body.lora_name, path, operation=body.operation())


async def unload_lora(service: Service, body: UnloadLoraBody) -> AdapterRecord:
    """Refuse new requests for a name; drop it when its last request ends."""
    return await admin_of(service).unload_adapter(body.lora_name, operation=body.operation())


async def list_loras(service: Service, _: Empty) -> AdapterList:
    """The adapters."""
    return AdapterList(adapters=await admin_of(service).adapters())


async def world_size(service: Service, _: Empty) -> WorldSizeReport:
    """How many ranks receive weights, over all workers.

    Raises:
        Unavailable: a worker did not say; a wrong count would hang a broadcast.
    """
    if service.role == "worker" or service.admin is None:
        return WorldSizeReport(world_size=service.engine.info.world_size)
    total = 0
    for record in await service.admin.workers():
        if record.world_size is None or record.error is not None:
            raise Unavailable(f"worker {record.instance_id} does not say its world size: {record.error or 'unknown'}")
        total += record.world_size
    return WorldSizeReport(world_size=total)


async def rl_workers(request: Request) -> Response:
    """Discovery: the live workers, their routes, versions and world sizes."""
    service: Service = request.app.state.service
    engine: object = service.engine
    if isinstance(engine, ManyFleets):
        found = await asyncio.gather(*(fleet.workers() for fleet in engine.fleets.values()))
        records = [record for records in found for record in records]
    else:
        records = await admin_of(service).workers()
    namespace = records[0].namespace if records else "rollplane"
    return json_response(WorkerList(protocol_version=RL_PROTOCOL_VERSION, namespace=namespace, workers=records))


@runtime_checkable
class ManyFleets(Protocol):
    """An engine over several fleets."""

    @property
    def fleets(self) -> Mapping[str, PolicyAdmin]:
        """Their administrations, by name."""
        ...


@runtime_checkable
class AbortsAll(Protocol):
    """An engine that knows every request it has."""

    async def abort_all(self) -> int:
        """End every live request with finish reason `abort`; how many there were."""
        ...


async def abort_all(service: Service) -> AbortReport:
    """End every live request, keeping its tokens.

    Raises:
        NotFound: this engine does not know which there are.
    """
    engine: object = service.engine
    if not isinstance(engine, AbortsAll):
        raise NotFound("this server does not know which requests are live; name them in request_ids")
    return AbortReport(aborted=await engine.abort_all())


async def post_policy(request: Request) -> Response:
    """Update the policy on every worker or on none."""
    service: Service = request.app.state.service

    async def run() -> UpdateReport:
        return await update_policy(service, await decode_body(request, PolicyBody, limit_bytes=MAX_MANIFEST_BYTES))

    return json_response(await audited(request, "update_policy", run()))


async def update_policy(service: Service, body: PolicyBody) -> UpdateReport:
    """Update from disk, or from the weight group.

    Raises:
        InvalidRequest: both sources or none. NotFound: nothing here takes weights by broadcast.
    """
    if (body.model_path is None) == (body.tensors is None):
        raise InvalidRequest("a policy comes from model_path or from tensors: give one of them", param="model_path")
    if body.tensors is None:
        path = await allowed_directory(service, body.model_path or "", param="model_path")
        version = (
            None if body.weight_version is None else check_version_name(body.weight_version, param="weight_version")
        )
        return await admin_of(service).update_from_disk(
            path,
            version=version,
            mode=body.mode,
            clear_cache=body.clear_cache,
            on_failure=body.on_failure,
            expected_digest=body.expected_digest,
            allow_tensors=body.allow_tensors,
            operation=body.operation(),
        )
    admin: object = service.admin
    if not isinstance(admin, BroadcastAdmin):
        raise NotFound("nothing here takes weights by broadcast")
    if body.allow_tensors:
        raise InvalidRequest("weights by broadcast are always the whole model", param="allow_tensors")
    if body.weight_version is None:
        raise InvalidRequest("weights by broadcast have no directory to be named by", param="weight_version")
    return await admin.update_from_broadcast(
        Manifest(tensors=body.tensors, bucket_bytes=body.bucket_bytes),
        version=check_version_name(body.weight_version, param="weight_version"),
        mode=body.mode,
        clear_cache=body.clear_cache,
        on_failure=body.on_failure,
        expected_digest=body.expected_digest,
        operation=body.operation(),
    )


_MUTATION_ERRORS = (400, 404, 409, 413, 415, 502, 503, 504)


def engine_routes() -> list[ApiRoute]:
    """Every `/engine/*` route and the RL plane's own."""
    table: list[tuple[str, Any, Any, Any, str]] = [
        ("liveness_probe", Empty, liveness_probe, LivenessReport, "The engine lives"),
        ("pause_generation", PauseBody, pause, PauseReport, "Stop making tokens; answers when idle"),
        ("resume_generation", ResumeBody, resume, ResumeReport, "Make tokens again"),
        ("flush_cache", FlushBody, flush, FlushReport, "Drop caches; 409 where they could not be dropped"),
        ("abort_request", AbortBody, abort, AbortReport, "End one request, keeping its tokens"),
        ("get_weight_version", Empty, get_version, VersionReport, "The version that makes tokens"),
        ("set_weight_version", VersionBody, set_version, VersionReport, "Change the version's label only"),
        ("stage_weights", StageBody, stage, StageReport, "Read and check a checkpoint while tokens are made"),
        ("update_weights_from_disk", UpdateBody, update, UpdateReport, "Replace the weights by a checkpoint"),
        ("load_lora", LoadLoraBody, load_lora, AdapterRecord, "Load the next generation of an adapter"),
        ("unload_lora", UnloadLoraBody, unload_lora, AdapterRecord, "Drop an adapter after its last request"),
        ("list_loras", Empty, list_loras, AdapterList, "Adapters by generation"),
        ("get_world_size", Empty, world_size, WorldSizeReport, "How many ranks receive weights"),
    ]
    reads = {"liveness_probe", "get_weight_version", "list_loras", "get_world_size"}
    routes = [
        ApiRoute(
            f"/engine/{name}",
            canonical(name, body, call),
            methods=["GET", "POST"] if name in reads else ["POST"],
            access="admin",
            doc=Doc(
                summary=summary,
                tag="administration",
                body=body,
                body_required=body not in (Empty, PauseBody, ResumeBody, FlushBody),
                answer=answer,
                errors=_MUTATION_ERRORS,
            ),
        )
        for name, body, call, answer, summary in table
    ]
    return [
        *routes,
        ApiRoute(
            "/v1/rl/workers",
            rl_workers,
            methods=["GET"],
            access="admin",
            doc=Doc(summary="Live workers", tag="discovery", answer=WorkerList, errors=(404, 502, 503)),
        ),
        ApiRoute(
            "/v1/rl/policy",
            post_policy,
            methods=["POST"],
            access="admin",
            doc=Doc(
                summary="Update the policy on every worker or on none",
                tag="administration",
                body=PolicyBody,
                answer=UpdateReport,
                errors=_MUTATION_ERRORS,
            ),
        ),
    ]
