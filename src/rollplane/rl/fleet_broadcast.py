"""Weights from the trainer's memory into all workers of a fleet: one group over all of them, then the fleet's own update.

Ranks are contiguous over the workers in the order in which they joined the fleet. What arrives lies beside each model until all
workers have told the digest of the same bytes; from there on it is an update like one from disk: gate, pause, apply, verify,
open, or back. There is no checkpoint on any disk then, so a worker that joins late cannot be brought to such a policy:
it waits for the next update.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from rollplane.errors import CallerError, Conflict, EngineFailed, InvalidRequest, RollplaneError, Unavailable
from rollplane.protocol.admin import PauseMode, StagedWeights, UpdateReport
from rollplane.protocol.broadcast import GroupReport, Manifest, TransferGroup
from rollplane.rl.base import Operation
from rollplane.rl.fleet_update import Checkpoint, FleetUpdate, every
from rollplane.rl.members import Member
from rollplane.rl.operation_log import Tell, tell_nobody

LEAVE_S: Final = 30.0


@runtime_checkable
class BroadcastWorker(Protocol):
    """A worker of a fleet that can be in a weight group."""

    async def init_weights_group(self, group: TransferGroup, *, operation: Operation | None = None) -> GroupReport:
        """See `BroadcastAdmin.init_weights_group`."""
        ...

    async def stage_broadcast(self, manifest: Manifest, *, operation: Operation | None = None) -> StagedWeights:
        """Receive what rank 0 broadcasts and keep it beside the model."""
        ...

    async def apply_staged(
        self,
        digest: str,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Put staged weights in place."""
        ...

    async def destroy_weights_group(self, *, operation: Operation | None = None) -> GroupReport:
        """See `BroadcastAdmin.destroy_weights_group`."""
        ...


class BroadcastUpdate(FleetUpdate):
    """A `FleetUpdate` to weights that every worker has staged already."""

    def __init__(self, members: Sequence[Member], *, staged: StagedWeights, **settings: Any) -> None:
        super().__init__(members, **settings)
        self._staged = staged

    async def stage(self) -> StagedWeights:
        """What was received."""
        self.target = msgspec.structs.replace(self.target, digest=self._staged.digest)
        return self._staged

    async def _put(self, member: Member, checkpoint: Checkpoint, *, step: str) -> UpdateReport:
        if checkpoint.path is not None:
            return await super()._put(member, checkpoint, step=step)
        if step != "apply":
            raise EngineFailed(f"version {checkpoint.version!r} came by broadcast and is on no disk to go back to")
        return await receiver_of(member).apply_staged(
            self._staged.digest,
            version=checkpoint.version,
            mode=self.mode,
            clear_cache=self.clear_cache,
            operation=self._named(step),
        )


