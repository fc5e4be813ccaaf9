"""vLLM's own weight transfer and its sleep, passed on where this vLLM was started with them.

Neither works on a CPU: its build has no transfer backend that runs there, and its sleep frees nothing but says that it did. Both
are refused by name then, whatever vLLM itself would answer.

    closed -> open -> closed      an update: begun while paused, and nothing steps before it has ended
    awake -> asleep -> awake      until all memory is back
"""

import asyncio
from typing import Any, Final

from rollplane.engines.vllm import versions
from rollplane.engines.vllm.policy import Policy
from rollplane.errors import Conflict, EngineDied, EngineFailed, InvalidRequest
from rollplane.protocol.versions import check_version_name

GO_BACK_S: Final = 120.0
"""Limit of loading the old weights again."""
SLEEP_LEVEL: Final = 1
"""Weights go to the processor's memory. Deeper, they would be gone: a worker that wakes without weights serves garbage."""
SLEEP_TAGS: Final = ("weights", "kv_cache")


class NativeTransfer:
    """The steps of an update by vLLM's own backend.

    Args:
        backend: the one this vLLM was started with (`--weight-transfer-config`); None: none.
    """

    def __init__(self, engine: Any, policy: Policy, *, backend: str | None) -> None:
        self.engine = engine
        self.policy = policy
        self.backend = backend
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        state = "open" if self.policy.transfer_open else "closed"
        return f"<NativeTransfer {self.backend or 'without a backend'}, {state}>"

    async def init(self, info: dict[str, Any]) -> None:
        """Join the trainer's group; `info` is the backend's own object.

        Raises:
            InvalidRequest: no backend. EngineFailed: the backend's refusal.
        """
        self._must_have_backend()
        async with self._lock:
            await self.policy.ask(self.engine.init_weight_transfer_engine(versions.transfer_init(info)))

    async def start(self) -> None:
        """Open an update; only while paused.

        Raises:
            Conflict: not paused, or one is open.
        """
        self._must_have_backend()
        async with self._lock:
            if not self.policy.paused:
                raise Conflict("a weight update starts only while the engine is paused")
            if self.policy.transfer_open:
                raise Conflict("a weight update is open already; finish it first")
            await self.policy.check_adapters()
            self.policy.transfer_open = True
            try:
                await self.policy.ask(self.engine.start_weight_update())
            except BaseException as error:
                await self._back(error)
                raise

    async def update(self, info: dict[str, Any]) -> None:
        """Receive a part of the weights.

        Raises:
            Conflict: no update is open. EngineFailed: the old weights were loaded again. EngineDied: they could not be.
        """
        self._must_be_open()
        async with self._lock:
            try:
                await self.policy.ask(self.engine.update_weights(versions.transfer_part(info)))
            except BaseException as error:
                await self._back(error)
                raise

    async def finish(self, version: str) -> None:
        """Close the update; the version changes last, old caches are dropped before it.

        Raises:
            Conflict: no update is open. EngineFailed: the old weights were loaded again. EngineDied: they could not be.
        """
        self._must_be_open()
        check_version_name(version, param="weight_version")
        async with self._lock:
            try:
                await self.policy.change(version, self._close)
            except BaseException as error:
                await self._back(error)
                raise

    async def give_up(self, why: str) -> None:
        """See `base.NativeTransfer.give_up`.

        Raises:
            Conflict: no update is open. EngineFailed: the old weights were loaded again. EngineDied: they could not be.
        """
        self._must_be_open()
        async with self._lock:
            await self._back(EngineFailed(why))
            raise EngineFailed(f"the weight update was given up: {why}")  # another call had closed it

    async def _close(self) -> None:
        await self.policy.ask(self.engine.finish_weight_update())
        self.policy.transfer_open = False
        self.policy.forget_good()

    async def _back(self, error: BaseException) -> None:
        """What a failed step leaves is no model: the next forward would end the engine."""
        if self.policy.transfer_open:
            self.policy.transfer_open = False
            said = str(error) or "it was called off"
            try:
                async with asyncio.timeout(GO_BACK_S):
                    await self.policy.go_back(f"the weight update failed: {said}")
            except TimeoutError:
                # A worker that still waits for its trainer loads nothing.
                self.policy.broken = said
                raise EngineDied(
                    f"the weight update failed: {said}; the old weights could not be loaded within {GO_BACK_S:g} s"
                ) from None

    def _must_have_backend(self) -> None:
        if self.backend is None:
            raise InvalidRequest(
                "this vLLM was started without --weight-transfer-config (no backend of its own works on a CPU); "
                "weights come from a directory or by init_weights_update_group",
                param="init_info",
            )

    def _must_be_open(self) -> None:
        self._must_have_backend()
        if not self.policy.transfer_open:
            raise Conflict("no weight update is open; start one first")


class Sleep:
    """Whether the engine's memory is its own.

    Args:
        offered: this vLLM was started with `--enable-sleep-mode`, which its CPU build cannot be.
    """

    def __init__(self, engine: Any, policy: Policy, *, offered: bool) -> None:
        self.engine = engine
        self.policy = policy
        self.offered = offered
        self.asleep = False
        self._was_paused = False
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Sleep {'asleep' if self.asleep else 'awake'}>"

    async def sleep(self, *, level: int = SLEEP_LEVEL) -> None:
        """End running requests with their tokens and free the memory; asleep already: nothing happens.

        Raises:
            InvalidRequest: not offered, or a level whose weights would be gone.
        """
        self._must_be_offered()
        if level != SLEEP_LEVEL:
            raise InvalidRequest(
                f"sleep level must be {SLEEP_LEVEL}, got {level}: 0 is a pause, and after 2 the weights are gone",
                param="level",
            )
        async with self._lock:
            if self.asleep:
                return
            self._was_paused = self.policy.paused
            await self.policy.pause("abort", clear_cache=True)
            self.asleep = True  # also when it fails half-way: what is there must be taken back before anything steps
            await self.policy.ask(self.engine.sleep(level=level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back: all of it, or what the tags name; awake only once all is back. Awake: nothing happens.

        Raises:
            InvalidRequest: not offered, or an unknown tag.
        """
        self._must_be_offered()
        unknown = sorted(set(tags or ()) - set(SLEEP_TAGS))
        if unknown:
            raise InvalidRequest(f"tag {unknown[0]!r} is not one of {', '.join(SLEEP_TAGS)}", param="tags")
        async with self._lock:
            if not self.asleep:
                return
            await self.policy.ask(self.engine.wake_up(tags))
            if await self.policy.ask(self.engine.is_sleeping()):
                return
            self.asleep = False
            if self._was_paused:
                await self.policy.pause("keep")  # vLLM steps again by itself when it wakes
            else:
                await self.policy.resume()

    def _must_be_offered(self) -> None:
        if not self.offered:
            raise InvalidRequest(
                "this vLLM was started without --enable-sleep-mode; on a CPU it has none: nothing would be freed",
                param="level",
            )
