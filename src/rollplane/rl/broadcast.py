"""The weight group of one worker: joined once, received in as often as the trainer likes, left when it is over.

What arrives lies in memory of its own until all of it is there; then it goes into place like a staged checkpoint, by
`PolicyControl`. A trainer that dies or is late ends the receive within its deadline: the worker leaves the group and
goes on serving the version it had.

Rules for editors of the table: at most one group; `receiving` is left to `joined` only when every rank is still in step,
else the group is left. `absent` again means that nothing of it is left.

    absent -> joining -> joined -> receiving -> joined
      ^          |         |           |
      `----------+-- leaving <---------'
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

from rollplane.engines.base import BroadcastReceiver
from rollplane.errors import Conflict, InvalidRequest, RollplaneError
from rollplane.protocol.admin import PauseMode, StagedWeights, UpdateReport
from rollplane.protocol.broadcast import GroupReport, Manifest, TransferGroup
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.versions import check_version_name
from rollplane.rl.base import Operation
from rollplane.rl.weights import PolicyControl

GroupState = Literal["absent", "joining", "joined", "receiving", "leaving"]

TRANSITIONS: Final[dict[GroupState, frozenset[GroupState]]] = {
    "absent": frozenset({"joining"}),
    "joining": frozenset({"joined", "leaving"}),
    "joined": frozenset({"receiving", "leaving"}),
    "receiving": frozenset({"joined", "leaving"}),
    "leaving": frozenset({"absent"}),
}


class BroadcastControl:
    """Owns the weight group of one worker.

    Args:
        receiver: the engine.
        policy: puts what was received in place.
        info: the engine's facts: how many ranks receive, and by which backends.
        on_change: called after every change of state.
    """

    def __init__(
        self,
        receiver: BroadcastReceiver,
        policy: PolicyControl,
        *,
        info: EngineInfo,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.receiver = receiver
        self.policy = policy
        self.info = info
        self.group: TransferGroup | None = None
        self._state: GroupState = "absent"
        self._since = clock()
        self._clock = clock
        self._on_change = on_change
        self._work: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        group = self.group
        return (
            f"<BroadcastControl {self._state}{'' if group is None else f' {group.group_name!r} of {group.world_size}'}>"
        )

    @property
    def state(self) -> GroupState:
        """Where in the table this worker is."""
        return self._state

    @property
    def state_age_s(self) -> float:
        """Seconds since the state was entered."""
        return self._clock() - self._since

    def report(self) -> GroupReport:
        """The group as callers see it."""
        group = self.group
        if group is None:
            return GroupReport(active=False)
        first = group.rank_offset
        return GroupReport(
            active=self._state in ("joined", "receiving"),
            group_name=group.group_name,
            backend=group.backend,
            ranks=list(range(first, first + self.info.world_size)),
            world_size=group.world_size,
        )

    async def init(self, group: TransferGroup, *, operation: Operation | None = None) -> GroupReport:
        """Join a trainer's group; answers when all of its ranks are there.

        Raises:
            InvalidRequest: ranks, a backend or a topology that cannot be served.
            Conflict: there is a group already; destroy it first.
            DeadlineExceeded, EngineFailed: not all ranks came; nothing is left.
        """
        self._check(group)
        deadline_s = (operation or Operation()).deadline_s

        async def work() -> GroupReport:
            if self._state != "absent":
                raise Conflict(
                    f"{self!r}: a worker is in one weight group at a time; destroy it first",
                    param="group_name",
                    details={"state": self._state, "age_s": round(self.state_age_s, 3)},
                )
            self.group = group
            self._enter("joining")
            await self._guarded(partial(self.receiver.join_group, group, deadline_s=deadline_s))
            self._enter("joined")
            return self.report()

        return await self.policy.operations.run(
            operation, ("init group", group), work, what="joining of a weight group"
        )

    async def stage(self, manifest: Manifest, *, operation: Operation | None = None) -> StagedWeights:
        """Receive weights and keep them beside the model, for `PolicyControl.apply_staged`.

        Raises:
            Conflict: no group, or one that receives already.
            InvalidRequest: tensors that are not the model's; nothing was received.
            DeadlineExceeded, EngineFailed: the trainer is gone or late; the group was left, the old version serves.
        """
        manifest.check()
        return await self.policy.stage_from(
            "broadcast",
            partial(self._receive, manifest, (operation or Operation()).deadline_s),
            arguments=("stage broadcast", manifest),
            operation=operation,
        )

    async def update(
        self,
        manifest: Manifest,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        expected_digest: str | None = None,
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Receive weights while tokens are made, then pause, apply, verify and resume; see `stage` for errors."""
        manifest.check()
        check_version_name(version, param="weight_version")
        deadline_s = (operation or Operation()).deadline_s

        async def work() -> UpdateReport:
            return await self.policy.update_from(
                partial(self._receive, manifest, deadline_s),
                version=version,
                mode=mode,
                clear_cache=clear_cache,
                expected_digest=expected_digest,
            )

        return await self.policy.operations.run(
            operation,
            ("broadcast", manifest, version, mode, clear_cache, expected_digest),
            work,
            what="weight update by broadcast",
        )

    async def destroy(self, *, operation: Operation | None = None) -> GroupReport:
        """Leave the group; a join or receive under way ends with an error. Without a group nothing happens."""

        async def work() -> GroupReport:
            await self._leave()
            return self.report()

        return await self.policy.operations.run(operation, ("destroy group",), work, what="leaving of a weight group")

    async def close(self) -> None:
        """Leave, whatever is under way."""
        await self._leave()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check(self, group: TransferGroup) -> None:
        size = self.info.capabilities.data_parallel_size
        if size > 1:
            raise InvalidRequest(
                f"weight transfer is refused for data parallelism {size}: run one worker per replica instead"
            )
        group.check(receivers=self.info.world_size)
        offered = [name for name in self.info.capabilities.weight_transfer if name != "disk"]
        if group.backend not in offered:
            raise InvalidRequest(
                f"backend {group.backend!r} does not work here; {', '.join(offered) or 'none'} do", param="backend"
            )

    def _must_be_joined(self) -> None:
        if self._state != "joined":
            what = "no weight group" if self.group is None else f"a weight group that is {self._state}"
            raise Conflict(f"this worker has {what}; init one first")

    async def _receive(self, manifest: Manifest, deadline_s: float) -> StagedWeights:
        self._must_be_joined()
        self._enter("receiving")
        staged: StagedWeights = await self._guarded(
            partial(self.receiver.receive_weights, manifest, deadline_s=deadline_s)
        )
        self._enter("joined")
        return staged

    async def _guarded(self, call: Callable[[], Any]) -> Any:
        """One call into the group; what leaves it out of step leaves it."""
        task = self._work = asyncio.create_task(call(), name="weight group")
        try:
            return await task
        except InvalidRequest:
            if self._state == "receiving":
                self._enter("joined")  # refused before anything came, or received whole: every rank is in step
            else:
                await self._leave()
            raise
        except BaseException as error:
            task.cancel()
            await self._leave()
            current = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and current is not None and not current.cancelling():
                raise Conflict("the weight group was destroyed meanwhile") from None
            raise
        finally:
            if self._work is task:
                self._work = None

    async def _leave(self) -> None:
        if self._state in ("absent", "leaving"):
            return
        self._enter("leaving")
        task, self._work = self._work, None
        if task is not None:
            task.cancel()
        try:
            await self.receiver.leave_group()
        finally:
            self.group = None
            self._enter("absent")

    def _enter(self, state: GroupState) -> None:
        if state not in TRANSITIONS[self._state]:
            raise RollplaneError(f"no way from {self._state} to {state}")
        self._state = state
        self._since = self._clock()
        self._on_change()
