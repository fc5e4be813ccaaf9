"""The move of a choice to another vLLM request."""

import asyncio
from typing import Any

import pytest

from rollplane.engines.vllm.live import LiveChoice
from rollplane.errors import EngineFailed


class Collector:
    """The shape of vLLM's collector."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()

    async def get(self) -> Any:
        return await self.outputs.get()


async def test_outputs_of_a_request_that_was_left_are_dropped() -> None:
    choice, old, new = LiveChoice(0, None, "a"), Collector(), Collector()
    choice.settle(old)
    reader = asyncio.create_task(choice.next_output())
    await asyncio.sleep(0)

    assert choice.leave() is old
    old.outputs.put_nowait("aborted")
    new.outputs.put_nowait("whole")
    await asyncio.sleep(0)
    choice.settle(new)

    assert await reader == "whole"


async def test_a_choice_that_cannot_go_on_says_why() -> None:
    choice, old = LiveChoice(0, None, "a"), Collector()
    choice.settle(old)
    reader = asyncio.create_task(choice.next_output())
    await asyncio.sleep(0)
    choice.leave()
    old.outputs.put_nowait("aborted")
    choice.fail(EngineFailed("no more"))

    with pytest.raises(EngineFailed, match="no more"):
        await reader
