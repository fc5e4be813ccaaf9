"""The workers of a fleet and where each is in its life.

Rules for editors of the table: only `current` takes requests; it is entered only by a worker whose version and digest
were read back and are the fleet's. `fenced` is left by a successful update, by a restart of the process, or, where the
worker only could not be heard, once it is heard again and brought up to date. A member that is `gone` never comes back; a
new one is made for the same address.

    joining -> current -> updating -> current
       ^          |          |
       |          v          v
       `------- fenced <-----'          any -> gone
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

from rollplane.engines.base import Engine
from rollplane.errors import RollplaneError
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
from rollplane.protocol.state import WorkerState
from rollplane.rl.base import Operation

MemberState = Literal["joining", "current", "updating", "fenced", "gone"]

TRANSITIONS: Final[dict[MemberState, frozenset[MemberState]]] = {
    "joining": frozenset({"current", "updating", "fenced", "gone"}),
    "current": frozenset({"joining", "updating", "fenced", "gone"}),
    "updating": frozenset({"current", "joining", "fenced", "gone"}),
    "fenced": frozenset({"joining", "updating", "gone"}),
    "gone": frozenset(),
}


class FleetWorker(Protocol):
    """A worker as a fleet needs it; `rl.remote.RemoteWorker` is one."""

    @property
    def url(self) -> str:
        """Its address, which is its name in the fleet."""
        ...

    @property
    def engine(self) -> Engine:
        """What makes tokens there."""
        ...

    @property
    def state(self) -> WorkerState | None:
        """The last state heard."""
        ...

    @property
    def reachable(self) -> bool:
        """Whether the last look at it succeeded."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why the last look at it failed; None where it succeeded."""
        ...

    def follow(self, listener: Callable[[], None]) -> None:
        """Follow its state and call `listener` after every change."""
        ...

    def drop_requests(self, reason: str) -> int:
        """Break off every request in flight with TransportError(`reason`)."""
        ...

    async def refresh(self) -> WorkerState:
        """Ask for the state now."""
        ...

    async def claim_key(self, key: str, keeper: str, *, number: int, limit_s: float) -> tuple[str, int]:
        """The keeper that its book has for an idempotency key, and its number; see `KeyBook.claim`."""
        ...

    async def close(self) -> None:
        """Let go of it; it goes on."""
        ...

    async def stage_weights(
        self, path: str, *, allow_tensors: Sequence[AllowTensors] = (), operation: Operation
    ) -> StagedWeights:
        """Read and check a checkpoint while tokens are made."""
        ...

    async def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, epoch: int | None = None
    ) -> PauseReport:
        """See `PolicyAdmin.pause`."""
        ...

    async def resume(self, *, epoch: int | None = None) -> ResumeReport:
        """See `PolicyAdmin.resume`."""
        ...

    async def update_from_disk(
        self,
        path: str,
        *,
        version: str | None = None,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        expected_digest: str | None = None,
        allow_tensors: Sequence[AllowTensors] = (),
        operation: Operation | None = None,
    ) -> UpdateReport:
        """See `PolicyAdmin.update_from_disk`; `expected_digest`: refuse other contents."""
        ...

    async def set_policy_version(self, version: str, *, epoch: int | None = None) -> None:
        """See `PolicyAdmin.set_policy_version`."""
        ...

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """See `PolicyAdmin.flush_cache`."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """Its own record."""
        ...

    async def load_adapter(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.load_adapter`."""
        ...

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.unload_adapter`."""
        ...


class Member:
    """One worker's place in the fleet. `reason`: why it takes no requests; `instance`: the process this speaks of.

    Args:
        stall_s: an engine with work that has not moved for longer takes no further request; None: no such limit.
        on_enter: called after every arrow of the table that it follows.
    """

    def __init__(
        self, worker: FleetWorker, *, stall_s: float | None = None, on_enter: Callable[[], None] = lambda: None
    ) -> None:
        self.worker = worker
        self.stall_s = stall_s
        self._on_enter = on_enter
        self.state: MemberState = "joining"
        self.reason: str | None = "not reached yet"
        self.instance: str | None = None
        self.foreign = False
        """Its engine's facts differ from the fleet's: no operation is for it."""
        self.paused_here = False
        """The fleet paused it, or may have, and has not resumed it. No caller asked for that pause, or it was taken back."""
        self.unheard = False
        """It was fenced because it could not be heard, not for what it did: once heard, it is brought up to date."""
        self.unsettled = False
        """It may still carry out a command that it never answered: it serves again only after a later one was carried out."""
        self.seen: str | None = None
        """The version that this process of it served when it was last looked at; None before that."""
        self.unsteady = False
        """It may still pause, resume or be named by a command that it never answered: asked again before it serves."""
        self.before: tuple[str, str | None] | None = None
        """Version and digest it had before the last update."""
        self.since = time.monotonic()

    def __repr__(self) -> str:
        heard = self.worker.state
        version = "?" if heard is None else heard.policy_version
        seen = "" if self.worker.reachable else " unreachable"
        why = f" ({self.reason})" if self.reason else ""
        return f"<Member {self.url} {self.state}{seen} {version}{why}>"

    @property
    def url(self) -> str:
        """The worker's address."""
        return self.worker.url

    @property
    def version(self) -> str | None:
        """The policy version it last told."""
        return None if self.worker.state is None else self.worker.state.policy_version

    @property
    def routable(self) -> bool:
        """Whether it may get a request now."""
        heard = self.worker.state
        return (
            self.state == "current"
            and self.worker.reachable
            and heard is not None
            and heard.instance == self.instance
            and heard.health.alive
            and heard.health.state == "ready"
            and (self.stall_s is None or heard.health.last_progress_s <= self.stall_s or self.stall is None)
        )

    @property
    def stall(self) -> str | None:
        """Why its engine counts as stuck, by what it last told: its process answers and its work does not move."""
        heard = self.worker.state
        if heard is None or self.stall_s is None or heard.health.state != "ready":
            return None
        health = heard.health
        if health.running + health.waiting == 0 or health.last_progress_s <= self.stall_s:
            return None
        return f"no progress for {health.last_progress_s:.1f} s; the limit is {self.stall_s:g} s"

    def enter(self, state: MemberState, reason: str | None = None) -> None:
        """Follow an arrow of the table.

        Raises:
            RollplaneError: there is none.
        """
        if state == self.state:
            self.reason = reason
            return
        if state not in TRANSITIONS[self.state]:
            raise RollplaneError(f"worker {self.url}: no way from {self.state} to {state}")
        self.state, self.reason = state, reason
        self.since = time.monotonic()
        self._on_enter()
