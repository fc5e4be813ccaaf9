"""Ids claimed by processes: one holder at a time, and what an ended process held is free."""

import asyncio
from pathlib import Path

import pytest
from tests.waiting import until

from rollplane.engines.base import Engine
from rollplane.engines.wrappers.claimed import ClaimedIds, Claims
from rollplane.engines.wrappers.live import LiveRequests
from rollplane.testing import ScriptedEngine, collect, make_request, script_of


def test_an_id_is_the_first_ones_until_it_lets_go(tmp_path: Path) -> None:
    mine, theirs = Claims(tmp_path, process=0), Claims(tmp_path, process=1)
    assert mine.take("a/b\0c") == 0
    assert theirs.take("a/b\0c") == 0
    assert theirs.holder("a/b\0c") == 0
    mine.drop("a/b\0c")
    assert theirs.holder("a/b\0c") is None
    assert theirs.take("a/b\0c") == 1
    assert theirs.take("other") == 1
    mine.drop_all_of(1)
    assert not left(tmp_path)
    mine.drop("never taken")


def left(directory: Path) -> list[Path]:
    """Claims that nobody let go of."""
    return list(directory.iterdir())


class Pair:
    """Two processes' engines over one directory."""

    def __init__(self, directory: Path, *engines: Engine) -> None:
        self.alive = [True, True]
        self.inner = engines
        self.both = [
            ClaimedIds(LiveRequests(engine), Claims(directory, process=i), other=self.other)
            for i, engine in enumerate(engines)
        ]

    def other(self, index: int) -> Engine | None:
        return self.both[index] if self.alive[index] else None


async def test_a_request_joins_the_one_with_its_id_in_the_other_process(tmp_path: Path) -> None:
    gate = asyncio.Event()
    first = ScriptedEngine([gate, *script_of([4, 5])])
    pair = Pair(tmp_path, first, ScriptedEngine(script_of([6])))
    request = make_request(request_id="same", fields={"body_digest": "d"})
    asked = asyncio.create_task(collect(pair.both[0], request))
    await until(lambda: pair.both[1].claims.holder("same") == 0)
    joined = asyncio.create_task(collect(pair.both[1], request))
    await asyncio.sleep(0)
    gate.set()
    one, other = await asyncio.gather(asked, joined)
    assert one == other
    assert len(first.requests) == 1
    assert not left(tmp_path)


async def test_an_abort_goes_where_the_id_is(tmp_path: Path) -> None:
    gate = asyncio.Event()
    pair = Pair(tmp_path, ScriptedEngine([gate]), ScriptedEngine(script_of([6])))
    asked = asyncio.create_task(collect(pair.both[0], make_request(request_id="here")))
    await until(lambda: pair.both[1].claims.holder("here") == 0)
    assert await pair.both[1].abort("here") == await pair.both[0].abort("here")
    assert await pair.both[1].abort("nowhere") == 0
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_an_id_of_a_process_that_has_ended_is_taken_over(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ScriptedEngine(script_of([4])), ScriptedEngine(script_of([6])))
    Claims(tmp_path, process=0).take("left")
    pair.alive[0] = False
    events = await collect(pair.both[1], make_request(request_id="left"))
    assert events
    assert not left(tmp_path)
