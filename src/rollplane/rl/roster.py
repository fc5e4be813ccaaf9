"""Who is in a fleet and where each worker stands: what the router reads, and how joiners are brought up to date.

Until the first update through the fleet its workers are only observed: each serves the version that it told. From then
on only workers whose version and digest are the fleet's take requests, and a joiner or a restarted worker is brought
there first. `_review` re-derives a worker's place after every event.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from rollplane.errors import Conflict, EngineFailed, RollplaneError, Unavailable
from rollplane.protocol.admin import AdapterRecord
from rollplane.protocol.info import EngineInfo
from rollplane.rl.base import Operation
from rollplane.rl.control_record import MAX_VERSIONS, ControlRecord, RecordFile
from rollplane.rl.facts import disagreement, merge_infos
from rollplane.rl.fleet_update import Checkpoint
from rollplane.rl.members import FleetWorker, Member
from rollplane.rl.versions import VersionSequence

MAX_DROPPED: Final = 1024
"""Names of dropped adapters that are remembered."""


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a fleet behaves.

    `initial`: the checkpoint that workers start with, so that the first update can be rolled back and a restarted
    worker brought up to date. `catch_up_s`: limit of bringing one worker to the fleet's version. `retry_s`: pause
    before that is tried again. `stall_s`: a worker whose engine has work and has not moved for longer takes no request.
    """

    initial: Checkpoint | None = None
    catch_up_s: float = 600.0
    retry_s: float = 5.0
    stall_s: float | None = 120.0


