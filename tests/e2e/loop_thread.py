"""Servers on an event loop of their own, in a thread: for clients that block."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

T = TypeVar("T")
START_S = 30.0


class LoopThread:
    """An event loop in a thread. `enter` opens an async context there; leaving the `with` block closes all of them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = contextlib.AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float = START_S) -> T:
        """Raises `TimeoutError` where it takes longer."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        return self.run(self._stack.enter_async_context(context))

    def tasks(self) -> int:
        """Tasks of the loop now, this question's own not among them."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return self.run(count())

    def __enter__(self) -> "LoopThread":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(START_S)
            self._loop.close()


@contextlib.contextmanager
def loop_thread() -> Iterator[LoopThread]:
    with LoopThread() as thread:
        yield thread
