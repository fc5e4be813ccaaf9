"""All workers of one model as one policy: every operation on all of them or none.

The fleet is the control owner: it holds the epoch, the version sequence, the operations and what a late joiner must
have. The lifecycle of a worker is the table in `rl.members`; who is there is in `rl.roster`; what runs under the fleet's lock
is in `rl.fleet_steps`, the steps of an update in `rl.fleet_update`.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollplane.errors import Conflict, Unavailable
from rollplane.protocol.admin import (
    AdapterRecord,
    AllowTensors,
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
from rollplane.rl.fleet_records import record_of
from rollplane.rl.fleet_steps import FleetSteps
from rollplane.rl.fleet_update import Checkpoint, every
from rollplane.rl.operation_log import Tell
from rollplane.rl.roster import FleetSettings as FleetSettings  # settings come with the thing they set


class Fleet(FleetSteps):
    """The workers of one model; a `PolicyAdmin`.

    Args:
        settings, epoch, record: see `Roster`.
    """

    def __repr__(self) -> str:
        states = [member.state for member in self._members.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no workers"
        gate = f", held for {self.held_for}" if self.held_for else ""
        return f"<Fleet {self.version or '?'} epoch={self.epoch}: {counts}{gate}>"

    # -- PolicyAdmin -----------------------------------------------------------------------------------------------

    async def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, epoch: int | None = None
    ) -> PauseReport:
        """Pause all workers; requests that come meanwhile wait at the router. If one cannot, those paused here resume.

        Raises:
            EngineFailed: a worker could not be paused; by address in `details`.
        """
        self._check_epoch(epoch)
        async with self._lock:
            members = self._reached()
            with self._gate("pause"):
                results = await every(
                    members, lambda m: m.worker.pause(mode, clear_cache=clear_cache, epoch=self.epoch)
                )
                reports = {url: r for url, r in results.items() if isinstance(r, PauseReport)}
                if len(reports) < len(members):
                    mine = [m for m in members if m.url in reports and not reports[m.url].already_paused]
                    self._give_up(results)
                    self._give_up(await every(mine, lambda m: m.worker.resume(epoch=self.epoch)))
                else:
                    self.paused = True
                    await self._keep()
                await self._refresh(members)
            self._review_unsteady()
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

    async def resume(self, *, epoch: int | None = None) -> ResumeReport:
        """Resume every worker that is at the fleet's version.

        Raises:
            EngineFailed: a worker could not resume; by address in `details`.
            Unavailable: no worker has weights of a known version.
        """
        self._check_epoch(epoch)
        async with self._lock:
            members = [m for m in self._reached() if m.state == "current"]
            if not members:
                raise Unavailable(f"no worker is at the fleet's version: {self._why()}", retry_after_s=None)
            results = await every(members, lambda m: m.worker.resume(epoch=self.epoch))
            self.paused = False
            self._give_up(results)
            await self._keep()
            await self._refresh(members)
            self._review_unsteady()
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
        allow_tensors: Sequence[AllowTensors] = (),
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
        allowed = tuple(sorted(set(allow_tensors)))
        target = Checkpoint(path=path, version=name, digest=expected_digest, allow_tensors=allowed)

        async def work(inner: Operation, tell: Tell) -> UpdateReport:
            async with self._lock:
                return await self._update(
                    target, mode=mode, clear_cache=clear_cache, on_failure=on_failure, operation=inner, tell=tell
                )

        arguments = ("update", path, name, mode, clear_cache, on_failure, expected_digest, allowed)
        return await self._run(operation, arguments, work, what="policy update of the fleet")

    # -- BroadcastAdmin --------------------------------------------------------------------------------------------

    async def init_weights_group(self, group: TransferGroup, *, operation: Operation | None = None) -> GroupReport:
        """Let every worker that can be reached join a trainer's group; see `FleetGroup.init`."""

        async def work(inner: Operation, tell: Tell) -> GroupReport:
            return await self.weight_group.init(group, self._reached(), operation=inner, tell=tell)

        return await self._run(operation, ("init group", group), work, what="joining of a weight group")

    async def stage_broadcast(self, manifest: Manifest, *, operation: Operation | None = None) -> StagedWeights:
        """Let every worker receive, and keep it beside the models; see `FleetGroup.receive`."""

        async def work(inner: Operation, tell: Tell) -> StagedWeights:
            return await self.weight_group.receive(manifest, operation=inner, tell=tell)

        return await self._run(operation, ("stage broadcast", manifest), work, what="receiving of weights")

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

        async def work(inner: Operation, tell: Tell) -> UpdateReport:
            async with self._lock:
                return await self._update(
                    Checkpoint(path=None, version=version, digest=digest),
                    mode=mode,
                    clear_cache=clear_cache,
                    on_failure=on_failure,
                    operation=inner,
                    tell=tell,
                )

        arguments = ("apply", digest, version, mode, clear_cache, on_failure)
        return await self._run(operation, arguments, work, what="policy update of the fleet")

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

        async def work(inner: Operation, tell: Tell) -> UpdateReport:
            staged = await self.weight_group.receive(manifest, operation=inner, tell=tell)
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
                    tell=tell,
                )

        arguments = ("broadcast", manifest, version, mode, clear_cache, on_failure, expected_digest)
        return await self._run(operation, arguments, work, what="policy update of the fleet by broadcast")

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

    async def set_policy_version(self, version: str, *, epoch: int | None = None) -> None:
        """Change the label on all workers; aborts nothing.

        Raises:
            EngineFailed: a worker refused; by address in `details`.
        """
        check_version_name(version, param="weight_version")
        self._check_epoch(epoch)
        async with self._lock:
            members = [m for m in self._reached() if m.state == "current"]
            with self._gate("version label"):
                results = await every(members, lambda m: m.worker.set_policy_version(version, epoch=self.epoch))
                self._give_up(results)
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

        async def work(inner: Operation, tell: Tell) -> AdapterRecord:
            async with self._lock:
                return await self._load_adapter(name, path, operation=inner, tell=tell)

        return await self._run(operation, ("load", name, path), work, what=f"loading of adapter {name!r}")

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """Drop an adapter on all workers; returns when its last request has ended.

        Raises:
            NotFound: no worker has it.
        """

        async def work(inner: Operation, tell: Tell) -> AdapterRecord:
            async with self._lock:
                return await self._unload_adapter(name, operation=inner, tell=tell)

        return await self._run(operation, ("unload", name), work, what=f"unloading of adapter {name!r}")

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
