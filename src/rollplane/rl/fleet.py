"""All workers of one model as one policy: every operation on all of them or none.

The fleet is the control owner: it holds the epoch, the version sequence, the operations and what a late joiner must
have. The lifecycle of a worker is the table in `rl.members`; who is there is in `rl.roster`; the steps of an update are
in `rl.fleet_update`.
"""

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rollplane.errors import Conflict, EngineFailed, NotFound, RollplaneError, Unavailable
from rollplane.protocol.admin import (
    AdapterRecord,
    FlushReport,
    PauseMode,
    PauseReport,
    ResumeReport,
    StagedWeights,
    UpdateReport,
    WorkerRecord,
)
from rollplane.protocol.broadcast import GroupReport, Manifest, TransferGroup
from rollplane.protocol.versions import check_version_name
from rollplane.rl.base import OnFailure, Operation
from rollplane.rl.control_record import RecordFile
from rollplane.rl.fleet_broadcast import FleetGroup
from rollplane.rl.fleet_records import record_of
from rollplane.rl.fleet_update import SETTLE_S, Checkpoint, FleetUpdate, every
from rollplane.rl.members import Member
from rollplane.rl.operations import Operations
from rollplane.rl.roster import FleetSettings as FleetSettings  # settings come with the thing they set
from rollplane.rl.roster import Roster

T = TypeVar("T")

MAX_FAILURES: Final = 256
"""Failed operations whose error can still be asked for."""