class FleetGroup:
    """The weight group of a fleet: which workers are in it, and what they have received."""

    def __init__(self) -> None:
        self.group: TransferGroup | None = None
        self.members: list[Member] = []
        self.staged: StagedWeights | None = None
        self._busy = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<FleetGroup {'none' if self.group is None else self.group.group_name} of {len(self.members)} workers>"

    async def init(
        self, group: TransferGroup, members: Sequence[Member], *, operation: Operation, tell: Tell = tell_nobody
    ) -> GroupReport:
        """Let every worker join, each with its ranks; if one cannot, all leave.

        Raises:
            Conflict: there is a group already.
            InvalidRequest: sizes that do not add up, or a worker that can be in no group.
            EngineFailed: not all workers came.
        """
        async with self._once():
            if self.group is not None:
                raise Conflict("this fleet is in a weight group already; destroy it first", param="group_name")
            parts: dict[str, TransferGroup] = {}
            offset = group.rank_offset
            for member in members:
                receiver_of(member)
                size = member.worker.state.info.world_size if member.worker.state is not None else 0
                if size < 1:
                    raise Unavailable(f"worker {member.url} does not say its world size")
                parts[member.url] = msgspec.structs.replace(group, rank_offset=offset)
                offset += size
            if offset != group.world_size:
                raise InvalidRequest(
                    f"world_size is {group.world_size}, the {len(members)} workers have ranks {group.rank_offset} to "
                    f"{offset - 1}, so it must be {offset}",
                    param="world_size",
                )
            self.group, self.members, self.staged = group, list(members), None
            results = await every(
                members,
                lambda m: receiver_of(m).init_weights_group(parts[m.url], operation=_step(operation, "init")),
                phase="join",
                tell=tell,
            )
            errors = {url: result for url, result in results.items() if isinstance(result, RollplaneError)}
            if errors:
                await self._leave()
                raise _first(errors, what="could not join the weight group")
        return GroupReport(
            active=True,
            group_name=group.group_name,
            backend=group.backend,
            ranks=list(range(group.rank_offset, offset)),
            world_size=group.world_size,
        )

    async def receive(self, manifest: Manifest, *, operation: Operation, tell: Tell = tell_nobody) -> StagedWeights:
        """Let every worker receive, and hold their digests against each other; nothing changes anywhere.

        Raises:
            Conflict: there is no group, or workers received other bytes than others.
            InvalidRequest, DeadlineExceeded, EngineFailed: a worker's own error.
        """
        manifest.check()
        async with self._once():
            if self.group is None:
                raise Conflict("this fleet is in no weight group; init one first")
            self.staged = None
            results = await every(
                self.members,
                lambda m: receiver_of(m).stage_broadcast(manifest, operation=_step(operation, "receive")),
                phase="receive",
                tell=tell,
            )
            errors = {url: result for url, result in results.items() if isinstance(result, RollplaneError)}
            if errors:
                raise _first(errors, what="did not receive the weights, nothing changed")
            found = {url: result.digest for url, result in results.items() if isinstance(result, StagedWeights)}
            if len(set(found.values())) != 1:
                raise Conflict("the workers received different bytes, nothing changed", details={"digests": found})
            one = next(result for result in results.values() if isinstance(result, StagedWeights))
            self.staged = one
            return one

    def update(self, digest: str, members: Sequence[Member], **settings: Any) -> BroadcastUpdate:
        """The update to what was received.

        Raises:
            Conflict: nothing of this digest was received, or a worker of the fleet was not in the group.
        """
        if self.staged is None or self.staged.digest != digest:
            raise Conflict(
                f"no staged weights have the digest {digest[:16]}...; stage them first",
                param="digest",
                details={"staged": [] if self.staged is None else [self.staged.digest]},
            )
        inside = [member for member in members if member in self.members]
        outside = [member.url for member in members if member not in self.members and member.state == "current"]
        if outside:
            raise Conflict(
                f"{', '.join(outside)} serve and were not in the weight group; make a new one with every worker",
                details={"workers": outside},
            )
        return BroadcastUpdate(inside, staged=self.staged, **settings)

    async def destroy(self) -> GroupReport:
        """Let every worker leave; what is under way ends. Without a group nothing happens."""
        await self._leave()
        return GroupReport(active=False)

    async def _leave(self) -> None:
        members, self.members, self.group, self.staged = self.members, [], None, None
        await every(members, lambda m: receiver_of(m).destroy_weights_group(operation=Operation(deadline_s=LEAVE_S)))

    @contextlib.asynccontextmanager
    async def _once(self) -> AsyncIterator[None]:
        if self._busy.locked():
            raise Conflict("the fleet's weight group is being joined, or receives, already")
        async with self._busy:
            yield


def receiver_of(member: Member) -> BroadcastWorker:
    """A member's worker as a receiver.

    Raises:
        InvalidRequest: it is none.
    """
    worker: object = member.worker
    if not isinstance(worker, BroadcastWorker):
        raise InvalidRequest(f"worker {member.url} takes no weights by broadcast")
    return worker


def _step(operation: Operation, step: str) -> Operation:
    # Never asked for again under one name: a broadcast is missed by whoever answers from memory.
    return msgspec.structs.replace(operation, id=None if operation.id is None else f"{operation.id}/{step}")


def _first(errors: dict[str, RollplaneError], *, what: str) -> RollplaneError:
    """The error to raise for several: a caller's mistake in its own kind, with every worker's sentence."""
    first = next((error for error in errors.values() if isinstance(error, CallerError)), next(iter(errors.values())))
    kind = type(first)
    return kind(
        f"{len(errors)} workers {what}; the first: {first.message}",
        param=first.param,
        details={"workers": {url: error.message for url, error in errors.items()}},
    )
