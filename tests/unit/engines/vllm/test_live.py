"""Version spans and the move of a choice to another vLLM request."""

import asyncio
from typing import Any

import pytest

from rollplane.engines.vllm.live import LiveChoice, Spans
from rollplane.errors import EngineFailed


@pytest.mark.parametrize(
    ("changes", "tokens", "spans"),
    [
        ([], 5, [("a", 0)]),
        ([("b", 3)], 5, [("a", 0), ("b", 3)]),
        ([("b", 3)], 3, [("a", 0)]),
        ([("b", 0)], 5, [("b", 0)]),
        ([("b", 0)], 0, [("b", 0)]),
        ([("b", 3), ("c", 3)], 5, [("a", 0), ("c", 3)]),
        ([("b", 3), ("a", 3)], 5, [("a", 0)]),
        ([("b", 3), ("c", 4)], 5, [("a", 0), ("b", 3), ("c", 4)]),
        ([("b", None)], 5, [("a", 0), ("b", None)]),
        ([("a", 3)], 5, [("a", 0)]),
    ],
)
def test_spans_say_which_version_made_which_token(changes: list[Any], tokens: int, spans: list[Any]) -> None:
    found = Spans("a")
    for version, made in changes:
        found.change(version, made=made)

    assert found.read(tokens) == spans


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
