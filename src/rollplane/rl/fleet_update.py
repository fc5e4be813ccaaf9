"""One policy update of a whole fleet, step by step: stage on all, pause all, apply on all, verify, then open.

Every step waits for all answers before anything is decided. Whatever happens, also a deadline or a cancellation,
`settle` then asks each worker what it has: those at the fleet's version resume (unless they were paused before
the update), all others are fenced and their requests broken off. Nothing of unknown version is resumed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from rollplane.errors import CallerError, Conflict, EngineFailed, RollplaneError, TransportError
from rollplane.protocol.admin import AllowTensors, PauseMode, PauseReport, StagedWeights, UpdateReport
from rollplane.rl.base import OnFailure, Operation
from rollplane.rl.members import Member
from rollplane.rl.operation_log import Tell, tell_nobody

SETTLE_S: Final = 60.0
"""Limit of asking all workers what they have and resuming them, also after the operation's own deadline."""

T = TypeVar("T")
Outcome = Literal["committed", "fenced", "rolled_back", "refused"]


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a policy. `digest` None: never verified yet. `path` None: they came by broadcast and are on no disk.

    `allow_tensors`: what was allowed when it was loaded. A worker that would keep other tensors than the fleet has gets
    another digest, and is refused.
    """

    path: str | None
    version: str
    digest: str | None = None
    allow_tensors: tuple[AllowTensors, ...] = ()


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has: version and digest, as it told."""

    version: str
    digest: str | None


