"""The mock's own weight transfer and sleep: parts are JSON objects whose contents are the weights."""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from rollplane.engines.mock.core import Core
from rollplane.engines.mock.settings import Operation
from rollplane.errors import Conflict, EngineFailed, InvalidRequest
from rollplane.protocol.versions import check_version_name

TAGS = frozenset({"weights", "kv_cache"})


class MockTransfer:
    """A `NativeTransfer`. Nothing of an update is in place before its end, so one that fails leaves the old weights.

    Args:
        call: counts a call, and lets its scripted fault befall it.
    """

    def __init__(self, core: Core, *, backend: str | None, call: Callable[[Operation], None]) -> None:
        self.backend = backend
        self._core = core
        self._call = call
        self._received: Any = None

    def __repr__(self) -> str:
        return f"<MockTransfer {self.backend or 'without a backend'}, {'open' if self._received else 'closed'}>"

    async def init(self, info: dict[str, Any]) -> None:
        """See `NativeTransfer.init`."""
        self._call("transfer_init")
        self._must_have_backend()

    async def start(self) -> None:
        """See `NativeTransfer.start`."""
        self._call("transfer_start")
        self._must_have_backend()
        if not self._core.frozen:
            raise Conflict("a weight update starts only while the engine is paused")
        self._received = hashlib.sha256()

    async def update(self, info: dict[str, Any]) -> None:
        """See `NativeTransfer.update`; a part names its tensors in `names`."""
        received = self._must_be_open()
        try:
            self._call("transfer_update")
            if not info.get("names"):
                raise EngineFailed("update_weights failed: no tensor was named")
        except BaseException:
            self._received = None
            raise
        received.update(msgspec.json.encode(info, order="sorted"))

    async def finish(self, version: str) -> None:
        """See `NativeTransfer.finish`."""
        received = self._must_be_open()
        check_version_name(version, param="weight_version")
        self._received = None
        self._call("transfer_finish")
        self._core.replace_weights(received.hexdigest(), version)
        self._core.drop_cache(held_too=True)

    async def give_up(self, why: str) -> None:
        """See `NativeTransfer.give_up`."""
        self._must_be_open()
        self._received = None
        raise EngineFailed(f"the weight update was given up, the old weights serve: {why}")

    def _must_have_backend(self) -> None:
        if self.backend is None:
            raise InvalidRequest("this mock engine was made without a transfer backend")

    def _must_be_open(self) -> Any:
        self._must_have_backend()
        if self._received is None:
            raise Conflict("no weight update is open; start one first")
        return self._received


class MockSleep:
    """A `SleepControl`; there is no memory to free, but nothing is made or cached until all of it is back."""

    def __init__(self, core: Core, *, offered: bool, call: Callable[[Operation], None]) -> None:
        self.offered = offered
        self._core = core
        self._call = call
        self._away: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<MockSleep {'asleep' if self.asleep else 'awake'}>"

    @property
    def asleep(self) -> bool:
        """Whether not all of the memory is back."""
        return bool(self._away)

    async def sleep(self, *, level: int = 1) -> None:
        """See `SleepControl.sleep`."""
        if not self.offered:
            raise InvalidRequest("this mock engine was made without sleep mode")
        if self._away:
            return
        if not self._core.frozen:
            raise Conflict("an engine sleeps only while paused")
        self._away = TAGS
        self._call("sleep")
        self._core.drop_cache(held_too=True)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See `SleepControl.wake_up`."""
        self._call("wake_up")
        self._away -= frozenset(tags) if tags else TAGS
