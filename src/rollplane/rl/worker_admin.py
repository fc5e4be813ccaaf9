"""A worker's administration: every call that changes its policy, held to the control owner's epoch."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from rollplane.errors import Conflict, InvalidRequest
from rollplane.protocol.admin import (
    AdapterRecord,
    AllowTensors,
    FlushReport,
    PauseMode,
    PauseReport,
    ResumeReport,
    SleepReport,
    StagedWeights,
    TransferReport,
    UpdateReport,
    WorkerRecord,
)
from rollplane.protocol.broadcast import GroupReport, Manifest, TransferGroup
from rollplane.protocol.info import EngineInfo
from rollplane.rl.adapters import AdapterTable
from rollplane.rl.base import OnFailure, Operation
from rollplane.rl.broadcast import BroadcastControl
from rollplane.rl.native import SLEEP_LEVEL, NativeControl
from rollplane.rl.weights import PolicyControl


class WorkerAdmin(ABC):
    """A `PolicyAdmin` and `BroadcastAdmin` over one engine's controls, each None where the engine has none of it."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.cache_generation = 0
        """Grows whenever cached KV may be gone: routers forget what they knew of it, whatever the engine's events say."""
        self.policy: PolicyControl | None = None
        self.broadcast: BroadcastControl | None = None
        self.native: NativeControl | None = None
        self.adapter_table: AdapterTable | None = None

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """The engine's facts."""

    @property
    def version(self) -> str:
        """The policy version that makes tokens."""
        return self.policy.version if self.policy is not None else "default"

    @abstractmethod
    def record(self) -> WorkerRecord:
        """This worker as discovery shows it, now."""

    @abstractmethod
    def _tell(self) -> None:
        """Something changed that followers look at."""

    # -- PolicyAdmin -----------------------------------------------------------------------------------------------

    async def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, epoch: int | None = None
    ) -> PauseReport:
        """See `PolicyAdmin.pause`."""
        self._check_epoch(epoch)
        if mode == "keep" and not clear_cache:
            return await self._policy().pause(mode)
        with self._cache_in_doubt():
            return await self._policy().pause(mode, clear_cache=clear_cache)

    async def resume(self, *, epoch: int | None = None) -> ResumeReport:
        """See `PolicyAdmin.resume`."""
        self._check_epoch(epoch)
        return await self._policy().resume()

    async def stage_weights(
        self, path: str, *, allow_tensors: Sequence[AllowTensors] = (), operation: Operation | None = None
    ) -> StagedWeights:
        """Read and check a checkpoint while tokens are made; a following update with its digest uses it."""
        self._check_epoch(None if operation is None else operation.epoch)
        return await self._policy().stage(path, allow_tensors=allow_tensors, operation=operation)

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
        """See `PolicyAdmin.update_from_disk`. One worker needs no roll-back: a refused update leaves it as it was."""
        self._check_epoch(None if operation is None else operation.epoch)
        with self._cache_in_doubt():
            return await self._policy().update_from_disk(
                path,
                version=version,
                mode=mode,
                clear_cache=clear_cache,
                expected_digest=expected_digest,
                allow_tensors=allow_tensors,
                operation=operation,
            )

    async def apply_staged(
        self,
        digest: str,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Put weights in place that were staged before, from a directory or a broadcast, by their digest."""
        self._check_epoch(None if operation is None else operation.epoch)
        with self._cache_in_doubt():
            return await self._policy().apply_staged(
                digest, version=version, mode=mode, clear_cache=clear_cache, operation=operation
            )

    async def init_weights_group(self, group: TransferGroup, *, operation: Operation | None = None) -> GroupReport:
        """See `BroadcastControl.init`."""
        self._check_epoch(None if operation is None else operation.epoch)
        return await self._broadcast().init(group, operation=operation)

    async def stage_broadcast(self, manifest: Manifest, *, operation: Operation | None = None) -> StagedWeights:
        """See `BroadcastControl.stage`."""
        self._check_epoch(None if operation is None else operation.epoch)
        return await self._broadcast().stage(manifest, operation=operation)

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
        """See `BroadcastControl.update`. One worker needs no roll-back: a refused update leaves it as it was."""
        self._check_epoch(None if operation is None else operation.epoch)
        with self._cache_in_doubt():
            return await self._broadcast().update(
                manifest,
                version=version,
                mode=mode,
                clear_cache=clear_cache,
                expected_digest=expected_digest,
                operation=operation,
            )

    async def destroy_weights_group(self, *, operation: Operation | None = None) -> GroupReport:
        """See `BroadcastControl.destroy`."""
        self._check_epoch(None if operation is None else operation.epoch)
        return await self._broadcast().destroy(operation=operation)

    # The engine's own transfer and sleep: each server joins a trainer's group by itself, so these are a worker's -------

    async def init_weight_transfer(self, info: dict[str, Any], *, operation: Operation | None = None) -> TransferReport:
        """See `NativeControl.init`."""
        self._check_epoch(None if operation is None else operation.epoch)
        return await self._native().init(info, operation=operation)

    async def start_weight_update(self, *, operation: Operation | None = None) -> TransferReport:
        """See `NativeControl.start`."""
        self._check_epoch(None if operation is None else operation.epoch)
        return await self._native().start(operation=operation)

    async def update_weights(self, info: dict[str, Any], *, operation: Operation | None = None) -> TransferReport:
        """See `NativeControl.update`."""
        self._check_epoch(None if operation is None else operation.epoch)
        with self._cache_in_doubt():
            return await self._native().update(info, operation=operation)

    async def finish_weight_update(
        self, version: str | None = None, *, operation: Operation | None = None
    ) -> TransferReport:
        """See `NativeControl.finish`."""
        self._check_epoch(None if operation is None else operation.epoch)
        with self._cache_in_doubt():
            return await self._native().finish(version, operation=operation)

    async def sleep(
        self, *, level: int = SLEEP_LEVEL, mode: PauseMode = "abort", operation: Operation | None = None
    ) -> SleepReport:
        """See `NativeControl.sleep`."""
        self._check_epoch(None if operation is None else operation.epoch)
        with self._cache_in_doubt():
            return await self._native().sleep(level=level, mode=mode, operation=operation)

    async def wake_up(self, tags: list[str] | None = None, *, operation: Operation | None = None) -> SleepReport:
        """See `NativeControl.wake_up`."""
        self._check_epoch(None if operation is None else operation.epoch)
        return await self._native().wake_up(tags, operation=operation)

    async def policy_version(self) -> str:
        """See `PolicyAdmin.policy_version`."""
        return self.version

    async def set_policy_version(self, version: str, *, epoch: int | None = None) -> None:
        """See `PolicyAdmin.set_policy_version`."""
        self._check_epoch(epoch)
        await self._policy().set_version(version)

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """See `PolicyAdmin.flush_cache`."""
        with self._cache_in_doubt():
            return await self._policy().flush(preempt=preempt)

    async def workers(self) -> list[WorkerRecord]:
        """This worker."""
        return [self.record()]

    async def load_adapter(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.load_adapter`."""
        self._check_epoch(None if operation is None else operation.epoch)
        if self.info.serves(name):
            raise Conflict(f"{name!r} is the base model's name", param="lora_name")
        return await self._adapter_table().load(name, path, operation=operation)

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.unload_adapter`."""
        self._check_epoch(None if operation is None else operation.epoch)
        return await self._adapter_table().unload(name, operation=operation)

    async def adapters(self) -> list[AdapterRecord]:
        """See `PolicyAdmin.adapters`."""
        return self.adapter_table.records() if self.adapter_table is not None else []

    # -----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _cache_in_doubt(self) -> Iterator[None]:
        """What is cached may be gone when this ends, however it ends."""
        try:
            yield
        finally:
            self.cache_generation += 1
            self._tell()

    def _policy(self) -> PolicyControl:
        if self.policy is None:
            raise InvalidRequest(f"the {self.info.engine} engine cannot be paused or updated")
        return self.policy

    def _native(self) -> NativeControl:
        if self.native is None:
            raise InvalidRequest(f"the {self.info.engine} engine has no weight transfer and no sleep of its own")
        return self.native

    def _broadcast(self) -> BroadcastControl:
        if self.broadcast is None:
            raise InvalidRequest(
                f"the {self.info.engine} engine receives no weights by broadcast; it takes "
                f"{', '.join(self.info.capabilities.weight_transfer) or 'none'}"
            )
        return self.broadcast

    def _adapter_table(self) -> AdapterTable:
        if self.adapter_table is None:
            raise InvalidRequest(f"the {self.info.engine} engine was started without LoRA")
        return self.adapter_table

    def _check_epoch(self, epoch: int | None) -> None:
        """A command of an owner that was replaced, or that gave it up, is refused; a newer epoch is remembered."""
        if epoch is None:
            return
        if self.epoch is not None and epoch < self.epoch:
            raise Conflict(f"the command is of epoch {epoch}, this worker follows epoch {self.epoch}")
        self.epoch = epoch
