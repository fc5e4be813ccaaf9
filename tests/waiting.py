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
