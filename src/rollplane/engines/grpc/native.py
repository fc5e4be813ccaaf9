"""A vLLM server's own weight transfer and its sleep, over `vllm.Control`.

No rpc loads a checkpoint, so an update that fails half-way cannot be taken back here: nothing serves until another one
succeeds.
"""

import contextlib
from typing import Any, Protocol

from rollplane.engines.grpc.control import ControlCalls
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.errors import Conflict, EngineDied, InvalidRequest, RollplaneError
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.versions import check_version_name


class Server(Protocol):
    """What is used of `GrpcEngine`."""

    settings: GrpcSettings

    @property
    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        ...

    @property
    def control(self) -> ControlCalls:
        """The server's control service."""
        ...

    @property
    def paused(self) -> bool:
        """Whether the server was asked to stop stepping."""
        ...

    async def clear_cache(self) -> None:
        """While paused: what was cached goes."""
        ...

    def take_version(self, version: str) -> None:
        """Live requests meet another version."""
        ...

    def forget_cached(self) -> None:
        """The server caches nothing any more."""
        ...


class GrpcTransfer:
    """A `NativeTransfer`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._open = False

    def __repr__(self) -> str:
        return f"<GrpcTransfer {self.backend or 'without a backend'}, {'open' if self._open else 'closed'}>"

    @property
    def backend(self) -> str | None:
        """See `NativeTransfer.backend`: what the server reports."""
        return self._server.info.capabilities.native_transfer

    async def init(self, info: dict[str, Any]) -> None:
        """See `NativeTransfer.init`."""
        self._require()
        await self._server.control.init_weight_transfer(info, timeout_s=self._server.settings.call_timeout_s)

    async def start(self) -> None:
        """See `NativeTransfer.start`.

        Raises:
            Conflict: not paused: running requests would see half of it.
        """
        self._require()
        if not self._server.paused:
            raise Conflict("a weight update starts only while the engine is paused")
        try:
            await self._server.control.start_weight_update()
        except BaseException as error:
            await self._unknown(error)
        self._open = True

    async def update(self, info: dict[str, Any]) -> None:
        """See `NativeTransfer.update`."""
        self._must_be_open()
        try:
            await self._server.control.update_weights(info, timeout_s=self._server.settings.call_timeout_s)
        except BaseException as error:
            await self._unknown(error)

    async def finish(self, version: str) -> None:
        """See `NativeTransfer.finish`. All that was cached goes before the version changes here: the encoder's cache knows no
        salt.
        """
        self._must_be_open()
        check_version_name(version, param="weight_version")
        try:
            await self._server.control.finish_weight_update(version)
            await self._server.clear_cache()
        except BaseException as error:
            await self._unknown(error)
        self._open = False
        self._server.take_version(version)

    async def give_up(self, why: str) -> None:
        """See `NativeTransfer.give_up`."""
        self._must_be_open()
        await self._unknown(EngineDied(why))

    async def _unknown(self, error: BaseException) -> None:
        """Close what is open there, so that the next update can start; what the weights are, nobody knows."""
        self._open = False
        with contextlib.suppress(RollplaneError):
            await self._server.control.finish_weight_update(None)
        said = error.message if isinstance(error, RollplaneError) else "it was called off"
        raise EngineDied(f"the weight update failed and the weights in place are of unknown version: {said}") from error

    def _require(self) -> None:
        if self.backend is None:
            raise InvalidRequest("this vLLM server was started without a weight transfer backend")

    def _must_be_open(self) -> None:
        self._require()
        if not self._open:
            raise Conflict("no weight update is open; start one first")


class GrpcSleep:
    """A `SleepControl`. `asleep`: not all of the server's memory is back."""

    def __init__(self, server: Server) -> None:
        self.asleep = False
        self._server = server

    def __repr__(self) -> str:
        return f"<GrpcSleep {'asleep' if self.asleep else 'awake'}>"

    @property
    def offered(self) -> bool:
        """See `SleepControl.offered`: what the server reports."""
        return self._server.info.capabilities.sleep

    async def sleep(self, *, level: int = 1) -> None:
        """See `SleepControl.sleep`."""
        await self._server.control.sleep(level=level)
        self.asleep = True
        self._server.forget_cached()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See `SleepControl.wake_up`; vLLM steps again by itself when it wakes, so it is paused again at once."""
        await self._server.control.wake_up(tags)
        self.asleep = await self._server.control.is_sleeping()
        if not self.asleep and self._server.paused:
            await self._server.clear_cache()