class FleetUpdate:
    """The steps of one update, over members that can all be reached.

    Args:
        members: the workers it is for.
        target: path and version; the digest comes from staging.
        previous: what to go back to, None where it is not known.
        operation: names the workers' own operations, so that each step may be asked for again.
        tell: notes what happens, phase by phase and worker by worker.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        target: Checkpoint,
        previous: Checkpoint | None,
        mode: PauseMode,
        clear_cache: bool,
        on_failure: OnFailure,
        operation: Operation,
        tell: Tell = tell_nobody,
    ) -> None:
        self._tell = tell
        self.members = list(members)
        self.target = target
        self.previous = previous
        self.mode: PauseMode = mode
        self.clear_cache = clear_cache
        self.on_failure: OnFailure = on_failure
        self.operation = operation
        self.outcome: Outcome | None = None
        self.errors: dict[str, str] = {}
        self._before: dict[str, Policy] = {}
        self._paused_before: set[str] = set()
        self._rolled_back = False
        self.unheard: set[str] = set()
        """Workers that a call was given up to without an answer."""
        self.unresumed: set[str] = set()
        """Those that did not answer the resume of the settling."""
        self.unanswered: set[str] = set()
        """Workers that may still carry out what they were asked to apply: the call was given up without an answer."""

    def __repr__(self) -> str:
        return f"<FleetUpdate to {self.target.version!r} on {len(self.members)} workers: {self.outcome or 'under way'}>"

    async def stage(self) -> StagedWeights:
        """Read and check the checkpoint on every worker; nothing changes anywhere.

        Raises:
            CallerError, RollplaneError: the first worker's error, with every worker's in `details`.
            Conflict: the workers read different contents at the path.
        """
        path = self.target.path
        if path is None:
            raise EngineFailed(f"version {self.target.version!r} is on no disk")
        found = await every(
            self.members,
            lambda m: m.worker.stage_weights(
                path, allow_tensors=self.target.allow_tensors, operation=self._named("stage")
            ),
            phase="stage",
            tell=self._tell,
        )
        staged = {url: result for url, result in found.items() if isinstance(result, StagedWeights)}
        if staged:
            # A worker that serves nothing now does not keep the others from an update: it stays where it is. Nor does one
            # that cannot be reached any more: it is brought up to date when it comes back.
            self.members = [m for m in self.members if m.url in staged or (m.state == "current" and m.worker.reachable)]
        errors = {m.url: error for m in self.members if isinstance(error := found[m.url], RollplaneError)}
        if errors:
            self.outcome = "refused"
            self._note(errors)
            first = next((e for e in errors.values() if isinstance(e, CallerError)), next(iter(errors.values())))
            kind = type(first)
            raise kind(
                f"{len(errors)} of {len(self.members)} workers could not stage the checkpoint, nothing changed; "
                f"the first: {first.message}",
                param=first.param,
                details={"workers": self.errors},
            )
        digests = {url: report.digest for url, report in staged.items()}
        if len(set(digests.values())) > 1:
            self.outcome = "refused"
            raise Conflict(
                f"the workers read different contents at {self.target.path!r}, nothing changed",
                param="model_path",
                details={"digests": digests},
            )
        one = next(iter(staged.values()))
        self.target = msgspec.structs.replace(self.target, digest=one.digest)
        return one

    def done_already(self) -> bool:
        """Whether every worker has the target's version and contents."""
        return all(m.state == "current" and self._has(m, self.target) for m in self.members)

    async def apply(self) -> None:
        """Pause all, apply on all, verify all; then `outcome` says what was decided. Raises nothing of the workers'."""
        await every(self.members, lambda m: m.worker.refresh())
        for member in self.members:
            heard = member.worker.state
            if heard is not None:
                self._before[member.url] = Policy(version=heard.policy_version, digest=heard.policy_digest)
                member.before = (heard.policy_version, heard.policy_digest)
                if heard.paused and not member.paused_here:
                    self._paused_before.add(member.url)
            member.enter("updating", f"update to {self.target.version!r}")
        paused = await every(self.members, self._pause, phase="pause", tell=self._tell)
        ready = [m for m in self.members if isinstance(paused[m.url], PauseReport)]
        self._note(paused)
        if len(ready) < len(self.members) and (self.on_failure == "rollback" or not ready):
            self.outcome = "rolled_back"
            return
        applied = await every(ready, self._apply_one, phase="apply", tell=self._tell)
        self._note(applied)
        self.unanswered |= {url for url, result in applied.items() if isinstance(result, TransportError)}
        good = [m for m in ready if isinstance(applied[m.url], UpdateReport)]
        if len(good) == len(self.members):
            self.outcome = "committed"
        elif good and self.on_failure == "fence":
            self.outcome = "fenced"
        else:
            await self._roll_back([m for m in ready if m.url not in self.unanswered])
            self.outcome = "rolled_back"

    async def settle(self, *, epoch: int | None = None) -> None:
        """Ask every worker what it has and decide its place; see the module.

        Args:
            epoch: by which workers are resumed; a newer one than the operation's where a call got no answer.
        """
        self._tell("settle")
        if epoch is not None:
            self.operation = msgspec.structs.replace(self.operation, epoch=epoch)
        await every(self.members, self._settle_one)
        for member in self.members:
            why = None if member.state == "current" else EngineFailed(f"{member.state}: {member.reason}")
            self._tell("settle", worker=member.url, error=why)

    def failure(self) -> EngineFailed:
        """The error of an update that was not committed."""
        versions = {m.url: m.version for m in self.members}
        fenced = [m.url for m in self.members if m.state == "fenced"]
        ending = f"fenced: {', '.join(fenced)}" if fenced else "every worker serves the version it had"
        first = next(iter(self.errors.items()), None)
        why = "" if first is None else f"; the first, {first[0]}: {first[1]}"
        failed = f"{len(self.errors)} of {len(self.members)} workers"
        return EngineFailed(
            f"the update to {self.target.version!r} failed on {failed}; {ending}{why}",
            details={
                "workers": self.errors,
                "policy_versions": versions,
                "fenced": fenced,
                "outcome": self.outcome or "unfinished",
            },
        )

    # -- one worker ------------------------------------------------------------------------------------------------

    async def _pause(self, member: Member) -> PauseReport:
        member.paused_here = member.url not in self._paused_before
        return await member.worker.pause(self.mode, clear_cache=self.clear_cache, epoch=self.operation.epoch)

    async def _apply_one(self, member: Member) -> UpdateReport:
        report = await self._put(member, self.target, step="apply")
        await self._verify(member, self.target)
        return report

    async def _put(self, member: Member, checkpoint: Checkpoint, *, step: str) -> UpdateReport:
        if checkpoint.path is None:
            raise EngineFailed(f"version {checkpoint.version!r} came by broadcast and is on no disk to go back to")
        return await member.worker.update_from_disk(
            checkpoint.path,
            version=checkpoint.version,
            mode=self.mode,
            clear_cache=self.clear_cache,
            expected_digest=checkpoint.digest,
            allow_tensors=checkpoint.allow_tensors,
            operation=self._named(step),
        )

    async def _verify(self, member: Member, checkpoint: Checkpoint) -> None:
        await member.worker.refresh()
        if not self._has(member, checkpoint):
            heard = member.worker.state
            raise EngineFailed(
                f"worker {member.url} has {'nothing' if heard is None else (heard.policy_version, heard.policy_digest)} "
                f"after the update to {(checkpoint.version, checkpoint.digest)}"
            )

    async def _roll_back(self, members: Sequence[Member]) -> None:
        """Put the previous checkpoint back wherever the worker is not as it was before."""
        self._rolled_back = True
        await every(members, lambda m: m.worker.refresh())
        changed = [m for m in members if not self._as_before(m)]
        if self.previous is None:
            for member in changed:
                self.errors.setdefault(member.url, "the previous checkpoint is not known, so it cannot go back")
            return
        previous = self.previous
        back = await every(
            changed, lambda m: self._put(m, previous, step="rollback"), phase="roll back", tell=self._tell
        )
        digests = {result.digest for result in back.values() if isinstance(result, UpdateReport)}
        if previous.digest is None and len(digests) == 1:
            self.previous = msgspec.structs.replace(previous, digest=digests.pop())
        self.unanswered |= {url for url, result in back.items() if isinstance(result, TransportError)}
        self._note({url: result for url, result in back.items() if isinstance(result, RollplaneError)})

    async def _settle_one(self, member: Member) -> None:
        if member.state != "updating":
            return
        try:
            if member.url in self.unanswered:
                member.unsettled = True
                raise TransportError(self.errors.get(member.url) or "it did not answer")
            await member.worker.refresh()
            if not self._stays(member):
                raise EngineFailed(self.errors.get(member.url) or "its policy version is not the fleet's")
            # Also where the answer of our pause was lost: whoever was not paused before is not to stay so.
            if member.url not in self._paused_before:
                try:
                    await member.worker.resume(epoch=self.operation.epoch)
                except TransportError:
                    self.unresumed.add(member.url)
                    raise
                member.paused_here = False
                await member.worker.refresh()
        except RollplaneError as error:
            member.unheard = isinstance(error, TransportError) or member.url in self.unheard
            member.unsteady = member.url in self.unheard | self.unresumed
            member.enter("fenced", error.message)
            self.errors.setdefault(member.url, error.message)
            member.worker.drop_requests(f"worker {member.url} was fenced: {error.message}")
        else:
            member.enter("current")

    def _stays(self, member: Member) -> bool:
        """Whether what the worker has is what the fleet serves after this update."""
        heard = member.worker.state
        if heard is None or not heard.health.alive or heard.health.state not in ("ready", "paused", "pausing"):
            return False
        if self.outcome in ("committed", "fenced"):
            return self._has(member, self.target)
        return self._as_before(member) or (
            self._rolled_back and self.previous is not None and self._has(member, self.previous)
        )

    def _as_before(self, member: Member) -> bool:
        heard = member.worker.state
        return (
            heard is not None
            and heard.health.state != "failed"
            and Policy(version=heard.policy_version, digest=heard.policy_digest) == self._before.get(member.url)
        )

    @staticmethod
    def _has(member: Member, checkpoint: Checkpoint) -> bool:
        heard = member.worker.state
        return (
            heard is not None
            and heard.health.state != "failed"
            and heard.policy_version == checkpoint.version
            and heard.policy_digest == checkpoint.digest
        )

    def _named(self, step: str) -> Operation:
        return Operation(
            id=f"{self.operation.id}/{step}", epoch=self.operation.epoch, deadline_s=self.operation.deadline_s
        )

    def _note(self, results: dict[str, Any]) -> None:
        for url, result in results.items():
            if isinstance(result, RollplaneError):
                self.errors[url] = result.message
                if isinstance(result, TransportError):
                    self.unheard.add(url)


async def every(
    members: Sequence[Member],
    work: Callable[[Member], Awaitable[T]],
    *,
    phase: str | None = None,
    tell: Tell = tell_nobody,
) -> dict[str, T | RollplaneError]:
    """`work` on all members at once: the result or our error of each, by address, all waited for.

    Args:
        phase: its name in what is told; None: nothing is.

    Raises:
        BaseException: an error that is not one of ours, after all have ended.
    """

    async def told(member: Member) -> T:
        if phase is None:
            return await work(member)
        began = time.monotonic()
        try:
            result = await work(member)
        except RollplaneError as error:
            tell(phase, worker=member.url, seconds=time.monotonic() - began, error=error)
            raise
        tell(phase, worker=member.url, seconds=time.monotonic() - began)
        return result

    if phase is not None:
        tell(phase)
    results = await asyncio.gather(*(told(member) for member in members), return_exceptions=True)
    out: dict[str, T | RollplaneError] = {}
    for member, result in zip(members, results, strict=True):
        if isinstance(result, BaseException) and not isinstance(result, RollplaneError):
            raise result
        out[member.url] = result
    return out
