"""Administration: what is asked of a worker and what it answers. One record per operation, shared by every name it has."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from rollplane.protocol.info import Capabilities, EngineState

PauseMode = Literal["keep", "wait", "abort"]
LONGEST_EVENT_WAIT_S: Final = 2.0
"""Of one call for the events of an operation that has not begun; whoever waits longer asks again."""
AllowTensors = Literal["missing", "unexpected"]
"""Tensors of a model that a checkpoint lacks, and those of a checkpoint that the model has no place for."""
OperationEventKind = Literal["began", "phase", "worker", "done", "failed"]


class PauseReport(msgspec.Struct, kw_only=True):
    """What a pause did. Counts are requests; `cleared`: None not asked, False asked and not possible."""

    mode: PauseMode
    already_paused: bool
    kept: int = 0
    aborted: int = 0
    drained: int = 0
    cleared: bool | None = None


class ResumeReport(msgspec.Struct, kw_only=True):
    """What a resume did; `was_paused` False: it was running already, nothing changed."""

    was_paused: bool
    policy_version: str


class FlushReport(msgspec.Struct, kw_only=True):
    """What a cache reset did. `blocks_freed` None where the engine does not say."""

    reset: bool
    blocks_freed: int | None = None
    preempted: int = 0
    reason: str | None = None


MISMATCHES_NAMED: Final = 8
"""How many of a checkpoint's missing or unexpected tensors an answer names; it counts them all."""


class TensorMismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Where a checkpoint differs from the model, which the caller allowed. The lists name the first few.

    `missing`: tensors that kept the values the model had. `unexpected`: tensors that were left unread.
    """

    missing: int = 0
    unexpected: int = 0
    missing_names: list[str] = msgspec.field(default_factory=list)
    unexpected_names: list[str] = msgspec.field(default_factory=list)


def mismatch_of(missing: Sequence[str], unexpected: Sequence[str]) -> TensorMismatch | None:
    """What is told of a mismatch; None where there is none."""
    if not missing and not unexpected:
        return None
    return TensorMismatch(
        missing=len(missing),
        unexpected=len(unexpected),
        missing_names=list(missing[:MISMATCHES_NAMED]),
        unexpected_names=list(unexpected[:MISMATCHES_NAMED]),
    )


class StagedWeights(msgspec.Struct, kw_only=True):
    """A checkpoint that was read and checked against the model without touching it.

    `digest`: sha256 over names, dtypes, shapes and contents, 64 hex digits; of what the model will have, so with the
    tensors that it keeps and without those that were left unread. `ignored`: where the two differ and that was allowed.
    `handle`: the engine's own.
    """

    path: str
    digest: str
    tensors: int
    bytes: int
    ignored: TensorMismatch | None = None
    handle: Any = None


class UpdateReport(msgspec.Struct, kw_only=True):
    """What a weight update did. `applied` False: this digest and version were current already.

    `ignored`: see `StagedWeights`. Of a fleet: `workers`: the addresses that serve it now; `fenced`: those that failed, with the reason, and get no requests;
    `left_out`: those that could not be reached, which are brought to it when they come back.
    """

    policy_version: str
    previous_version: str
    digest: str
    tensors: int
    bytes: int
    applied: bool = True
    stage_s: float = 0.0
    pause_s: float = 0.0
    ignored: TensorMismatch | None = None
    workers: list[str] = msgspec.field(default_factory=list)
    fenced: dict[str, str] = msgspec.field(default_factory=dict)
    left_out: list[str] = msgspec.field(default_factory=list)


class TransferReport(msgspec.Struct, kw_only=True):
    """Where weights by the engine's own transfer are, after a step. `parts`: those that the last update took.

    `open`: an update was started and not finished. `pause_s`: of a finished one, from its start to its end.
    """

    backend: str
    open: bool
    parts: int
    policy_version: str
    previous_version: str | None = None
    pause_s: float | None = None


class SleepReport(msgspec.Struct, kw_only=True):
    """What sleep or waking did. Counts are requests; `was_sleeping`: how it was before."""

    is_sleeping: bool
    was_sleeping: bool
    aborted: int = 0
    drained: int = 0


class AdapterRecord(msgspec.Struct, kw_only=True):
    """One generation of an adapter. `leases`: requests that use it now. `trouble`: why the engine did not drop it yet."""

    name: str
    generation: int
    engine_name: str
    path: str
    digest: str
    rank: int
    state: Literal["loading", "ready", "draining", "gone"]
    leases: int = 0
    trouble: str | None = None


class WorkerRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker in `GET /v1/rl/workers`, protocol version 1. `capabilities` and what follows are ours."""

    namespace: str
    component: str
    endpoint: str
    instance_id: str
    transport: Any
    request_plane_url: str
    system_url: str
    model: str
    routes: list[str]
    world_size: int | None = None
    admin_base_url: str | None = None
    capabilities: Capabilities | None = None
    policy_version: str | None = None
    policy_digest: str | None = None
    state: EngineState | None = None
    adapters: list[AdapterRecord] = msgspec.field(default_factory=list)
    error: str | None = None


class OperationEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened in an operation. `number`: 1, 2, ... within the operation, `at_s`: seconds since 1970.

    `began`: a step of it, `what`. `phase`: a part begins, on all workers. `worker`: that part ended on one, after `seconds`,
    `error` where it failed. `done`: with its `report`. `failed`: with the error's sentence, its `code` and `details`.
    """

    number: int
    at_s: float
    event: OperationEventKind
    step: int = 0
    what: str | None = None
    phase: str | None = None
    worker: str | None = None
    seconds: float | None = None
    report: dict[str, Any] | None = None
    error: str | None = None
    code: str | None = None
    details: dict[str, Any] | None = None