class Roster:
    """The members of a fleet and what each must have.

    Args:
        epoch: of this control owner; workers refuse commands of an older one. None: seconds since 1970.
        record: what outlives this process; the epoch is at least one above the one in it. None: nothing does.

    Raises:
        Conflict: another process owns the record.
    """

    def __init__(
        self,
        *,
        settings: FleetSettings | None = None,
        epoch: int | None = None,
        record: RecordFile | None = None,
    ) -> None:
        self.settings = settings or FleetSettings()
        before = None if record is None else record.open()
        now = int(time.time()) if epoch is None else epoch
        self.epoch = now if before is None else max(now, before.epoch + 1)
        self.sequence: VersionSequence | None = None
        """Order of the versions seen or set; None until the first worker was reached."""
        self.checkpoint: Checkpoint | None = None
        """What every worker must have; None while workers are only observed."""
        self.adapter_paths: dict[str, str] = {}
        """The adapters that every worker must have, and the files of each, as the caller named them."""
        self.adapter_digests: dict[str, str] = {}
        """Their contents, which the same path may change under."""
        self.dropped_adapters: dict[str, None] = {}
        """Names that no worker may have any more, oldest first: one that missed the unloading drops them when it is back."""
        self.changing_adapters: set[str] = set()
        """Adapter names that workers disagree about for the moment: requests for them wait."""
        self.paused = False
        """Paused as a whole: nothing is placed until `resume`, also on workers that join meanwhile."""
        self.left_paused: set[str] = set()
        """Addresses of workers that an update paused and has not resumed."""
        self._versions: list[str] = []
        self._record = record
        self._members: dict[str, Member] = {}
        self._lock = asyncio.Lock()
        self._closed_gates: list[str] = []
        self._changed = asyncio.Event()
        self._catching_up: dict[str, asyncio.Task[None]] = {}
        self._retries: dict[str, asyncio.TimerHandle] = {}
        self._merged: tuple[list[EngineInfo], EngineInfo] | None = None
        self._merged_at: asyncio.Event | None = None
        """`_changed` of that time."""
        self._closing: set[asyncio.Task[None]] = set()
        if before is not None:
            self.checkpoint, self.paused = before.checkpoint, before.paused
            self.adapter_paths, self.left_paused = dict(before.adapters), set(before.left_paused)
            self.adapter_digests = dict(before.adapter_digests)
            self.dropped_adapters = dict.fromkeys(before.dropped_adapters)
            for version in before.versions:
                self._advance(version)
        if record is not None:
            record.write(self.kept())

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

    def lag(self, version: str | None) -> int | None:
        """How many updates a worker's version is behind the newest; None where that is not known.

        It is known of every version once the fleet itself updates. While workers are only observed, a version that one
        brought along when it joined has no place in the order before a worker was seen to change to it.
        """
        if version is None or self.sequence is None or self._unordered():
            return None
        return self.sequence.lag(version)

    def _unordered(self) -> list[str]:
        """Versions that serve and have no place in the order."""
        versions = [m.version for m in self._members.values() if m.state == "current" and m.worker.reachable]
        numbered = self.sequence
        return [v for v in versions if v is not None and numbered is not None and numbered.number(v) is None]

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
        known = self._merged
        if known is not None and self._merged_at is self._changed:
            return known[1]  # nothing was told since
        infos = [m.worker.state.info for m in self._members.values() if m.worker.state is not None and not m.foreign]
        if not infos:
            if known is not None:
                return known[1]  # all are gone: what they were still describes the model
            raise Unavailable("no worker was reached yet")
        merged = known[1] if known is not None and known[0] == infos else merge_infos(infos)
        # An equal list replaces the one before: its objects are those of the next look, which compares them at once.
        self._merged, self._merged_at = (infos, merged), self._changed
        return merged

    # -- membership ------------------------------------------------------------------------------------------------

    def add(self, worker: FleetWorker) -> Member:
        """Let a worker join; it takes requests once it was reached and is at the fleet's version.

        Raises:
            Conflict: its address is a member's.
        """
        if worker.url in self._members:
            raise Conflict(f"worker {worker.url} is a member already")
        member = Member(worker, stall_s=self.settings.stall_s, on_enter=self._tell)
        member.paused_here = worker.url in self.left_paused
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
        for url in list(self._members):
            self.remove(url)
        if self._closing:
            await asyncio.wait(self._closing)
        if self._record is not None:
            self._record.close()

    # -- events ----------------------------------------------------------------------------------------------------

    def _review(self, member: Member) -> None:
        """Re-derive where a worker stands from what it last told."""
        heard = member.worker.state
        if member.state in ("gone", "updating") or heard is None:
            if heard is None:
                trouble = member.worker.trouble
                member.reason = "not reached yet" if trouble is None else f"not reached yet: {trouble}"
            self._tell()
            return
        if member.instance != heard.instance:
            if member.instance is not None:
                member.worker.drop_requests(f"worker {member.url} was restarted")
                member.paused_here = member.unsettled = member.unsteady = False
                member.seen = None
            member.instance = heard.instance
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
        elif member.unheard and member.worker.reachable and self._can_return(member):
            member.unheard = False
            member.enter("joining", "heard again")
            self._admit_or_catch_up(member)
        self._tell()

    def _admit_or_catch_up(self, member: Member) -> None:
        if self._is_current(member):
            self._stop_catching_up(member.url)
            member.enter("current")
            self._observe(member)
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
        if (
            heard.health.state == "failed"
            or member.unsettled
            or member.unsteady
            or (member.paused_here and heard.paused)
        ):
            return False
        if self._adapters_to_mend(member):
            return False
        return self._has_target(member)

    def _adapters_to_mend(self, member: Member) -> list[str]:
        """Names that a worker lacks, has other contents of, or has not dropped; not those that are being changed now."""
        heard = member.worker.state
        loaded = {} if heard is None else {r.name: r.digest for r in heard.adapters if r.state == "ready"}
        wrong = [
            name
            for name in self.adapter_paths
            if name not in loaded or self.adapter_digests.get(name, loaded[name]) != loaded[name]
        ]
        wrong += [name for name in self.dropped_adapters if name in loaded]
        return [name for name in wrong if name not in self.changing_adapters]

    def _remember_adapter(self, record: AdapterRecord, path: str) -> None:
        self.adapter_paths[record.name], self.adapter_digests[record.name] = path, record.digest
        self.dropped_adapters.pop(record.name, None)

    def _forget_adapter(self, name: str) -> None:
        self.adapter_paths.pop(name, None)
        self.adapter_digests.pop(name, None)
        self.dropped_adapters[name] = None
        while len(self.dropped_adapters) > MAX_DROPPED:
            del self.dropped_adapters[next(iter(self.dropped_adapters))]

    def _can_return(self, member: Member) -> bool:
        """Whether a worker that was fenced unheard can be brought up to date; with no checkpoint, it must be as it was."""
        heard = member.worker.state
        if self.checkpoint is not None or heard is None:
            return heard is not None
        if member.unsettled:
            return self.settings.initial is not None
        return member.before == (heard.policy_version, heard.policy_digest)

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
                if target is None and member.unsettled:
                    target = self.settings.initial
                if target is not None and (member.unsettled or not self._has_target(member)):
                    if target.path is None:
                        raise EngineFailed("the policy came by broadcast and is on no disk; the next update brings it")
                    await member.worker.update_from_disk(
                        target.path,
                        version=target.version,
                        expected_digest=target.digest,
                        allow_tensors=target.allow_tensors,
                        operation=operation,
                    )
                    member.unsettled = False
                await self._mend_adapters(member, operation)
                if member.paused_here or member.unsteady:
                    if not self.paused:
                        await member.worker.resume(epoch=self.epoch)
                    elif member.unsteady:
                        await member.worker.pause(epoch=self.epoch)
                    member.paused_here = member.unsteady = False
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

    async def _mend_adapters(self, member: Member, operation: Operation) -> None:
        """Give a worker the fleet's adapters, and take from it those that the fleet has dropped.

        Raises:
            Conflict: the files are no longer those that the fleet loaded.
        """
        for name in self._adapters_to_mend(member):
            if name in self.dropped_adapters:
                await member.worker.unload_adapter(name, operation=operation)
                continue
            record = await member.worker.load_adapter(name, self.adapter_paths[name], operation=operation)
            wanted = self.adapter_digests.setdefault(name, record.digest)
            if record.digest != wanted:
                raise Conflict(
                    f"the files of adapter {name!r} at {self.adapter_paths[name]} have changed since the fleet loaded them: "
                    f"digest {record.digest[:16]}... instead of {wanted[:16]}...; load it again"
                )

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

    # -- small things --------------------------------------------------------------------------------------------------

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

    def _observe(self, member: Member) -> None:
        """Put a version that was never heard of into the order, where its place is known: behind all, for a worker that
        changed to it, and for one beside whom no other version serves.
        """
        version, before, member.seen = member.version, member.seen, member.version
        if version is None or (self.sequence is not None and self.sequence.number(version) is not None):
            return
        changed = before is not None and before != version
        others = {m.version for m in self._members.values() if m.state == "current" and m.worker.reachable} - {version}
        if changed or self.sequence is None or not others:
            self._advance(version)

    def _advance(self, version: str) -> None:
        if version in self._versions:
            self._versions.remove(version)
        self._versions = [*self._versions, version][-MAX_VERSIONS:]
        if self.sequence is None:
            self.sequence = VersionSequence(version)
        else:
            self.sequence.advance(version)
        self._tell()

    def _why(self) -> str:
        return "; ".join(repr(member) for member in self._members.values()) or "there are no workers"

    def kept(self) -> ControlRecord:
        """What must outlive this owner."""
        return ControlRecord(
            epoch=self.epoch,
            checkpoint=self.checkpoint,
            versions=self._versions,
            adapters=self.adapter_paths,
            adapter_digests=self.adapter_digests,
            dropped_adapters=list(self.dropped_adapters),
            paused=self.paused,
            left_paused=sorted(self.left_paused),
        )

    async def _keep(self) -> None:
        """Write the record, where there is one.

        Raises:
            Unavailable: it could not be written.
        """
        if self._record is not None:
            await asyncio.to_thread(self._record.write, self.kept())

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
