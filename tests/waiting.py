"""Waiting for a condition: the event loop is given turns until it holds; work in other threads is then given time."""

import asyncio
from collections.abc import Callable

TURNS = 10_000
THREADS_S = 10.0
"""For what another thread does, such as reading a checkpoint, on busy cores."""


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds: after `TURNS` turns of the event loop at most, or `THREADS_S` seconds later."""
    for _ in range(TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + THREADS_S
    while loop.time() < deadline:
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"the condition did not come true within {TURNS} turns of the event loop and {THREADS_S:g} s")
