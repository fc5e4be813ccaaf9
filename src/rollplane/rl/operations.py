"""Operations that may be asked for again: each (id, step) runs once, in a task of its own, and keeps its answer.

A caller that hangs up does not cancel what it asked for; asking again waits for the same run or gets its answer. What
happens meanwhile, and how it ended, is in `logs`.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from rollplane.errors import Conflict, DeadlineExceeded, RollplaneError
from rollplane.rl.base import Operation
from rollplane.rl.operation_log import OperationLogs, Tell, tell_nobody

T = TypeVar("T")
MAX_REMEMBERED = 256


class Operations:
    """The operations of one control owner: running ones, and the last `MAX_REMEMBERED` answers."""

    def __init__(self) -> None:
        self.logs = OperationLogs()
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
        self.logs.open(operation.id).began(operation.step, what)
        task = asyncio.create_task(self._bounded(operation, work, what=what), name=f"{what} {operation.id}")
        self._known[key] = (arguments, task)
        task.add_done_callback(lambda done: self._settle(key, done, what=what))
        return await asyncio.shield(task)

    def teller(self, operation: Operation) -> Tell:
        """Notes what happens in an operation that runs; nothing of one without a name."""
        log = None if operation.id is None else self.logs.find(operation.id)
        return tell_nobody if log is None else log.teller(operation.step)

    def status(self, operation_id: str) -> dict[int, str]:
        """What is known of an operation: running, done or the error's sentence, by step."""
        log = self.logs.find(operation_id)
        return {} if log is None else dict(log.outcomes)

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

    def _settle(self, key: tuple[str, int], task: asyncio.Task[Any], *, what: str) -> None:
        """A failure may be asked for again; a success is remembered, the oldest answers are let go."""
        log = self.logs.find(key[0])
        error = _error_of(task, what=what)
        if log is not None and error is None:
            log.done(key[1], _plain(task.result()))
        elif log is not None and error is not None:
            log.failed(key[1], error)
        if error is not None:
            self._known.pop(key, None)
        done = [k for k, (_, t) in self._known.items() if t.done()]
        for old in done[: max(len(done) - MAX_REMEMBERED, 0)]:
            del self._known[old]


def _error_of(task: asyncio.Task[Any], *, what: str) -> RollplaneError | None:
    if task.cancelled():
        return RollplaneError(f"the {what} was cancelled")
    error = task.exception()
    if error is None or isinstance(error, RollplaneError):
        return error
    return RollplaneError(f"the {what} failed; the server's log has the reason")


def _plain(result: Any) -> dict[str, Any] | None:
    """A report as a map of JSON values; None for what is no record."""
    tree = msgspec.to_builtins(result) if isinstance(result, msgspec.Struct) else None
    return tree if isinstance(tree, dict) else None
