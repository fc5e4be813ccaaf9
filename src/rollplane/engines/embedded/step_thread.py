"""The one thread that owns a core: it steps while there is work, runs commands between steps, and reports to asyncio."""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from rollplane.engines.embedded.core import Core
from rollplane.engines.embedded.results import Emission
from rollplane.errors import EngineDied, EngineFailed, RollplaneError

T = TypeVar("T")

SLICES_S: Final = 0.001
"""What sliced work may take between two steps."""

PUT_OFF_STEPS: Final = 8
"""Steps that had prompts to compute, and so took longer, which sliced work may let pass in a row."""


@dataclass
class _Command:
    """Something to run between steps; `future` gets its result, `failed` its error where nobody waits."""

    run: Callable[[Core], Any]
    future: "asyncio.Future[Any] | None" = None
    failed: Callable[[RollplaneError], None] | None = None


@dataclass
class _Sliced:
    """Work that is done bit by bit between steps; whoever gave up waiting for `future` called it off."""

    begin: Callable[[Core], Generator[None, None, Any]]
    future: "asyncio.Future[Any]"
    slices: Generator[None, None, Any] | None = None


class StepThread:
    """Runs a core in a thread of its own.

    All callbacks run on the event loop that called `start`, in the order in which things happened in the thread.

    Args:
        build: makes the core, in the thread.
        deliver: gets the emissions of each step that had any.
        died: told once when the core failed.
    """

    def __init__(
        self,
        build: Callable[[], Core],
        *,
        deliver: Callable[[list[Emission]], None],
        died: Callable[[EngineDied], None],
    ) -> None:
        self._build = build
        self._deliver = deliver
        self._on_death = died
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._sliced: deque[_Sliced] = deque()
        self._put_off = 0
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[Core] | None = None
        self._thread: threading.Thread | None = None
        self.death: EngineDied | None = None
        self.progress_at_s = time.monotonic()

    async def start(self) -> Core:
        """Build the core; the engine's facts may be read from it, everything else goes through commands.

        Raises:
            RollplaneError: what building raised; anything else becomes `EngineDied`.
        """
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, name="rollplane-embedded", daemon=True)
        self._thread.start()
        return await asyncio.shield(self._ready)

    async def call(self, run: Callable[[Core], T]) -> T:
        """Run something between two steps and return its result.

        Raises:
            EngineDied: the core failed, or the thread has stopped.
        """
        if self.death is not None or self._loop is None:
            raise self.death or EngineDied("the embedded engine was not started")
        future: asyncio.Future[T] = self._loop.create_future()
        self._commands.put(_Command(run, future))
        if self.death is not None:  # it ended while we queued: nobody may read the queue any more
            raise self.death
        return await future

    async def call_sliced(self, begin: Callable[[Core], Generator[None, None, T]]) -> T:
        """Run a generator for a millisecond at most between two steps, at once while there is nothing to step; its result.

        Cancelled, it is not run on. Sliced calls run one after the other, in the order of calling.

        Raises:
            EngineFailed: the generator raised something that is no `RollplaneError`; the core goes on.
            EngineDied: the core failed, or the thread has stopped.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        try:
            await self.call(lambda _: self._sliced.append(_Sliced(begin, future)))
            return await future
        finally:
            future.cancel()  # also where nobody came to wait for it

    def post(self, run: Callable[[Core], Any], *, failed: Callable[[RollplaneError], None] | None = None) -> None:
        """Run something between two steps; nobody waits. `failed` gets a refusal, or the core's death."""
        self._commands.put(_Command(run, None, failed))
        if self.death is not None and failed is not None:
            failed(self.death)

    async def wait_idle(self) -> None:
        """Return once a step would do nothing.

        Raises:
            EngineDied: the core failed meanwhile.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        await self.call(lambda _: self._idle_waiters.append(future))
        await future

    async def stop(self) -> None:
        """End the thread after the step that runs. Idempotent."""
        self._commands.put(None)
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join)

    # In the thread ---------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            core = self._build()
        except RollplaneError as error:
            self._refuse_start(error)
            return
        except BaseException as error:
            self._refuse_start(EngineDied(f"the embedded engine could not be built: {type(error).__name__}: {error}"))
            return
        self._tell(lambda: _resolve(self._ready, core))
        try:
            while self._run_commands(core):
                self._step(core)
                self._run_sliced(core)
            self._end(EngineDied("the embedded engine was closed"))
        except BaseException as error:
            self._end(EngineDied(f"the embedded engine failed in a step: {type(error).__name__}: {error}"), report=True)

    def _run_commands(self, core: Core) -> bool:
        """Run what was asked; with nothing to step, wait for more. False: stop."""
        while True:
            self._tell_if_idle(core)
            try:
                command = self._commands.get(block=core.idle and not self._sliced)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._run(command, core)

    def _run(self, command: _Command, core: Core) -> None:
        self.progress_at_s = time.monotonic()
        try:
            result = command.run(core)
        except RollplaneError as error:
            self._refuse(command, error)
            return
        except BaseException as error:
            self._refuse(command, EngineDied(f"the embedded engine failed: {type(error).__name__}: {error}"))
            raise
        future = command.future
        self._tell(lambda: _resolve(future, result))

    def _run_sliced(self, core: Core) -> None:
        """Work off what is to be done bit by bit, at least one slice: until a command comes while idle, else for `SLICES_S`.

        A step that had a prompt to compute was long enough already.
        """
        if not self._sliced:
            return
        if core.prefilled and self._put_off < PUT_OFF_STEPS:
            self._put_off += 1
            return
        self._put_off = 0
        ends_at = time.perf_counter() + SLICES_S
        more = True
        while self._sliced and more:
            self._run_slice(self._sliced[0], core)
            more = self._commands.empty() if core.idle else time.perf_counter() < ends_at

    def _run_slice(self, work: _Sliced, core: Core) -> None:
        if work.future.done():  # called off
            self._sliced.popleft()
            return
        self.progress_at_s = time.monotonic()
        try:
            if work.slices is None:
                work.slices = work.begin(core)
            next(work.slices)
        except StopIteration as ended:
            self._sliced.popleft()
            self._tell(partial(_resolve, work.future, ended.value))
        except Exception as error:
            self._sliced.popleft()
            known = isinstance(error, RollplaneError)
            refusal = error if known else EngineFailed(f"{type(error).__name__}: {error}")
            self._tell(partial(_fail, work.future, refusal))

    def _refuse(self, command: _Command, error: RollplaneError) -> None:
        future, failed = command.future, command.failed
        self._tell(lambda: _fail(future, error))
        if failed is not None:
            self._tell(lambda: failed(error))

    def _step(self, core: Core) -> None:
        emissions = core.step()
        self.progress_at_s = time.monotonic()
        self.emit(emissions)

    def emit(self, emissions: list[Emission]) -> None:
        """Report emissions; also for commands that end sequences (in the thread only)."""
        if emissions:
            self._tell(lambda: self._deliver(emissions))

    def _tell_if_idle(self, core: Core) -> None:
        if self._idle_waiters and core.idle:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                self._tell(partial(_resolve, waiter, None))

    def _end(self, death: EngineDied, *, report: bool = False) -> None:
        self.death = death
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            self._tell(partial(_fail, waiter, death))
        while self._sliced:
            self._tell(partial(_fail, self._sliced.popleft().future, death))
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                self._refuse(command, death)
        if report:
            self._tell(lambda: self._on_death(death))

    def _refuse_start(self, error: RollplaneError) -> None:
        self.death = error if isinstance(error, EngineDied) else EngineDied(error.message)
        self._tell(lambda: _fail(self._ready, error))

    def _tell(self, callback: Callable[[], Any]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(callback)


def _resolve(future: "asyncio.Future[Any] | None", result: Any) -> None:
    if future is not None and not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any] | None", error: BaseException) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
