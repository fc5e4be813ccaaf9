"""LoRA adapters of one worker: names, generations and leases, as one state table.

Every loading of files under a name is a new generation, loaded beside the old one under its own engine-side name
(`name@generation`), because an engine's caches know an adapter by name and path. The name flips at once; a request
keeps the generation it leased for its whole life; an old generation is unloaded at its last lease.

Rules for editors of the table: only `ready` takes new leases; `gone` is entered only with no lease left.

    loading -> ready -> draining -> gone
          `-> gone (refused)
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Literal

from rollplane.engines.adapter_files import inspect_adapter
from rollplane.engines.base import AdapterHost
from rollplane.errors import Conflict, NotFound, RollplaneError
from rollplane.protocol.admin import AdapterRecord
from rollplane.protocol.info import LoraCapability
from rollplane.rl.base import Operation
from rollplane.rl.operations import Operations

AdapterState = Literal["loading", "ready", "draining", "gone"]

TRANSITIONS: Final[dict[AdapterState, frozenset[AdapterState]]] = {
    "loading": frozenset({"ready", "gone"}),
    "ready": frozenset({"draining"}),
    "draining": frozenset({"gone"}),
    "gone": frozenset(),
}


class _Generation:
    __slots__ = ("drained", "record")

    def __init__(self, record: AdapterRecord) -> None:
        self.record = record
        self.drained = asyncio.Event()

    def enter(self, state: AdapterState) -> None:
        if state not in TRANSITIONS[self.record.state]:
            raise RollplaneError(f"adapter {self.record.engine_name}: no way from {self.record.state} to {state}")
        self.record.state = state
        if state == "draining" and self.record.leases == 0:
            self.drained.set()


class AdapterTable:
    """Names, generations and leases over an `AdapterHost`.

    Args:
        host: the engine.
        capability: how many may be loaded at once, and the largest rank.
        on_change: called after every change that discovery should know.
    """

    def __init__(
        self, host: AdapterHost, *, capability: LoraCapability, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.host = host
        self.capability = capability
        self.operations = Operations()
        self._on_change = on_change
        self._generations: dict[str, _Generation] = {}
        self._current: dict[str, _Generation] = {}
        self._counter: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._retirements: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        parts = [
            f"{g.record.engine_name} {g.record.state}" + (f" ({g.record.leases} leases)" if g.record.leases else "")
            for g in self._generations.values()
        ]
        return f"<AdapterTable {len(parts)}/{self.capability.max}: {', '.join(parts) or 'empty'}>"

    def current(self, name: str) -> AdapterRecord | None:
        """The generation that new requests for `name` get."""
        found = self._current.get(name)
        return None if found is None else found.record

    def records(self) -> list[AdapterRecord]:
        """Every generation that is loading, ready or draining."""
        return [generation.record for generation in self._generations.values()]

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[AdapterRecord]:
        """Hold the current generation of `name` for the life of a request.

        Raises:
            NotFound: no such adapter.
        """
        generation = self._current.get(name)
        if generation is None:
            raise NotFound(
                f"model {name!r} does not exist: it is neither the base model nor a loaded adapter", param="model"
            )
        generation.record.leases += 1
        try:
            yield generation.record
        finally:
            generation.record.leases -= 1
            if generation.record.leases == 0 and generation.record.state == "draining":
                generation.drained.set()

    async def load(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        """Load files as the next generation and flip the name to it.

        The same contents again are no work. When the engine has no free slot, the old generation drains first.

        Raises:
            NotFound: no such files. InvalidRequest: files that do not fit. Conflict: no slot to load into.
        """

        async def work() -> AdapterRecord:
            async with self._locks.setdefault(name, asyncio.Lock()):
                return await self._load(name, path)

        return await self.operations.run(operation, ("load", name, path), work, what=f"loading of adapter {name!r}")

    async def unload(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """Refuse new requests for the name at once; return when its last request ended and it is dropped.

        Raises:
            NotFound: no such adapter.
        """

        async def work() -> AdapterRecord:
            async with self._locks.setdefault(name, asyncio.Lock()):
                generation = self._current.pop(name, None)
                if generation is None:
                    raise NotFound(f"adapter {name!r} is not loaded", param="lora_name")
                generation.enter("draining")
                self._on_change()
                await self._retire(generation)
                return generation.record

        return await self.operations.run(operation, ("unload", name), work, what=f"unloading of adapter {name!r}")

    async def close(self) -> None:
        """Cancel what runs; the engine drops the adapters with itself."""
        await self.operations.close()
        for task in list(self._retirements):
            task.cancel()
        if self._retirements:
            await asyncio.wait(self._retirements)

    async def _load(self, name: str, path: str) -> AdapterRecord:
        files = await asyncio.to_thread(inspect_adapter, path, max_rank=self.capability.rank)
        old = self._current.get(name)
        if old is not None and old.record.digest == files.digest:
            return old.record
        if len(self._generations) >= self.capability.max:
            if old is None:
                raise Conflict(
                    f"{len(self._generations)} adapters are loaded, the limit is {self.capability.max}; unload one first",
                    details={"loaded": [g.record.engine_name for g in self._generations.values()]},
                )
            await self._wait_for_slot(old)
        number = self._counter[name] = self._counter.get(name, 0) + 1
        generation = _Generation(
            AdapterRecord(
                name=name,
                generation=number,
                engine_name=f"{name}@{number}",
                path=path,
                digest=files.digest,
                rank=files.rank,
                state="loading",
            )
        )
        self._generations[generation.record.engine_name] = generation
        try:
            await self.host.load_adapter(generation.record.engine_name, path)
        except BaseException:
            generation.enter("gone")
            del self._generations[generation.record.engine_name]
            raise
        generation.enter("ready")
        self._current[name] = generation
        if old is not None and old.record.state == "ready":
            old.enter("draining")
            task = asyncio.create_task(self._retire(old), name=f"retire {old.record.engine_name}")
            self._retirements.add(task)
            task.add_done_callback(self._retirements.discard)
        self._on_change()
        return generation.record

    async def _wait_for_slot(self, old: _Generation) -> None:
        """No slot for both: stop leasing the old generation, let it drain and drop it before the new one loads."""
        self._current.pop(old.record.name, None)
        old.enter("draining")
        self._on_change()
        await self._retire(old)

    async def _retire(self, generation: _Generation) -> None:
        await generation.drained.wait()
        await self.host.unload_adapter(generation.record.engine_name)
        generation.enter("gone")
        self._generations.pop(generation.record.engine_name, None)
        self._on_change()
