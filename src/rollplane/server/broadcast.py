"""Weights from the trainer's memory: the routes of a weight group, `POST /engine/<route>`.

On a worker they act on that worker; on a frontend whose fleet can broadcast, on all workers or none. Bodies are JSON records
of names, dtypes and shapes; values travel in the group only.
"""

from typing import Annotated, Any

from msgspec import Meta

from rollplane.errors import NotFound
from rollplane.protocol.admin import PauseMode, UpdateReport
from rollplane.protocol.broadcast import (
    ALIGN_BYTES,
    DEFAULT_BUCKET_BYTES,
    MAX_BUCKET_BYTES,
    MAX_RANKS,
    Backend,
    GroupReport,
    Manifest,
    TensorSpec,
    TransferGroup,
)
from rollplane.protocol.versions import check_version_name
from rollplane.rl.base import BroadcastAdmin
from rollplane.rl.fleet import Fleet
from rollplane.server.admin import MAX_MANIFEST_BYTES, StageReport
from rollplane.server.admin_calls import OperationBody, canonical
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service
from rollplane.worker import Worker


class InitGroupBody(OperationBody, frozen=True, kw_only=True):
    """A group to join; see `TransferGroup`. `deadline_s`: for all ranks to come."""

    master_address: Annotated[str, Meta(min_length=1, max_length=255)]
    master_port: Annotated[int, Meta(ge=1, le=65_535)]
    world_size: Annotated[int, Meta(ge=2, le=MAX_RANKS)]
    rank_offset: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    group_name: Annotated[str, Meta(min_length=1, max_length=128)] = "weights"
    backend: Backend = "gloo"

    def group(self) -> TransferGroup:
        """The group it names."""
        return TransferGroup(
            master_address=self.master_address,
            master_port=self.master_port,
            world_size=self.world_size,
            rank_offset=self.rank_offset,
            group_name=self.group_name,
            backend=self.backend,
        )


class StageBroadcastBody(OperationBody, frozen=True, kw_only=True):
    """Tensors that rank 0 now broadcasts, in this order; kept beside the model until `apply_staged_weights`."""

    tensors: Annotated[list[TensorSpec], Meta(min_length=1)]
    bucket_bytes: Annotated[int, Meta(ge=ALIGN_BYTES, le=MAX_BUCKET_BYTES)] = DEFAULT_BUCKET_BYTES

    def manifest(self) -> Manifest:
        """What is broadcast."""
        return Manifest(tensors=self.tensors, bucket_bytes=self.bucket_bytes)


class UpdateBroadcastBody(StageBroadcastBody, frozen=True, kw_only=True):
    """Tensors that rank 0 now broadcasts, to serve from then on. `expected_digest`: refuse other contents."""

    weight_version: Annotated[str, Meta(min_length=1, max_length=256)]
    mode: PauseMode = "keep"
    clear_cache: bool = False
    expected_digest: str | None = None


class ApplyBody(OperationBody, frozen=True, kw_only=True):
    """Staged weights to serve from now on, by their digest (64 hex digits)."""

    digest: Annotated[str, Meta(min_length=1, max_length=128)]
    weight_version: Annotated[str, Meta(min_length=1, max_length=256)]
    mode: PauseMode = "keep"
    clear_cache: bool = False


class DestroyGroupBody(OperationBody, frozen=True, kw_only=True):
    """The group to leave; without one nothing happens."""


async def init_group(service: Service, body: InitGroupBody) -> GroupReport:
    """Join a group; answers when all of its ranks are there."""
    return await _broadcasting(service).init_weights_group(body.group(), operation=body.operation())


async def stage_broadcast(service: Service, body: StageBroadcastBody) -> StageReport:
    """Receive weights and keep them beside the model."""
    staged = await _staging(service).stage_broadcast(body.manifest(), operation=body.operation())
    return StageReport(path=staged.path, digest=staged.digest, tensors=staged.tensors, bytes=staged.bytes)


async def update_broadcast(service: Service, body: UpdateBroadcastBody) -> UpdateReport:
    """Receive weights while tokens are made, then put them in place."""
    return await _broadcasting(service).update_from_broadcast(
        body.manifest(),
        version=check_version_name(body.weight_version, param="weight_version"),
        mode=body.mode,
        clear_cache=body.clear_cache,
        expected_digest=body.expected_digest,
        operation=body.operation(),
    )


async def apply_staged(service: Service, body: ApplyBody) -> UpdateReport:
    """Put staged weights in place."""
    return await _staging(service).apply_staged(
        body.digest,
        version=check_version_name(body.weight_version, param="weight_version"),
        mode=body.mode,
        clear_cache=body.clear_cache,
        operation=body.operation(),
    )


async def destroy_group(service: Service, body: DestroyGroupBody) -> GroupReport:
    """Leave the group; what is under way in it ends."""
    return await _broadcasting(service).destroy_weights_group(operation=body.operation())


def _broadcasting(service: Service) -> BroadcastAdmin:
    admin: object = service.admin
    if not isinstance(admin, BroadcastAdmin):
        raise NotFound("weights by broadcast are a worker's routes here; ask each worker")
    return admin


def _staging(service: Service) -> Worker | Fleet:
    admin: object = service.worker or service.admin
    if not isinstance(admin, Worker | Fleet):
        raise NotFound("weights cannot be staged and applied in two steps here")
    return admin


def broadcast_routes() -> list[ApiRoute]:
    """Every route of a weight group."""
    table: list[tuple[str, Any, Any, Any, str]] = [
        ("init_weights_update_group", InitGroupBody, init_group, GroupReport, "Join a trainer's weight group"),
        (
            "update_weights_from_distributed",
            UpdateBroadcastBody,
            update_broadcast,
            UpdateReport,
            "Receive weights from the trainer and serve them",
        ),
        (
            "stage_weights_from_distributed",
            StageBroadcastBody,
            stage_broadcast,
            StageReport,
            "Receive weights from the trainer and keep them aside",
        ),
        ("apply_staged_weights", ApplyBody, apply_staged, UpdateReport, "Serve weights that were staged"),
        ("destroy_weights_update_group", DestroyGroupBody, destroy_group, GroupReport, "Leave the weight group"),
    ]
    return [
        ApiRoute(
            f"/engine/{name}",
            canonical(name, body, call, limit_bytes=MAX_MANIFEST_BYTES),
            methods=["POST"],
            access="admin",
            doc=Doc(
                summary=summary,
                tag="administration",
                body=body,
                body_required=body is not DestroyGroupBody,
                answer=answer,
                errors=(400, 404, 409, 413, 415, 502, 503, 504),
            ),
        )
        for name, body, call, answer, summary in table
    ]
