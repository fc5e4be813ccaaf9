"""An engine's own weight transfer and sleep, asked for step by step, as parts of the one policy table.

vLLM's trainers call `init`, then for each update `start`, `update` (once per part) and `finish`. A start pauses a worker that
runs, a finish lets it go on. Between them nothing else changes the policy, requests wait, and a trainer that does not come back
within the deadline of its start has given the update up: the engine goes back to the old weights, or serves nothing.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

from rollplane.engines.base import NativeControls
from rollplane.errors import Conflict, DeadlineExceeded, InvalidRequest, RollplaneError
from rollplane.protocol.admin import PauseMode, SleepReport, TransferReport
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.versions import check_version_name
from rollplane.rl.base import Operation
from rollplane.rl.weights import PolicyControl

SLEEP_LEVEL: Final = 1
SLEEP_TAGS: Final = ("weights", "kv_cache")
T = TypeVar("T")


class NativeControl:
    """Owns the native steps of one worker.

    Args:
        engine: whose transfer and sleep they are.
        policy: the table that they move.
        info: the engine's facts.
    """

    def __init__(self, engine: NativeControls, policy: PolicyControl, *, info: EngineInfo) -> None:
        self.policy = policy
        self.info = info
        self.transfer = engine.native
        self.sleeping = engine.sleeping
        self.parts = 0
        self._joined = False
        self._ends = 0.0
        self._watcher: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        state = "open" if self.policy.update_open else "joined" if self._joined else "not joined"
        asleep = ", asleep" if self.sleeping.asleep else ""
        return f"<NativeControl {self.transfer.backend or 'without a backend'}, {state}{asleep}>"

    # -- weight transfer -------------------------------------------------------------------------------------------

    async def init(self, info: dict[str, Any], *, operation: Operation | None = None) -> TransferReport:
        """Join the trainer's group; again, after a trainer's restart, is fine.

        Raises:
            InvalidRequest: no backend here, or an object that it does not take. Conflict: an update is open.
        """
        self._backend()

        async def work() -> TransferReport:
            async with self._turn:
                if self.policy.update_open:
                    raise Conflict("a weight update is open; finish it before another group is joined")
                await self.transfer.init(info)
                self._joined = True
                return self._report()

        return await self._run(operation, ("native init", info), work, what="joining of a trainer's transfer")

    async def start(self, *, operation: Operation | None = None) -> TransferReport:
        """Pause and open an update; `deadline_s` of the operation is that of the whole update.

        Raises:
            Conflict: never joined, one is open, or the engine is asleep.
        """
        self._backend()
        deadline_s = (operation or Operation()).deadline_s

        async def work() -> TransferReport:
            async with self._turn:
                if not self._joined:
                    raise Conflict(
                        "the transfer was not joined since this worker started; init_weight_transfer_engine first"
                    )
                self.parts = 0
                await self.policy.open_update(self.transfer.start)
                self._ends = asyncio.get_running_loop().time() + deadline_s
                self._watcher = asyncio.create_task(self._watch(deadline_s), name="open weight update")
                return self._report()

        return await self._run(operation, ("native start",), work, what="start of a weight update")

    async def update(self, info: dict[str, Any], *, operation: Operation | None = None) -> TransferReport:
        """Receive a part.

        Raises:
            Conflict: none is open. EngineFailed: the old weights serve again. Others: nothing serves until an update succeeds.
        """
        self._backend()

        async def work() -> TransferReport:
            await self._step(partial(self.policy.receive, partial(self.transfer.update, info)))
            self.parts += 1
            return self._report()

        return await self._run(operation, ("native update", info), work, what="receiving of weights")

    async def finish(self, version: str | None, *, operation: Operation | None = None) -> TransferReport:
        """Close the update and let the worker go on, unless it was paused before; errors as of `update`.

        Args:
            version: None: a name is made up, for other weights are never served under the old one.
        """
        self._backend()
        if version is not None:
            check_version_name(version, param="weight_version")

        async def work() -> TransferReport:
            name = version or self._made_up()
            previous = self.policy.version
            pause_s = await self._step(
                partial(self.policy.close_update, partial(self.transfer.finish, name), version=name)
            )
            self._stop_watching()
            report = self._report()
            report.previous_version, report.pause_s = previous, pause_s
            return report

        return await self._run(operation, ("native finish", version), work, what="end of a weight update")

    # -- sleep -----------------------------------------------------------------------------------------------------

    async def sleep(
        self, *, level: int = SLEEP_LEVEL, mode: PauseMode = "abort", operation: Operation | None = None
    ) -> SleepReport:
        """End what runs, or let it finish (`wait`), and give the device's memory back. Requests are refused until awake.

        Raises:
            InvalidRequest: no sleep here, a level whose weights would be gone, or a mode that keeps what has no memory.
            Conflict: an update is open.
        """
        self._must_sleep()
        if level != SLEEP_LEVEL:
            raise InvalidRequest(
                f"sleep level must be {SLEEP_LEVEL}, got {level}: 0 is a pause, and after 2 the weights are gone",
                param="level",
            )
        if mode == "keep":
            raise InvalidRequest(
                "sleep mode must be abort or wait: what is kept has no memory while asleep", param="mode"
            )

        async def work() -> SleepReport:
            report = await self.policy.fall_asleep(mode, partial(self.sleeping.sleep, level=level))
            if report is None:
                return SleepReport(is_sleeping=True, was_sleeping=True)
            return SleepReport(is_sleeping=True, was_sleeping=False, aborted=report.aborted, drained=report.drained)

        return await self._run(operation, ("sleep", level, mode), work, what="falling asleep")

    async def wake_up(self, tags: list[str] | None = None, *, operation: Operation | None = None) -> SleepReport:
        """Take memory back: all of it, or what the tags name; it serves once all is back.

        Raises:
            InvalidRequest: no sleep here, or an unknown tag.
        """
        self._must_sleep()
        for tag in tags or ():
            if tag not in SLEEP_TAGS:
                raise InvalidRequest(f"tag {tag[:32]!r} is not one of {', '.join(SLEEP_TAGS)}", param="tags")

        async def back() -> bool:
            await self.sleeping.wake_up(tags)
            return not self.sleeping.asleep

        async def work() -> SleepReport:
            slept = await self.policy.wake(back)
            return SleepReport(is_sleeping=self.sleeping.asleep, was_sleeping=slept)

        return await self._run(operation, ("wake up", tags), work, what="waking up")

    def is_sleeping(self) -> bool:
        """Whether not all of the memory is back."""
        return self.sleeping.asleep

    async def close(self) -> None:
        """Stop watching an open update; the engine closes next."""
        self._stop_watching()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _backend(self) -> str:
        backend = self.transfer.backend
        if backend is None:
            raise InvalidRequest(
                f"the {self.info.engine} engine has no weight transfer of its own here (vLLM has one where it was started with "
                "--weight-transfer-config); weights come from a directory or by init_weights_update_group"
            )
        replicas = self.info.capabilities.data_parallel_size
        if replicas > 1:
            raise InvalidRequest(
                f"weight transfer is refused for data parallelism {replicas}: run one worker per replica instead"
            )
        return backend

    def _must_sleep(self) -> None:
        if not self.sleeping.offered:
            raise InvalidRequest(
                f"the {self.info.engine} engine cannot sleep here: nothing would be freed (vLLM can on a device, where it was "
                "started with --enable-sleep-mode)"
            )

    def _report(self) -> TransferReport:
        return TransferReport(
            backend=self._backend(),
            open=self.policy.update_open,
            parts=self.parts,
            policy_version=self.policy.version,
        )

    def _made_up(self) -> str:
        while True:
            name = f"update-{next(self._numbers)}"
            if self.policy.sequence.number(name) is None:
                return name

    async def _step(self, step: Callable[[], Awaitable[T]]) -> T:
        """One step at a time, none past the deadline of its update."""
        async with self._turn:
            try:
                async with asyncio.timeout_at(self._ends if self.policy.update_open else None):
                    return await step()
            except TimeoutError:
                raise DeadlineExceeded("the weight update did not end within the deadline of its start") from None
            finally:
                if not self.policy.update_open:
                    self._stop_watching()

    async def _watch(self, deadline_s: float) -> None:
        """Give an update up whose trainer does not come back; a step that runs then ends by itself."""
        await asyncio.sleep(deadline_s)
        async with self._turn:
            why = f"its trainer did not finish it within {deadline_s:g} s"
            try:
                await self.policy.receive(partial(self.transfer.give_up, why))
            except RollplaneError:
                return  # what is in place is the table's to say

    def _stop_watching(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()

    async def _run(
        self, operation: Operation | None, arguments: Any, work: Callable[[], Awaitable[T]], *, what: str
    ) -> T:
        return await self.policy.operations.run(operation, arguments, work, what=what)