class Fleet(Roster):
    """The workers of one model; a `PolicyAdmin`.

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
        self._failures: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        states = [member.state for member in self._members.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no workers"
        gate = f", held for {self.held_for}" if self.held_for else ""
        return f"<Fleet {self.version or '?'} epoch={self.epoch}: {counts}{gate}>"

    async def close(self) -> None:
        """Stop all tasks and let go of the workers, which go on."""
        await self._operations.close()
        await super().close()

    # -- PolicyAdmin -----------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> PauseReport:
        """Pause all workers; requests that come meanwhile wait at the router. If one cannot, those paused here resume.

        Raises:
            EngineFailed: a worker could not be paused; by address in `details`.
        """
        async with self._lock:
            members = self._reached()
            with self._gate("pause"):
                results = await every(members, lambda m: m.worker.pause(mode, clear_cache=clear_cache))
                reports = {url: r for url, r in results.items() if isinstance(r, PauseReport)}
                if len(reports) < len(members):
                    mine = [m for m in members if m.url in reports and not reports[m.url].already_paused]
                    await every(mine, lambda m: m.worker.resume())
                else:
                    self.paused = True
                    await self._keep()
                await self._refresh(members)
            self._raise_failures(results, what="paused")
        cleared = [report.cleared for report in reports.values()]
        return PauseReport(
            mode=mode,
            already_paused=all(report.already_paused for report in reports.values()),
            kept=sum(report.kept for report in reports.values()),
            aborted=sum(report.aborted for report in reports.values()),
            drained=sum(report.drained for report in reports.values()),
            cleared=None if None in cleared else all(cleared),
        )

    async def resume(self) -> ResumeReport:
        """Resume every worker that is at the fleet's version.

        Raises:
            EngineFailed: a worker could not resume; by address in `details`.
            Unavailable: no worker has weights of a known version.
        """
        async with self._lock:
            members = [m for m in self._reached() if m.state == "current"]
            if not members:
                raise Unavailable(f"no worker is at the fleet's version: {self._why()}", retry_after_s=None)
            results = await every(members, lambda m: m.worker.resume())
            self.paused = False
            await self._keep()
            await self._refresh(members)
            self._tell()
            self._raise_failures(results, what="resumed")
            reports = [r for r in results.values() if isinstance(r, ResumeReport)]
        return ResumeReport(
            was_paused=any(report.was_paused for report in reports), policy_version=reports[0].policy_version
        )

    async def update_from_disk(
        self,
        path: str,
        *,
        version: str | None = None,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        on_failure: OnFailure = "rollback",
        expected_digest: str | None = None,
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Replace the weights of all workers; see `PolicyAdmin.update_from_disk` and `rl.fleet_update`.

        Workers that cannot be reached now are brought up to date when they come back.

        Raises:
            Conflict: the operation's id was used with other arguments, or workers read different contents.
            EngineFailed: not all workers have it; `details` say who has what.
            Unavailable: no worker can be reached.
        """
        name = check_version_name(version if version is not None else Path(path).name, param="weight_version")
        named = operation or Operation()
        if named.id is None:
            named = msgspec.structs.replace(named, id=uuid.uuid4().hex)
        inner = msgspec.structs.replace(named, id=f"{named.id}/{named.step}/{uuid.uuid4().hex[:8]}", epoch=self.epoch)
        self._check_epoch(named)

        async def work() -> UpdateReport:
            async with self._lock:
                return await self._update(
                    Checkpoint(path=path, version=name, digest=expected_digest),
                    mode=mode,
                    clear_cache=clear_cache,
                    on_failure=on_failure,
                    operation=inner,
                )

        arguments = ("update", path, name, mode, clear_cache, on_failure, expected_digest)
        return await self._run(named, arguments, work, what="policy update of the fleet")

    # -- BroadcastAdmin --------------------------------------------------------------------------------------------

    async def init_weights_group(self, group: TransferGroup, *, operation: Operation | None = None) -> GroupReport:
        """Let every worker that can be reached join a trainer's group; see `FleetGroup.init`."""
        named = operation or Operation()
        self._check_epoch(named)
        inner = self._inner(named)

        async def work() -> GroupReport:
            return await self.weight_group.init(group, self._reached(), operation=inner)

        return await self._run(named, ("init group", group), work, what="joining of a weight group")

    async def stage_broadcast(self, manifest: Manifest, *, operation: Operation | None = None) -> StagedWeights:
        """Let every worker receive, and keep it beside the models; see `FleetGroup.receive`."""
        named = operation or Operation()
        self._check_epoch(named)
        inner = self._inner(named)

        async def work() -> StagedWeights:
            return await self.weight_group.receive(manifest, operation=inner)

        return await self._run(named, ("stage broadcast", manifest), work, what="receiving of weights")

    async def apply_staged(
        self,
        digest: str,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        on_failure: OnFailure = "rollback",
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Put what all workers have received in place on all of them, as one policy update."""
        check_version_name(version, param="weight_version")
        named = operation or Operation()
        self._check_epoch(named)
        inner = self._inner(named)

        async def work() -> UpdateReport:
            async with self._lock:
                return await self._update(
                    Checkpoint(path=None, version=version, digest=digest),
                    mode=mode,
                    clear_cache=clear_cache,
                    on_failure=on_failure,
                    operation=inner,
                )

        arguments = ("apply", digest, version, mode, clear_cache, on_failure)
        return await self._run(named, arguments, work, what="policy update of the fleet")

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
        """Let all workers receive while tokens are made, then update all of them or none.

        Raises:
            Conflict: no group, other bytes than expected, or a serving worker that is not in the group; nothing changed.
            EngineFailed: not all workers have it; `details` say who has what.
        """
        check_version_name(version, param="weight_version")
        named = operation or Operation()
        self._check_epoch(named)
        inner = self._inner(named)

        async def work() -> UpdateReport:
            staged = await self.weight_group.receive(manifest, operation=inner)
            if expected_digest is not None and staged.digest != expected_digest:
                raise Conflict(
                    f"the weights' digest is {staged.digest[:16]}..., expected {expected_digest[:16]}...",
                    param="expected_digest",
                    details={"digest": staged.digest},
                )
            async with self._lock:
                return await self._update(
                    Checkpoint(path=None, version=version, digest=staged.digest),
                    mode=mode,
                    clear_cache=clear_cache,
                    on_failure=on_failure,
                    operation=inner,
                )

        arguments = ("broadcast", manifest, version, mode, clear_cache, on_failure, expected_digest)
        return await self._run(named, arguments, work, what="policy update of the fleet by broadcast")

    async def destroy_weights_group(self, *, operation: Operation | None = None) -> GroupReport:
        """Let every worker leave the group."""
        return await self.weight_group.destroy()

    async def policy_version(self) -> str:
        """The version of all workers that take requests.

        Raises:
            Conflict: workers disagree.
            Unavailable: no worker takes requests.
        """
        versions = {m.url: m.version for m in self._members.values() if m.state == "current" and m.version is not None}
        if not versions:
            raise Unavailable(f"no worker is current: {self._why()}")
        if len(set(versions.values())) > 1:
            raise Conflict("the workers have different policy versions", details={"policy_versions": versions})
        return next(iter(versions.values()))

    async def set_policy_version(self, version: str) -> None:
        """Change the label on all workers; aborts nothing.

        Raises:
            EngineFailed: a worker refused; by address in `details`.
        """
        check_version_name(version, param="weight_version")
        async with self._lock:
            members = [m for m in self._reached() if m.state == "current"]
            with self._gate("version label"):
                results = await every(members, lambda m: m.worker.set_policy_version(version))
                if self.checkpoint is not None:
                    self.checkpoint = msgspec.structs.replace(self.checkpoint, version=version)
                self._advance(version)
                await self._keep()
                await self._refresh(members)
            self._raise_failures(results, what="relabelled")

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """Drop the caches of all workers; `reset` is True only where every one did."""
        members = self._reached()
        results = await every(members, lambda m: m.worker.flush_cache(preempt=preempt))
        self._raise_failures(results, what="flushed")
        reports = {url: r for url, r in results.items() if isinstance(r, FlushReport)}
        freed = [r.blocks_freed for r in reports.values() if r.blocks_freed is not None]
        return FlushReport(
            reset=all(r.reset for r in reports.values()),
            blocks_freed=sum(freed) if len(freed) == len(reports) else None,
            preempted=sum(r.preempted for r in reports.values()),
            reason="; ".join(f"{url}: {r.reason}" for url, r in reports.items() if r.reason) or None,
        )

    async def workers(self) -> list[WorkerRecord]:
        """Every member's record with its place in the fleet; a worker that cannot be asked has an `error`."""
        members = self.members
        results = await every(members, lambda m: m.worker.workers())
        return [record_of(m, results[m.url]) for m in members]

    async def load_adapter(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        """Load an adapter on all workers; requests for its name wait until all have it. If one fails, all go back.

        Raises:
            NotFound, InvalidRequest: no such files, or ones that do not fit.
            EngineFailed: a worker failed; `details` say who.
        """
        named = operation or Operation()
        self._check_epoch(named)
        inner = self._inner(named)

        async def work() -> AdapterRecord:
            async with self._lock:
                return await self._load_adapter(name, path, operation=inner)

        return await self._run(named, ("load", name, path), work, what=f"loading of adapter {name!r}")

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """Drop an adapter on all workers; returns when its last request has ended.

        Raises:
            NotFound: no worker has it.
        """
        named = operation or Operation()
        self._check_epoch(named)
        inner = self._inner(named)

        async def work() -> AdapterRecord:
            async with self._lock:
                members = self._reached()
                self.adapter_paths.pop(name, None)
                await self._keep()
                results = await every(members, lambda m: m.worker.unload_adapter(name, operation=inner))
                await self._refresh(members)
                records = [r for r in results.values() if isinstance(r, AdapterRecord)]
                absent = {url for url, r in results.items() if isinstance(r, NotFound)}
                if not records and len(absent) == len(members):
                    raise NotFound(f"adapter {name!r} is not loaded", param="lora_name")
                self._raise_failures({u: r for u, r in results.items() if u not in absent}, what="rid of the adapter")
                return records[0]

        return await self._run(named, ("unload", name), work, what=f"unloading of adapter {name!r}")

    async def adapters(self) -> list[AdapterRecord]:
        """Every generation on any worker, one record per engine-side name; leases are summed."""
        found: dict[str, AdapterRecord] = {}
        for member in self._members.values():
            for record in member.worker.state.adapters if member.worker.state is not None else ():
                seen = found.get(record.engine_name)
                found[record.engine_name] = (
                    record if seen is None else msgspec.structs.replace(seen, leases=seen.leases + record.leases)
                )
        return list(found.values())

    def operation(self, operation_id: str) -> dict[str, str]:
        """What became of an operation: by step `running`, `done` or the sentence of its error.

        Raises:
            NotFound: nothing is known of it.
        """
        steps = {str(step): said for step, said in self._operations.status(operation_id).items()}
        failed = {
            key.partition("\0")[2]: said for key, said in self._failures.items() if key.startswith(operation_id + "\0")
        }
        if not steps and not failed:
            raise NotFound(f"no operation {operation_id!r} is known", param="operation_id")
        return {**failed, **steps}

    # -- the steps under the lock ----------------------------------------------------------------------------------

    async def _update(
        self,
        target: Checkpoint,
        *,
        mode: PauseMode,
        clear_cache: bool,
        on_failure: OnFailure,
        operation: Operation,
    ) -> UpdateReport:
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
                # The operation's deadline or a cancellation ends the steps, never the settling.
                await self._finish(asyncio.wait_for(update.settle(), SETTLE_S))
                for member in update.members:
                    if member.state == "updating":
                        member.unheard = True
                        member.enter("fenced", "what it has could not be found out")
                self.left_paused = {m.url for m in self.members if m.paused_here}
                if update.unanswered:
                    self.epoch += 1  # what is still on its way to them is refused from the next command on
            await self._keep()
            fenced = {m.url for m in update.members if m.state == "fenced"}
            report.pause_s = time.monotonic() - stopped
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

    async def _load_adapter(self, name: str, path: str, *, operation: Operation) -> AdapterRecord:
        members = self._reached()
        previous = self.adapter_paths.get(name)
        self.changing_adapters.add(name)
        self._tell()
        try:
            results = await every(members, lambda m: m.worker.load_adapter(name, path, operation=operation))
            records = [r for r in results.values() if isinstance(r, AdapterRecord)]
            if len(records) < len(members):
                done = [m for m in members if isinstance(results[m.url], AdapterRecord)]
                if previous is None:
                    await every(done, lambda m: m.worker.unload_adapter(name))
                else:
                    back = previous
                    await every(done, lambda m: m.worker.load_adapter(name, back))
            else:
                self.adapter_paths[name] = path
                await self._keep()
            await self._refresh(members)
        finally:
            self.changing_adapters.discard(name)
            self._tell()
        failures = {url: r for url, r in results.items() if isinstance(r, RollplaneError)}
        first = next(iter(failures.values()), None)
        if first is not None and len(failures) == len(members):
            raise first  # all alike: the caller's own mistake, in its own words
        self._raise_failures(results, what="given the adapter")
        return records[0]

    # -- small things ----------------------------------------------------------------------------------------------

    async def _refresh(self, members: Sequence[Member]) -> None:
        await every(members, lambda m: m.worker.refresh())

    def _check_epoch(self, operation: Operation) -> None:
        if operation.epoch is not None and operation.epoch < self.epoch:
            raise Conflict(f"the command is of epoch {operation.epoch}, this fleet's is {self.epoch}", param="epoch")

    def _inner(self, named: Operation) -> Operation:
        return msgspec.structs.replace(
            named, id=f"{named.id or uuid.uuid4().hex}/{uuid.uuid4().hex[:8]}", epoch=self.epoch
        )

    async def _run(self, named: Operation, arguments: Any, work: Callable[[], Awaitable[T]], *, what: str) -> T:
        """Run an operation once; its failure is remembered also where its caller has gone."""
        key = f"{named.id}\0{named.step}"

        async def noted() -> T:
            try:
                result = await work()
            except RollplaneError as error:
                self._note_failure(key, error.message)
                raise
            except asyncio.CancelledError:
                self._note_failure(key, f"the {what} was cancelled, or did not finish in time")
                raise
            self._failures.pop(key, None)
            return result

        return await self._operations.run(named, arguments, noted, what=what)

    def _note_failure(self, key: str, said: str) -> None:
        self._failures[key] = said
        while len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

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
