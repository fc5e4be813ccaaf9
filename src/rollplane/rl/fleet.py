"""All workers of one model as one policy: every operation on all of them or none.

The fleet is the control owner: it holds the epoch, the version sequence, the operations and what a late joiner must
have. Where each worker stands is in `rl.members`; `_review` re-derives it after every event. Until the first update
through the fleet its workers are only observed: each serves the version that it told. From then on only workers whose
version and digest are the fleet's take requests, and a joiner or a restarted worker is brought there first.
"""

import asyncio
import contextlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rollplane.errors import Conflict, EngineFailed, InvalidRequest, NotFound, RollplaneError, Unavailable
from rollplane.protocol.admin import (
    AdapterRecord,
    FlushReport,
    PauseMode,
    PauseReport,
    ResumeReport,
    UpdateReport,
    WorkerRecord,
)
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.versions import check_version_name
from rollplane.rl.base import OnFailure, Operation
from rollplane.rl.facts import disagreement, merge_infos
from rollplane.rl.fleet_update import SETTLE_S, Checkpoint, FleetUpdate, every
from rollplane.rl.members import FleetWorker, Member
from rollplane.rl.operations import Operations
from rollplane.rl.versions import VersionSequence

T = TypeVar("T")

MAX_FAILURES: Final = 256
"""Failed operations whose error can still be asked for."""


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a fleet behaves.

    `initial`: the checkpoint that workers start with, so that the first update can be rolled back and a restarted
    worker brought up to date. `catch_up_s`: limit of bringing one worker to the fleet's version. `retry_s`: pause
    before that is tried again.
    """

    initial: Checkpoint | None = None
    catch_up_s: float = 600.0
    retry_s: float = 5.0


class Fleet:
    """The workers of one model; a `PolicyAdmin`.

    Args:
        epoch: of this control owner; workers refuse commands of an older one. None: seconds since 1970.
    """

    def __init__(self, *, settings: FleetSettings | None = None, epoch: int | None = None) -> None:
        self.settings = settings or FleetSettings()
        self.epoch = int(time.time()) if epoch is None else epoch
        self.sequence: VersionSequence | None = None
        """Order of the versions seen or set; None until the first worker was reached."""
        self.checkpoint: Checkpoint | None = None
        """What every worker must have; None while workers are only observed."""
        self.adapter_paths: dict[str, str] = {}
        self.changing_adapters: set[str] = set()
        """Adapter names that workers disagree about for the moment: requests for them wait."""
        self._members: dict[str, Member] = {}
        self._operations = Operations()
        self._failures: OrderedDict[str, str] = OrderedDict()
        self._lock = asyncio.Lock()
        self.paused = False
        """Paused as a whole: nothing is placed until `resume`, also on workers that join meanwhile."""
        self._closed_gates: list[str] = []
        self._changed = asyncio.Event()
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        self._retries: dict[str, asyncio.TimerHandle] = {}
        self._merged: tuple[list[EngineInfo], EngineInfo] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        states = [member.state for member in self._members.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "no workers"
        gate = f", held for {self.held_for}" if self.held_for else ""
        return f"<Fleet {self.version or '?'} epoch={self.epoch}: {counts}{gate}>"

    # -- what the router reads -------------------------------------------------------------------------------------

    @property
    def members(self) -> list[Member]:
        """Every worker, in the order in which they joined."""
        return list(self._members.values())

    @property
    def version(self) -> str | None:
        """The version that was set for all; while workers are only observed, the newest one seen."""
        if self.checkpoint is not None:
            return self.checkpoint.version
        return None if self.sequence is None else self.sequence.current

    @property
    def held_for(self) -> str | None:
        """Why no request may be placed now, None where it may."""
        return self._closed_gates[-1] if self._closed_gates else "pause" if self.paused else None

    @property
    def changed(self) -> asyncio.Event:
        """Set once, at the next change of anything a router looks at; take it before you look."""
        return self._changed

    @property
    def info(self) -> EngineInfo:
        """The merged facts of all workers that belong together.

        Raises:
            Unavailable: no worker was reached yet.
        """
        infos = [
            m.worker.state.info for m in self._members.values() if m.worker.state is not None and m.state != "fenced"
        ]
        if not infos:
            if self._merged is not None:
                return self._merged[1]  # all are fenced or gone: what they were still describes the model
            raise Unavailable("no worker was reached yet")
        if self._merged is None or self._merged[0] != infos:
            self._merged = (infos, merge_infos(infos))
        return self._merged[1]

    # -- membership ------------------------------------------------------------------------------------------------

    def add(self, worker: FleetWorker) -> Member:
        """Let a worker join; it takes requests once it was reached and is at the fleet's version.

        Raises:
            Conflict: its address is a member's.
        """
        if worker.url in self._members:
            raise Conflict(f"worker {worker.url} is a member already")
        member = Member(worker)
        self._members[worker.url] = member
        worker.follow(lambda: self._review(member))
        self._tell()
        return member

    def remove(self, url: str) -> None:
        """Let a worker go; its running requests end where they are. Unknown addresses are no error."""
        member = self._members.pop(url, None)
        if member is None:
            return
        member.enter("gone")
        self._stop_catching_up(url)
        task = asyncio.get_running_loop().create_task(member.worker.close(), name=f"close {url}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._tell()

    def set_workers(self, urls: Sequence[str], make: Callable[[str], FleetWorker]) -> None:
        """Make the members exactly these addresses."""
        wanted = [url.rstrip("/") for url in urls]
        for url in list(self._members):
            if url not in wanted:
                self.remove(url)
        for url in wanted:
            if url not in self._members:
                self.add(make(url))

    async def close(self) -> None:
        """Stop all tasks and let go of the workers, which go on."""
        await self._operations.close()
        for url in list(self._members):
            self.remove(url)
        if self._closing:
            await asyncio.wait(self._closing)

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
        return [self._record(m, results[m.url]) for m in members]

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

    # -- events ----------------------------------------------------------------------------------------------------

    def _review(self, member: Member) -> None:
        """Re-derive where a worker stands from what it last told."""
        heard = member.worker.state
        if member.state in ("gone", "updating") or heard is None:
            member.reason = member.reason if heard is not None else "not reached yet"
            self._tell()
            return
        if member.instance != heard.instance:
            if member.instance is not None:
                member.worker.drop_requests(f"worker {member.url} was restarted")
            member.instance = heard.instance
            member.paused_here = False
            if member.state != "joining":
                member.enter("joining", "restarted")
        other = next((m for m in self._members.values() if m is not member and m.state == "current"), None)
        differs = (
            None if other is None or other.worker.state is None else disagreement(other.worker.state.info, heard.info)
        )
        member.foreign = differs is not None
        if differs is not None:
            if member.state != "fenced":
                member.enter("fenced", f"it does not belong to this fleet: {differs}")
        elif member.state != "fenced":
            self._admit_or_catch_up(member)
        self._tell()

    def _admit_or_catch_up(self, member: Member) -> None:
        if self._is_current(member):
            self._stop_catching_up(member.url)
            member.enter("current")
            self._observe(member.version)
        elif not member.worker.reachable:
            member.reason = "cannot be reached"
        elif member.url not in self._catching_up and member.url not in self._retries:
            member.enter("joining", f"has {member.version!r}, the fleet {self.version!r}")
            task = asyncio.get_running_loop().create_task(self._catch_up(member), name=f"catch up {member.url}")
            self._catching_up[member.url] = task

    def _is_current(self, member: Member) -> bool:
        heard = member.worker.state
        if heard is None or not member.worker.reachable:
            return member.state == "current"  # as it was; `routable` is False while it cannot be reached
        if heard.health.state == "failed":
            return False
        loaded = {record.name for record in heard.adapters if record.state == "ready"}
        if not self.adapter_paths.keys() <= loaded:
            return False
        return self._has_target(member)

    def _has_target(self, member: Member) -> bool:
        heard, target = member.worker.state, self.checkpoint
        return target is None or (
            heard is not None
            and heard.health.state != "failed"
            and (heard.policy_version, heard.policy_digest) == (target.version, target.digest)
        )

    async def _catch_up(self, member: Member) -> None:
        """Bring one worker to what the fleet has."""
        try:
            async with asyncio.timeout(self.settings.catch_up_s), self._lock:
                await member.worker.refresh()
                target = self.checkpoint
                operation = Operation(
                    id=f"join/{uuid.uuid4().hex}", epoch=self.epoch, deadline_s=self.settings.catch_up_s
                )
                heard = member.worker.state
                if target is not None and not self._has_target(member):
                    await member.worker.update_from_disk(
                        target.path, version=target.version, expected_digest=target.digest, operation=operation
                    )
                loaded = {r.name: r.path for r in heard.adapters if r.state == "ready"} if heard is not None else {}
                for name, path in self.adapter_paths.items():
                    if loaded.get(name) != path:
                        await member.worker.load_adapter(name, path, operation=operation)
                await member.worker.refresh()
        except (RollplaneError, TimeoutError) as error:
            member.reason = f"could not be brought to {self.version!r}: {error}"
            if member.state != "gone":
                loop = asyncio.get_running_loop()
                self._retries[member.url] = loop.call_later(self.settings.retry_s, self._retry, member)
        finally:
            self._catching_up.pop(member.url, None)
        if member.state != "gone":
            self._review(member)

    def _retry(self, member: Member) -> None:
        self._retries.pop(member.url, None)
        if member.state == "joining":
            self._review(member)

    def _stop_catching_up(self, url: str) -> None:
        timer = self._retries.pop(url, None)
        if timer is not None:
            timer.cancel()
        task = self._catching_up.get(url)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

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
        update = FleetUpdate(
            members,
            target=target,
            previous=self.checkpoint or self.settings.initial,
            mode=mode,
            clear_cache=clear_cache,
            on_failure=on_failure,
            operation=operation,
        )
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
        if update.done_already():
            report.applied = False
            self.checkpoint = update.target
            return report
        with self._gate("policy update"):
            stopped = time.monotonic()
            try:
                await update.apply()
                if update.outcome in ("committed", "fenced"):
                    self.checkpoint = update.target
                    self._advance(target.version)
            finally:
                # The operation's deadline or a cancellation ends the steps, never the settling.
                await self._finish(asyncio.wait_for(update.settle(), SETTLE_S))
                for member in members:
                    if member.state == "updating":
                        member.enter("fenced", "what it has could not be found out")
            report.pause_s = time.monotonic() - stopped
        for member in members:
            self._review(member)
        if update.outcome not in ("committed", "fenced") or not any(m.state == "current" for m in members):
            raise update.failure()
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

    def _reached(self) -> list[Member]:
        """The workers that an operation is for.

        Raises:
            Unavailable: none can be reached.
        """
        found = [
            m
            for m in self._members.values()
            if m.worker.reachable
            and m.worker.state is not None
            and not (m.reason or "").startswith("it does not belong")
        ]
        if not found:
            raise Unavailable(f"no worker can be reached: {self._why()}")
        return found

    async def _refresh(self, members: Sequence[Member]) -> None:
        await every(members, lambda m: m.worker.refresh())

    def _observe(self, version: str | None) -> None:
        if version is not None and (self.sequence is None or self.sequence.number(version) is None):
            self._advance(version)

    def _advance(self, version: str) -> None:
        if self.sequence is None:
            self.sequence = VersionSequence(version)
        else:
            self.sequence.advance(version)

    def _check_epoch(self, operation: Operation) -> None:
        if operation.epoch is not None and operation.epoch < self.epoch:
            raise Conflict(f"the command is of epoch {operation.epoch}, this fleet's is {self.epoch}", param="epoch")

    def _inner(self, named: Operation) -> Operation:
        return msgspec.structs.replace(
            named, id=f"{named.id or uuid.uuid4().hex}/{uuid.uuid4().hex[:8]}", epoch=self.epoch
        )

    async def _run(self, named: Operation, arguments: Any, work: Callable[[], Awaitable[T]], *, what: str) -> T:
        try:
            return await self._operations.run(named, arguments, work, what=what)
        except RollplaneError as error:
            if named.id is not None:
                self._failures[f"{named.id}\0{named.step}"] = error.message
                while len(self._failures) > MAX_FAILURES:
                    self._failures.popitem(last=False)
            raise

    def _record(self, member: Member, found: list[WorkerRecord] | RollplaneError) -> WorkerRecord:
        heard = member.worker.state
        if isinstance(found, list) and found:
            record = found[0]
        elif heard is None:
            raise_ = found if isinstance(found, RollplaneError) else InvalidRequest("no record")
            return WorkerRecord(
                namespace="",
                component="",
                endpoint="rl",
                instance_id="",
                transport={"http": member.url},
                request_plane_url=member.url,
                system_url=member.url,
                model="",
                routes=[],
                error=f"{member.state}: {raise_.message}",
            )
        else:
            record = WorkerRecord(
                namespace="",
                component="",
                endpoint="rl",
                instance_id=heard.instance,
                transport={"http": member.url},
                request_plane_url=member.url,
                system_url=member.url,
                model=heard.info.model,
                routes=heard.routes,
                world_size=heard.info.world_size,
                capabilities=heard.info.capabilities,
                policy_version=heard.policy_version,
                policy_digest=heard.policy_digest,
                state="failed",
                adapters=heard.adapters,
            )
        # The frontend's way to the worker, which may differ from what the worker thinks its address is.
        record.system_url = record.system_url or member.url
        record.request_plane_url = record.request_plane_url or member.url
        record.transport = record.transport or {"http": member.url}
        if member.state != "current" or not member.worker.reachable:
            record.error = f"{member.state}: {member.reason or 'cannot be reached'}"
        return record

    def _raise_failures(self, results: dict[str, Any], *, what: str) -> None:
        errors = {url: r.message for url, r in results.items() if isinstance(r, RollplaneError)}
        if errors:
            raise EngineFailed(
                f"{len(errors)} of {len(results)} workers could not be {what}: "
                + "; ".join(f"{url}: {said}" for url, said in errors.items()),
                details={"workers": errors},
            )

    def _why(self) -> str:
        return "; ".join(repr(member) for member in self._members.values()) or "there are no workers"

    @contextlib.contextmanager
    def _gate(self, why: str) -> Iterator[None]:
        """Let the router place nothing inside the block."""
        self._closed_gates.append(why)
        self._tell()
        try:
            yield
        finally:
            self._closed_gates.remove(why)
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
