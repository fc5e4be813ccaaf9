"""What a fleet does under its lock, and as an operation: one policy update, one change of an adapter, on all workers or none."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from rollplane.errors import Conflict, EngineFailed, NotFound, RollplaneError, TransportError
from rollplane.protocol.admin import AdapterRecord, PauseMode, UpdateReport
from rollplane.rl.base import OnFailure, Operation
from rollplane.rl.control_record import RecordFile
from rollplane.rl.fleet_broadcast import FleetGroup
from rollplane.rl.fleet_update import SETTLE_S, Checkpoint, FleetUpdate, every
from rollplane.rl.members import Member
from rollplane.rl.operation_log import OperationLogs, Tell
from rollplane.rl.operations import Operations
from rollplane.rl.roster import FleetSettings, Roster

T = TypeVar("T")


class FleetSteps(Roster):
    """A roster that runs operations on its workers.

    Args:
        settings, epoch, record: see `Roster`.
    """

    def __init__(
        self,
        *,
        settings: FleetSettings | None = None,
        epoch: int | None = None,
        record: RecordFile | None = None,
    ) -> None:
        super().__init__(settings=settings, epoch=epoch, record=record)
        self._operations = Operations()
        self.weight_group = FleetGroup()

    async def close(self) -> None:
        """Stop all tasks and let go of the workers, which go on."""
        await self._operations.close()
        await super().close()

    @property
    def operation_logs(self) -> OperationLogs:
        """What happens in operations."""
        return self._operations.logs

    def operation(self, operation_id: str) -> dict[str, str]:
        """What became of an operation: by step `running`, `done` or the sentence of its error.

        Raises:
            NotFound: nothing is known of it.
        """
        steps = {str(step): said for step, said in self._operations.status(operation_id).items()}
        if not steps:
            raise NotFound(f"no operation {operation_id!r} is known", param="operation_id")
        return steps

    async def _run(
        self,
        operation: Operation | None,
        arguments: Any,
        work: Callable[[Operation, Tell], Awaitable[T]],
        *,
        what: str,
    ) -> T:
        """Run an operation once.

        Args:
            work: gets the operation by which workers are asked, and what notes its steps.

        Raises:
            Conflict: it is of an older epoch, or was asked for with other arguments.
        """
        named = operation or Operation()
        self._check_epoch(named.epoch)

        async def begin() -> T:
            # Another name for every run: what workers remember of one that failed is not for the next.
            inner = f"{named.id or uuid.uuid4().hex}/{named.step}/{uuid.uuid4().hex[:8]}"
            asked = msgspec.structs.replace(named, id=inner, epoch=self.epoch)
            return await work(asked, self._operations.teller(named))

        return await self._operations.run(named, arguments, begin, what=what)

    def _check_epoch(self, epoch: int | None) -> None:
        if epoch is not None and epoch < self.epoch:
            raise Conflict(f"the command is of epoch {epoch}, this fleet's is {self.epoch}", param="epoch")

    def _give_up(self, results: dict[str, Any]) -> None:
        """End the epoch where a worker gave no answer: it may carry the command out later, and must not then.

        It learns of the new epoch from the next command, which it gets before it serves again.
        """
        lost = {url for url, result in results.items() if isinstance(result, TransportError)}
        if lost:
            self.epoch += 1
        for member in self.members:
            member.unsteady = member.unsteady or member.url in lost

    def _review_unsteady(self) -> None:
        for member in self.members:
            if member.unsteady:
                self._review(member)

    async def _update(
        self,
        target: Checkpoint,
        *,
        mode: PauseMode,
        clear_cache: bool,
        on_failure: OnFailure,
        operation: Operation,
        tell: Tell,
    ) -> UpdateReport:
        """Stage, gate, pause, apply, verify, settle; see `rl.fleet_update`. Under the lock."""
        began = time.monotonic()
        members = self._reached()
        previous_version = self.version or "unknown"
        settings = {
            "target": target,
            "previous": self.checkpoint or self.settings.initial,
            "mode": mode,
            "clear_cache": clear_cache,
            "on_failure": on_failure,
            "operation": operation,
            "tell": tell,
        }
        if target.path is None and target.digest is not None:
            update: FleetUpdate = self.weight_group.update(target.digest, members, **settings)
        else:
            update = FleetUpdate(members, **settings)  # type: ignore[arg-type]
        staged = await update.stage()
        if target.digest is not None and staged.digest != target.digest:
            raise Conflict(
                f"the checkpoint's digest is {staged.digest[:16]}..., expected {target.digest[:16]}...",
                param="expected_digest",
                details={"digest": staged.digest},
            )
        report = UpdateReport(
            policy_version=target.version,
            previous_version=previous_version,
            digest=staged.digest,
            tensors=staged.tensors,
            bytes=staged.bytes,
            ignored=staged.ignored,
            stage_s=time.monotonic() - began,
        )
        report.left_out = [m.url for m in self.members if m not in update.members and not m.foreign]
        if update.done_already():
            report.applied = False
            report.workers = [m.url for m in update.members]
            if self.checkpoint != update.target:
                self.checkpoint = update.target
                await self._keep()
            return report
        tell("gate")
        with self._gate("policy update"):
            stopped = time.monotonic()
            # Kept before anything is paused: an owner that ends in the middle leaves no worker paused for good.
            self.left_paused |= {m.url for m in update.members if m.paused_here or not _is_paused(m)}
            await self._keep()
            try:
                await update.apply()
                if update.outcome in ("committed", "fenced"):
                    self.checkpoint = update.target
                    self._advance(target.version)
                    await self._keep()
            finally:
                if update.unheard:
                    self.epoch += 1  # what is still on its way to them is refused from the next command on
                # The operation's deadline or a cancellation ends the steps, never the settling.
                await self._finish(asyncio.wait_for(update.settle(epoch=self.epoch), SETTLE_S))
                for member in update.members:
                    if member.state == "updating":
                        member.unheard = True
                        member.enter("fenced", "what it has could not be found out")
                self.left_paused = {m.url for m in self.members if m.paused_here}
                if update.unresumed:
                    self.epoch += 1
            await self._keep()
            fenced = {m.url for m in update.members if m.state == "fenced"}
            report.pause_s = time.monotonic() - stopped
        tell("open")
        for member in self.members:  # also those that joined meanwhile, who are behind now
            self._review(member)
        if update.outcome not in ("committed", "fenced") or not any(m.state == "current" for m in update.members):
            raise update.failure()
        report.workers = [m.url for m in update.members if m.state == "current"]
        report.fenced = {m.url: update.errors.get(m.url) or m.reason or "" for m in update.members if m.url in fenced}
        return report

    @staticmethod
    async def _finish(work: Any) -> None:
        """Run to the end also when the waiting task is cancelled meanwhile, which is then passed on."""
        task = asyncio.ensure_future(work)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        with contextlib.suppress(TimeoutError):
            task.result()

    async def _load_adapter(self, name: str, path: str, *, operation: Operation, tell: Tell) -> AdapterRecord:
        """Load on all; where one cannot, all go back. Under the lock."""
        members = self._reached()
        previous = self.adapter_paths.get(name)
        self.changing_adapters.add(name)
        self._tell()
        try:
            results = await every(
                members, lambda m: m.worker.load_adapter(name, path, operation=operation), phase="load", tell=tell
            )
            records = [r for r in results.values() if isinstance(r, AdapterRecord)]
            digests = {url: r.digest for url, r in results.items() if isinstance(r, AdapterRecord)}
            alike = len(set(digests.values())) == 1
            if len(records) < len(members) or not alike:
                done = [m for m in members if isinstance(results[m.url], AdapterRecord)]
                if not done:
                    pass  # nothing has changed anywhere
                elif previous is None:
                    self._forget_adapter(name)
                    await every(done, lambda m: m.worker.unload_adapter(name), phase="roll back", tell=tell)
                else:
                    back = previous
                    await every(done, lambda m: m.worker.load_adapter(name, back), phase="roll back", tell=tell)
            else:
                self._remember_adapter(records[0], path)
            await self._keep()
            await self._refresh(members)
        finally:
            self.changing_adapters.discard(name)
            for member in self.members:  # who did not go back is brought there, and so is who could not be reached
                self._review(member)
        failures = {url: r for url, r in results.items() if isinstance(r, RollplaneError)}
        first = next(iter(failures.values()), None)
        if first is not None and len(failures) == len(members):
            raise first  # all alike: the caller's own mistake, in its own words
        self._raise_failures(results, what="given the adapter")
        if not alike:
            raise Conflict(
                f"the workers read different contents of adapter {name!r} at {path!r}; all went back",
                param="lora_path",
                details={"digests": digests},
            )
        return records[0]

    async def _unload_adapter(self, name: str, *, operation: Operation, tell: Tell) -> AdapterRecord:
        members = self._reached()
        self._forget_adapter(name)
        await self._keep()
        results = await every(
            members, lambda m: m.worker.unload_adapter(name, operation=operation), phase="unload", tell=tell
        )
        await self._refresh(members)
        records = [r for r in results.values() if isinstance(r, AdapterRecord)]
        absent = {url for url, r in results.items() if isinstance(r, NotFound)}
        if not records and len(absent) == len(members):
            raise NotFound(f"adapter {name!r} is not loaded", param="lora_name")
        self._raise_failures({u: r for u, r in results.items() if u not in absent}, what="rid of the adapter")
        return records[0]

    async def _refresh(self, members: Sequence[Member]) -> None:
        await every(members, lambda m: m.worker.refresh())

    def _raise_failures(self, results: dict[str, Any], *, what: str) -> None:
        errors = {url: r.message for url, r in results.items() if isinstance(r, RollplaneError)}
        if errors:
            raise EngineFailed(
                f"{len(errors)} of {len(results)} workers could not be {what}: "
                + "; ".join(f"{url}: {said}" for url, said in errors.items()),
                details={"workers": errors},
            )


def _is_paused(member: Member) -> bool:
    return member.worker.state is not None and member.worker.state.paused
