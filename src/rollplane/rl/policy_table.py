"""Where the policy of one worker is: paused, receiving, asleep or making tokens, as one state table.

Rules for editors of the table: a state is left only along an arrow; `ready` is entered only from `paused`, so nothing
serves weights whose version was not verified; `failed` is left only by an update that succeeds. Versions advance after
success and nowhere else.

    ready -> pausing -> paused -> receiving -> verifying -> paused -> ready
                         |  ^        |            `-> failed -> receiving
                         v  |        `-> paused (refused: the old weights still serve)
                        asleep

Weights that come in steps of their own calls (`rl.native`) hold the table in `receiving` from `open_update` to
`close_update`, and nothing else changes the policy meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

from rollplane.engines.base import WeightReceiver
from rollplane.errors import Conflict, EngineFailed, RollplaneError, Unavailable
from rollplane.identity import CacheScope
from rollplane.protocol.admin import PauseMode, PauseReport, ResumeReport, StagedWeights, TensorMismatch
from rollplane.rl.operations import Operations
from rollplane.rl.versions import VersionSequence

PolicyState = Literal["ready", "pausing", "paused", "receiving", "verifying", "failed", "asleep"]

TRANSITIONS: Final[dict[PolicyState, frozenset[PolicyState]]] = {
    "ready": frozenset({"pausing"}),
    "pausing": frozenset({"paused", "ready"}),
    "paused": frozenset({"ready", "receiving", "pausing", "asleep"}),
    "receiving": frozenset({"verifying", "paused", "failed"}),
    "verifying": frozenset({"paused", "failed"}),
    "failed": frozenset({"receiving"}),
    "asleep": frozenset({"paused"}),
}


@dataclass(frozen=True, kw_only=True)
class OpenUpdate:
    """`ran`: the worker made tokens before. `whole`: the weights before it were of a known version. `began`: clock seconds."""

    ran: bool
    whole: bool
    began: float


class PolicyTable:
    """The table, and every way along it but that of an update at once (`rl.weights`).

    Args:
        receiver: the engine.
        on_change: called after every change of state, version or digest.
        clock: monotonic seconds.
        life: see `identity.CacheScope`.
        found: how the engine was found, which may have been there before.
    """

    def __init__(
        self,
        receiver: WeightReceiver,
        *,
        life: str = "",
        found: Literal["ready", "paused", "asleep"] = "ready",
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.receiver = receiver
        self.operations = Operations()
        self.sequence = VersionSequence(receiver.policy_version)
        self.scope = CacheScope(receiver.policy_version, life=life)
        self.digest: str | None = None
        self.ignored: TensorMismatch | None = None
        """Where the checkpoint of the weights in place was allowed to differ from the model."""
        self.paused_by_caller = found == "paused"
        self._state: PolicyState = found
        self._since = clock()
        self._clock = clock
        self._on_change = on_change
        self._ready = asyncio.Event()
        if found != "paused":
            self._ready.set()
        self._updates = asyncio.Lock()  # one update at a time, staging included
        self._lock = asyncio.Lock()  # what an update must not meet half-way: resume and labels
        self._pausing = 0
        self._pauses_over = asyncio.Event()
        self._pauses_over.set()
        self._callers_pausing = 0
        self._resuming = 0
        self._pauses = 0
        self._stays_paused = False
        self._staged: dict[str, StagedWeights] = {}
        self._open: OpenUpdate | None = None
        self._ran_before_sleep = False

    def __repr__(self) -> str:
        return f"<PolicyControl {self._state} at {self.version!r}>"

    @property
    def state(self) -> PolicyState:
        """Where in the table this worker is."""
        return self._state

    @property
    def state_age_s(self) -> float:
        """Seconds since the state was entered."""
        return self._clock() - self._since

    @property
    def version(self) -> str:
        """The version that makes tokens."""
        return self.receiver.policy_version

    async def wait_ready(self) -> None:
        """Return once tokens are being made.

        Raises:
            Unavailable: the weights in place are of unknown version, or the engine is asleep.
        """
        while self._state != "ready":
            if self._state == "failed":
                raise Unavailable("a weight update failed and the weights in place are of unknown version")
            if self._state == "asleep":
                raise Unavailable("the engine is asleep: its memory was given back")
            ready = self._ready
            await ready.wait()

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> PauseReport:
        """Stop making tokens; see `PolicyAdmin.pause`. Concurrent pauses join; the strictest mode wins.

        Raises:
            Conflict: an update is under way.
        """
        self._callers_pausing += 1
        try:
            report = await self._pause(mode, clear_cache=clear_cache)
            self.paused_by_caller = True
        finally:
            self._callers_pausing -= 1
        return report

    async def _pause(self, mode: PauseMode, *, clear_cache: bool) -> PauseReport:
        if self._state in ("failed", "asleep"):
            return PauseReport(mode=mode, already_paused=True)
        if self._state not in ("ready", "pausing", "paused"):
            raise Conflict(f"cannot pause while the worker is {self._state}")
        was_paused = self._state == "paused" and not self._resuming
        self._pausing += 1
        self._pauses += 1
        self._pauses_over.clear()
        self._enter("pausing")
        try:
            report = await self.receiver.pause(mode, clear_cache=clear_cache)
        except BaseException:
            await self._end_pause(paused=was_paused)
            raise
        await self._end_pause(paused=True)
        report.already_paused = was_paused
        return report

    async def _end_pause(self, *, paused: bool) -> None:
        """One of the pauses that are under way has ended; the last one decides, paused if any of them is."""
        self._pausing -= 1
        self._stays_paused = self._stays_paused or paused
        if self._pausing > 0:
            return
        stays, self._stays_paused = self._stays_paused, False
        try:
            if not stays:
                await self._run_again()
        except BaseException:
            stays = True  # what is certain is that nobody said that it runs
            raise
        finally:
            if self._pausing == 0:
                if stays:
                    self._enter("paused")
                self._pauses_over.set()

    async def _run_again(self) -> None:
        """Resume the engine and say ready, unless a pause began meanwhile: it came to the engine later, so it holds."""
        self._resuming += 1
        pauses = self._pauses
        try:
            await self.receiver.resume()
        finally:
            self._resuming -= 1
        if self._pauses == pauses:
            self._enter("ready")

    async def resume(self) -> ResumeReport:
        """Make tokens again; see `PolicyAdmin.resume`.

        Raises:
            Unavailable: the weights in place are of unknown version.
            Conflict: a pause is still under way.
        """
        async with self._lock:
            if self._state == "failed":
                raise Unavailable(
                    "the last weight update failed: the version in place is unknown; update again before resuming",
                    retry_after_s=None,
                )
            if self._state == "pausing":
                raise Conflict("a pause is under way; resume when it has returned")
            self._must_be_closed()
            if self._state == "asleep":
                raise Conflict("the engine is asleep; wake it up before resuming")
            was_paused = self._state == "paused"
            self.paused_by_caller = False
            if was_paused:
                await self._run_again()
            return ResumeReport(was_paused=was_paused, policy_version=self.version)

    # -- updates in steps, and sleep: `rl.native` is the caller -----------------------------------------------------------

    @property
    def update_open(self) -> bool:
        """Whether an update in steps was opened and not closed."""
        return self._open is not None

    async def open_update(self, start: Callable[[], Awaitable[None]]) -> None:
        """Pause (keep), then begin to receive; only `close_update`, or an error, ends that.

        Raises:
            Conflict: one is open, or the engine is asleep.
        """
        async with self._updates, self._lock:
            self._must_be_closed()
            self._must_be_awake()
            came_from = self._state
            if came_from != "failed":
                async with self._or_run_again(ran=came_from != "paused"):
                    await self._pause_for_update("keep", clear_cache=False)
            self._open = OpenUpdate(
                ran=came_from not in ("paused", "failed"), whole=came_from != "failed", began=self._clock()
            )
            self._enter("receiving")
            await self._step(start)

    async def receive(self, part: Callable[[], Awaitable[None]]) -> None:
        """One step of an open update.

        Raises:
            Conflict: none is open.
        """
        self._must_be_open()
        async with self._updates, self._lock:
            self._must_be_open()
            await self._step(part)

    async def close_update(self, finish: Callable[[], Awaitable[None]], *, version: str) -> float:
        """The last step: verify the version, and resume if it ran before. Seconds since it was opened."""
        self._must_be_open()
        async with self._updates, self._lock:
            opened = self._must_be_open()
            await self._step(finish, version=version)
            self._open = None
            self._took(version, digest=None)
            await self._resume_after(opened)
            return self._clock() - opened.began

    async def _step(self, step: Callable[[], Awaitable[None]], *, version: str | None = None) -> None:
        """A step of the open update; one that fails ends it, with the old weights (EngineFailed) or with nobody knows what."""
        opened = self._must_be_open()
        try:
            await step()
            if version is not None:
                self._enter("verifying")
                self._verify(version)
        except BaseException as error:
            self._open = None
            kept = isinstance(error, EngineFailed) and opened.whole and self._state != "verifying"
            self._enter("paused" if kept else "failed")
            if kept:
                await self._resume_after(opened)
            raise

    @contextlib.asynccontextmanager
    async def _or_run_again(self, *, ran: bool) -> AsyncIterator[None]:
        """A pause of ours that fails, or is called off, leaves nobody paused who ran."""
        try:
            yield
        except BaseException:
            if ran and self._state == "paused" and not (self.paused_by_caller or self._callers_pausing):
                await self._run_again()
            raise

    async def _resume_after(self, opened: "OpenUpdate") -> None:
        if opened.ran and not (self.paused_by_caller or self._callers_pausing):
            await self._run_again()

    async def fall_asleep(self, mode: PauseMode, sleep: Callable[[], Awaitable[None]]) -> PauseReport | None:
        """Pause, with what is cached dropped, then sleep; None: asleep already.

        Raises:
            Conflict: an update is open. Unavailable: the weights in place are of unknown version.
        """
        async with self._updates, self._lock:
            self._must_be_closed()
            if self._state == "asleep":
                return None
            if self._state == "failed":
                raise Unavailable("a weight update failed: update again before sleeping", retry_after_s=None)
            ran = self._state != "paused"
            async with self._or_run_again(ran=ran):
                report = await self._pause(mode, clear_cache=True)
                await self._pauses_over.wait()
                while self._state != "paused":
                    await self._pause_for_update(mode, clear_cache=True)
            self._ran_before_sleep = ran
            self._enter("asleep")  # also when it fails half-way: what is there must be taken back before anything steps
            await sleep()
            return report

    async def wake(self, wake_up: Callable[[], Awaitable[bool]]) -> bool:
        """Take memory back, and resume if it ran before once all of it is; whether it slept.

        Args:
            wake_up: whether all of the memory is back.
        """
        async with self._lock:
            if self._state != "asleep":
                return False
            if await wake_up():
                self._enter("paused")
                if self._ran_before_sleep and not self.paused_by_caller:
                    await self._run_again()
            return True

    def _must_be_open(self) -> "OpenUpdate":
        if self._open is None:
            raise Conflict("no weight update is open; start one first")
        return self._open

    def _must_be_closed(self) -> None:
        if self._open is not None:
            raise Conflict("a weight update by the engine's own transfer is open; finish it first")

    def _must_be_awake(self) -> None:
        if self._state == "asleep":
            raise Conflict("the engine is asleep; wake it up first")

    async def _pause_for_update(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Paused, with every pause that was under way over; one that failed may have resumed the engine again."""
        await self._pause(mode, clear_cache=clear_cache)
        await self._pauses_over.wait()
        while self._state != "paused":
            await self._pause(mode, clear_cache=clear_cache)
            await self._pauses_over.wait()

    def _verify(self, version: str) -> None:
        if self.receiver.policy_version != version:
            raise RollplaneError(
                f"the engine says version {self.receiver.policy_version!r} after an update to {version!r}"
            )

    def _took(self, version: str, *, digest: str | None, ignored: TensorMismatch | None = None) -> None:
        """New weights are in place and verified."""
        self.digest = digest
        self.ignored = ignored
        self._staged.clear()
        self.sequence.advance(version)
        self.scope.renew(version)
        self._enter("paused")

    def _enter(self, state: PolicyState) -> None:
        if state != self._state:
            if state not in TRANSITIONS[self._state]:
                raise RollplaneError(f"no way from {self._state} to {state}")
            self._state = state
            self._since = self._clock()
        if state in ("ready", "failed", "asleep"):
            self._ready.set()
        elif self._ready.is_set():
            self._ready = asyncio.Event()
        self._on_change()
