"""Operations that may be asked for again: each (id, step) runs once, in a task of its own, and keeps its answer.

A caller that hangs up does not cancel what it asked for; asking again waits for the same run or gets its answer.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollplane.errors import Conflict, DeadlineExceeded
from rollplane.rl.base import Operation

T = TypeVar("T")
MAX_REMEMBERED = 256


class Operations:
    """The operations of one control owner: running ones, and the last `MAX_REMEMBERED` answers."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], tuple[Any, asyncio.Task[Any]]] = OrderedDict()
        self._anonymous: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        running = sum(not task.done() for _, task in self._known.values()) + len(self._anonymous)
        return f"<Operations {running} running, {len(self._known)} remembered>"

    async def run(
        self, operation: Operation | None, arguments: Any, work: Callable[[], Awaitable[T]], *, what: str
    ) -> T:
        """Run `work`, or give what the same operation gave before.

        Args:
            operation: its name and deadline; None = anonymous, always runs.
            arguments: compared with the first asking's.
            work: makes the awaitable that does it.
            what: for messages: `weight update`.

        Raises:
            Conflict: the name was used with other arguments.
            DeadlineExceeded: the operation's deadline passed; the work was cancelled.
        """
        operation = operation or Operation()
        if operation.id is None:
            task = asyncio.create_task(self._bounded(operation, work, what=what), name=what)
            self._anonymous.add(task)
            task.add_done_callback(self._anonymous.discard)
            return await asyncio.shield(task)
        key = (operation.id, operation.step)
        known = self._known.get(key)
        if known is not None:
            said, task = known
            if said != arguments:
                raise Conflict(
                    f"operation {operation.id!r} step {operation.step} was asked for with other arguments",
                    param="operation_id",
                )
            return await asyncio.shield(task)
        task = asyncio.create_task(self._bounded(operation, work, what=what), name=f"{what} {operation.id}")
        self._known[key] = (arguments, task)
        task.add_done_callback(lambda done: self._settle(key, done))
        return await asyncio.shield(task)

    def status(self, operation_id: str) -> dict[int, str]:
        """What is known of an operation: running, done or the error's sentence, by step."""
        return {
            step: "running" if not task.done() else self._outcome(task)
            for (name, step), (_, task) in self._known.items()
            if name == operation_id
        }

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        running = [task for _, task in self._known.values() if not task.done()] + list(self._anonymous)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _bounded(self, operation: Operation, work: Callable[[], Awaitable[T]], *, what: str) -> T:
        try:
            async with asyncio.timeout(operation.deadline_s) as deadline:
                return await work()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"the {what} did not finish within {operation.deadline_s:g} s") from None

    def _settle(self, key: tuple[str, int], task: asyncio.Task[Any]) -> None:
        """A failure may be asked for again; a success is remembered, the oldest answers are let go."""
        failed = task.cancelled() or task.exception() is not None
        if failed:
            self._known.pop(key, None)
        done = [k for k, (_, t) in self._known.items() if t.done()]
        for old in done[: max(len(done) - MAX_REMEMBERED, 0)]:
            del self._known[old]

    @staticmethod
    def _outcome(task: asyncio.Task[Any]) -> str:
        if task.cancelled():
            return "cancelled"
        error = task.exception()
        return "done" if error is None else str(error)
