"""How a policy's life is controlled: one interface for a worker and for a whole fleet.

Every public name for an operation (canonical `/engine/*`, prime-rl's, vLLM's own) ends in one of these calls. On a
worker they act on that worker (`rollplane.worker.Worker`), on a frontend on all workers or none (`rl.fleet.Fleet`).
"""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from rollplane.protocol.admin import (
    AdapterRecord,
    AllowTensors,
    FlushReport,
    PauseMode,
    PauseReport,
    ResumeReport,
    UpdateReport,
    WorkerRecord,
)
from rollplane.protocol.broadcast import GroupReport, Manifest, TransferGroup

OnFailure = Literal["rollback", "fence"]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Names one asking of an operation, so that it may be asked for again.

    A repeat with the same (`id`, `step`) and the same arguments gets the first answer (or waits for it); other
    arguments under the same name are a Conflict. `epoch`: the control owner's; a worker refuses an older one.
    `deadline_s`: seconds for the whole operation.
    """

    id: str | None = None
    step: int = 0
    epoch: int | None = None
    deadline_s: float = 600.0


@runtime_checkable
class PolicyAdmin(Protocol):
    """Pause, update and inspect a policy. Errors are `rollplane.errors`; answers say what was done."""

    async def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, epoch: int | None = None
    ) -> PauseReport:
        """Stop making tokens; returns when idle. Idempotent. `epoch`: the control owner's; an older one is refused."""
        ...

    async def resume(self, *, epoch: int | None = None) -> ResumeReport:
        """Make tokens again. Idempotent. `epoch`: see `pause`.

        Raises:
            Unavailable: the weights in place are of unknown version.
        """
        ...

    async def update_from_disk(
        self,
        path: str,
        *,
        version: str | None = None,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        on_failure: OnFailure = "rollback",
        expected_digest: str | None = None,
        allow_tensors: Sequence[AllowTensors] = (),
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Replace the weights by a checkpoint directory (safetensors); generation goes on while it is staged.

        `version` None: the directory's name. A target that was paused before stays paused, one that was running pauses
        for the apply only and resumes. The version advances last, after success. The same digest and version again is
        no work (`applied` False). `expected_digest`: refuse other contents. `allow_tensors`: see
        `WeightReceiver.stage_weights`.
        """
        ...

    async def policy_version(self) -> str:
        """The version that makes tokens now.

        Raises:
            Conflict: workers disagree (fleet).
        """
        ...

    async def set_policy_version(self, version: str, *, epoch: int | None = None) -> None:
        """Change the label only; aborts nothing. `epoch`: see `pause`."""
        ...

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """Drop caches that no running request holds; the report says whether it happened."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """The workers behind this address, one for a worker itself."""
        ...

    async def load_adapter(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        """Load files as the next generation of an adapter name and make it current."""
        ...

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """Refuse new requests for the name at once; drop it when its last request ends."""
        ...

    async def adapters(self) -> list[AdapterRecord]:
        """Every generation that is loading, ready or draining."""
        ...


@runtime_checkable
class BroadcastAdmin(Protocol):
    """Weights from the trainer's memory, in a collective group whose rank 0 is the trainer."""

    async def init_weights_group(self, group: TransferGroup, *, operation: Operation | None = None) -> GroupReport:
        """Join; answers when every rank of the group is there. One group at a time."""
        ...

    async def update_from_broadcast(
        self,
        manifest: Manifest,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        on_failure: OnFailure = "rollback",
        expected_digest: str | None = None,
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Receive while tokens are made, then pause, apply, verify and resume; all of it or nothing."""
        ...

    async def destroy_weights_group(self, *, operation: Operation | None = None) -> GroupReport:
        """Leave; what is under way in the group ends. Idempotent."""
        ...
