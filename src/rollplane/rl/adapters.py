"""LoRA adapters of one worker: names, generations and leases, as one state table.

Every loading of files under a name is a new generation, loaded beside the old one under its own engine-side name
(`name@generation`), because an engine's caches know an adapter by name and path. The name flips at once; a request
keeps the generation it leased for its whole life; an old generation is unloaded at its last lease.

Rules for editors of the table: only `ready` takes new leases; `gone` is entered only with no lease left, and only after
the engine dropped it. A generation that the engine does not drop stays `draining`, says why in `trouble`, and is tried
again until it is gone; asking for the unload again tries at once.

    loading -> ready -> draining -> gone
          |      ^---------' (a swap without a free slot that gave up)
          `-> draining (refused, or called off: whatever the engine has of it goes)
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from rollplane.engines.adapter_files import AdapterFiles, inspect_adapter
from rollplane.engines.base import AdapterHost
from rollplane.errors import Conflict, EngineFailed, InvalidRequest, NotFound, RollplaneError
from rollplane.protocol.admin import AdapterRecord
from rollplane.protocol.info import LoraCapability
from rollplane.protocol.request import MAX_NAME_CHARS
from rollplane.rl.base import Operation
from rollplane.rl.operations import Operations

AdapterState = Literal["loading", "ready", "draining", "gone"]

TRANSITIONS: Final[dict[AdapterState, frozenset[AdapterState]]] = {
    "loading": frozenset({"ready", "draining"}),
    "ready": frozenset({"draining"}),
    "draining": frozenset({"gone", "ready"}),
    "gone": frozenset(),
}

FIRST_RETRY_S: Final = 0.02
LONGEST_RETRY_S: Final = 10.0
SILENT_TRIES: Final = 4
"""A request that has just ended may still be inside its engine: so many refusals for that reason are nobody's news."""


class _Generation:
    """One loading. `dropped` ends with the next try to unload it: done, or the engine's error."""

    def __init__(self, record: AdapterRecord, *, clock: Callable[[], float]) -> None:
        self.record = record
        self.drained = asyncio.Event()
        self.again = asyncio.Event()
        self.dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.retirement: asyncio.Task[None] | None = None
        self.since = clock()
        self._clock = clock

    def enter(self, state: AdapterState) -> None:
        if state not in TRANSITIONS[self.record.state]:
            raise RollplaneError(f"adapter {self.record.engine_name}: no way from {self.record.state} to {state}")
        self.record.state = state
        self.since = self._clock()
        if state == "draining" and self.record.leases == 0:
            self.drained.set()
        elif state == "ready":
            self.drained.clear()

    def tell(self, error: RollplaneError | None) -> None:
        """Let those who wait know how a try to unload went."""
        told, self.dropped = self.dropped, asyncio.get_running_loop().create_future()
        if error is None:
            told.set_result(None)
            self.dropped.set_result(None)
        else:
            told.set_exception(error)
            told.exception()  # nobody may be waiting


