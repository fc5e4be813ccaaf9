"""How deltas merge while a reader is slow."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.protocol.artifacts import Alternatives, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent
from rollplane.protocol.response import Choice
from rollplane.server.sse import delta_trees
from rollplane.server.streamed import Deltas


def delta(ids: list[int], *, index: int = 0, top: bool = False, finish: Any = None) -> ChoiceEvent:
    values = np.array([-0.5 * i for i in ids], dtype=np.float32)
    alternatives = None
    if top:
        alternatives = Alternatives(
            ids=np.array(ids, dtype=np.int32) + 1,
            values=values,
            ranks=np.ones(len(ids), dtype=np.int32),
            offsets=np.arange(len(ids) + 1, dtype=np.int32),
        )
    return ChoiceEvent(
        index=index,
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=TokenLogprobs(values=values, alternatives=alternatives),
        finish_reason=finish,
    )


def trees(deltas: Deltas) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(
        msgspec.json.encode(delta_trees(deltas.take(), routes="structured", logprobs=True))
    )
    return found


async def test_waiting_deltas_of_a_choice_become_one() -> None:
    deltas = Deltas()
    for ids in ([1], [2, 3], [4]):
        deltas.add(delta(ids, top=True), None)

    (tree,) = trees(deltas)
    assert tree["token_ids"] == [1, 2, 3, 4]
    assert [entry["logprob"] for entry in tree["logprobs"]["content"]] == [-0.5, -1.0, -1.5, -2.0]
    assert [entry["top_logprobs"][0]["token"] for entry in tree["logprobs"]["content"]] == [
        f"token_id:{i}" for i in (2, 3, 4, 5)
    ]
    assert tree["finish_reason"] is None
    assert not deltas.waiting


async def test_choices_stay_apart_and_in_order() -> None:
    deltas = Deltas()
    for index in (2, 0, 1, 2):
        deltas.add(delta([index], index=index), None)

    assert [(tree["index"], tree["token_ids"]) for tree in trees(deltas)] == [(0, [0]), (1, [1]), (2, [2, 2])]


async def test_a_terminal_event_carries_the_deltas_before_it_and_the_whole_choices_rest() -> None:
    deltas = Deltas()
    whole = Choice(index=0, token_ids=np.array([1, 2, 3], dtype=np.int32), finish_reason="stop", stop_reason=3)
    deltas.add(delta([1]), None)
    trees(deltas)
    deltas.add(delta([2]), None)
    deltas.add(delta([3], finish="stop"), whole)

    (tree,) = trees(deltas)
    assert (tree["token_ids"], tree["finish_reason"], tree["stop_reason"]) == ([2, 3], "stop", 3)


async def test_a_terminal_event_without_tokens_is_still_written() -> None:
    deltas = Deltas()
    deltas.add(delta([], finish="abort"), Choice(index=0, token_ids=np.empty(0, np.int32), finish_reason="abort"))

    (tree,) = trees(deltas)
    assert tree["token_ids"] == []
    assert tree["logprobs"] == {"content": []}
    assert tree["finish_reason"] == "abort"


async def test_what_comes_while_a_chunk_is_written_waits_for_the_next() -> None:
    deltas = Deltas()
    deltas.add(delta([1]), None)
    taken = deltas.take()
    deltas.add(delta([2]), None)

    assert list(taken.parts) == [0]
    assert trees(deltas)[0]["token_ids"] == [2]


async def test_the_end_wakes_the_writer() -> None:
    deltas = Deltas()
    deltas.end()
    async with asyncio.timeout(1):
        await deltas.arrived.wait()

    assert deltas.ended
    assert repr(deltas) == "<Deltas of 0 choices, ended>"


@pytest.mark.parametrize("first", [True, False])
async def test_deltas_that_disagree_about_alternatives_are_a_breach(first: bool) -> None:
    from rollplane.errors import EngineProtocolError

    deltas = Deltas()
    deltas.add(delta([1], top=first), None)
    deltas.add(delta([2], top=not first), None)

    with pytest.raises(EngineProtocolError):
        trees(deltas)
