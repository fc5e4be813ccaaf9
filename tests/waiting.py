"""Waiting for a condition without sleeping: the event loop is given turns until it holds, at most `TURNS`."""

import asyncio
from collections.abc import Callable

TURNS = 10_000


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds; for work that needs event-loop turns only, never for time or another thread."""
    for _ in range(TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"the condition did not come true within {TURNS} turns of the event loop")


async def until_threads(condition: Callable[[], object], *, limit_s: float = 20.0) -> None:
    """Return once the condition holds, also where it waits for another thread, such as the reading of a file."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - a thread of the code under test sets no event
            await asyncio.sleep(0.001)