class AdapterTable:
    """Names, generations and leases over an `AdapterHost`.

    Args:
        host: the engine.
        capability: how many may be loaded at once, and the largest rank.
        on_change: called after every change that discovery should know.
    """

    def __init__(
        self,
        host: AdapterHost,
        *,
        capability: LoraCapability,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.capability = capability
        self.operations = Operations()
        self._on_change = on_change
        self._generations: dict[str, _Generation] = {}
        self._current: dict[str, _Generation] = {}
        self._counter: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._swaps: dict[str, asyncio.Event] = {}
        """Names that are between two generations for want of a slot: new requests for them wait."""
        self._retirements: set[asyncio.Task[None]] = set()
        self._clock = clock

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

    def serves(self, name: str) -> bool:
        """Whether a request for `name` gets a generation, now or when the swap that is under way is over."""
        return name in self._current or name in self._swaps

    def records(self) -> list[AdapterRecord]:
        """Every generation that is loading, ready or draining."""
        return [generation.record for generation in self._generations.values()]

    def ages_s(self) -> dict[str, float]:
        """Seconds since each generation entered its state, by engine-side name."""
        now = self._clock()
        return {name: now - generation.since for name, generation in self._generations.items()}

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[AdapterRecord]:
        """Hold the current generation of `name` for the life of a request.

        Raises:
            NotFound: no such adapter.
        """
        while name not in self._current and (swap := self._swaps.get(name)) is not None:
            await swap.wait()
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

        The same contents again are no work, unless the engine has lost them. When the engine has no free slot, the old
        generation drains first, within the operation's deadline, while new requests for the name wait; a load that then
        fails brings the old one back.

        Raises:
            NotFound: no such files. InvalidRequest: no name that a request could ask for, or files that do not fit.
            Conflict: no slot to load into.
        """
        if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(
                f"lora_name must be 1 to {MAX_NAME_CHARS} printable characters, has {len(name)}", param="lora_name"
            )

        async def work() -> AdapterRecord:
            async with self._locks.setdefault(name, asyncio.Lock()):
                return await self._load(name, path)

        return await self.operations.run(operation, ("load", name, path), work, what=f"loading of adapter {name!r}")

    async def unload(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """Refuse new requests for the name at once; return when its last request ended and it is dropped.

        A deadline that passes, or an engine that fails, ends the waiting only: the generation goes on draining and is
        tried again, and asking again waits for it.

        Raises:
            NotFound: no such adapter.
            EngineFailed: the engine did not drop it (yet).
        """

        async def work() -> AdapterRecord:
            async with self._locks.setdefault(name, asyncio.Lock()):
                generation = self._current.pop(name, None)
                if generation is not None:
                    self._start_retiring(generation)
                else:
                    generation = self._left_over(name)
                    if generation is None:
                        raise NotFound(f"adapter {name!r} is not loaded", param="lora_name")
            generation.again.set()
            await asyncio.shield(generation.dropped)
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
        if old is not None and old.record.digest == files.digest and await self._still_there(old):
            return old.record
        with contextlib.ExitStack() as stack:
            made_room = False
            if len(self._generations) >= self.capability.max:
                if old is None:
                    for generation in self._generations.values():
                        generation.again.set()  # one that the engine did not drop may be what is in the way
                    raise Conflict(
                        f"{len(self._generations)} adapters are loaded, the limit is {self.capability.max}; "
                        "unload one first",
                        details={"loaded": [g.record.engine_name for g in self._generations.values()]},
                    )
                stack.enter_context(self._swapping(name))
                await self._make_room(old)
                made_room = True
            try:
                generation = await self._put(name, path, files)
            except RollplaneError:
                if made_room and old is not None:
                    await self._bring_back(old)
                raise
            if old is not None and old.record.state == "ready":
                self._start_retiring(old)
        self._on_change()
        return generation.record

    async def _put(self, name: str, path: str, files: AdapterFiles) -> _Generation:
        """Load files as the next generation and make it current."""
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
            ),
            clock=self._clock,
        )
        self._generations[generation.record.engine_name] = generation
        self._on_change()
        try:
            await self.host.load_adapter(generation.record.engine_name, path)
        except BaseException as error:
            self._start_retiring(generation)
            if isinstance(error, Exception):
                with contextlib.suppress(RollplaneError):
                    await asyncio.shield(generation.dropped)
            raise
        generation.enter("ready")
        self._current[name] = generation
        return generation

    async def _still_there(self, generation: _Generation) -> bool:
        """Whether the engine has it, as far as it says: a repeated load mends what was lost."""
        return generation.record.engine_name in await self.host.loaded_adapters()

    @contextlib.contextmanager
    def _swapping(self, name: str) -> Iterator[None]:
        swap = self._swaps[name] = asyncio.Event()
        try:
            yield
        finally:
            del self._swaps[name]
            swap.set()

    async def _make_room(self, old: _Generation) -> None:
        """No slot for both: stop leasing the old generation, let it drain and drop it before the new one loads."""
        self._current.pop(old.record.name, None)
        self._start_retiring(old)
        try:
            await asyncio.shield(old.dropped)
        except BaseException:
            if old.record.state == "draining" and (not old.drained.is_set() or await self._still_there(old)):
                if old.retirement is not None:
                    old.retirement.cancel()
                old.record.trouble = None
                old.enter("ready")
                self._current[old.record.name] = old
                self._on_change()
            raise

    async def _bring_back(self, old: _Generation) -> None:
        """The generation that made room, loaded again from its files where they are still the same."""
        with contextlib.suppress(RollplaneError):
            path = old.record.path
            files = await asyncio.to_thread(inspect_adapter, path, max_rank=self.capability.rank)
            if files.digest == old.record.digest:
                await self._put(old.record.name, path, files)

    def _left_over(self, name: str) -> _Generation | None:
        """The newest generation of a name that is not served any more and not gone yet."""
        found = [g for g in self._generations.values() if g.record.name == name and g.record.state == "draining"]
        return found[-1] if found else None

    def _start_retiring(self, generation: _Generation) -> None:
        generation.enter("draining")
        self._on_change()
        task = asyncio.create_task(self._retire(generation), name=f"retire {generation.record.engine_name}")
        generation.retirement = task
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _retire(self, generation: _Generation) -> None:
        """Unload at the last lease, and again until the engine has dropped it."""
        await generation.drained.wait()
        record = generation.record
        tries = 0
        while True:
            generation.again.clear()
            try:
                await self.host.unload_adapter(record.engine_name)
                break
            except Exception as error:
                tries += 1
                if not isinstance(error, Conflict) or tries >= SILENT_TRIES:
                    record.trouble = str(error)
                    self._on_change()
                    generation.tell(
                        EngineFailed(
                            f"the engine did not drop adapter {record.engine_name!r} and is asked again: {error}",
                            details={"tries": tries},
                        )
                    )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(FIRST_RETRY_S * 2**tries, LONGEST_RETRY_S)):
                    await generation.again.wait()
        record.trouble = None
        generation.enter("gone")
        self._generations.pop(record.engine_name, None)
        generation.tell(None)
        self._on_change()
