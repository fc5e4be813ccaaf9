"""Waiting for a condition a test cannot await: the event loop is given turns until it holds, then time."""

import asyncio
from collections.abc import Callable

TURNS = 1_000
"""Turns without a wait between them; most conditions need a handful."""


async def until(condition: Callable[[], object], *, limit_s: float = 30.0) -> None:
    """Return once the condition holds, whether it waits for other tasks or for a thread, such as one that reads a file."""
    for _ in range(TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what the code under test does sets no event
            await asyncio.sleep(0.001)
