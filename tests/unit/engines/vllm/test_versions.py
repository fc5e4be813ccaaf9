"""Which vLLM may be used, and the order that token counts are read in."""

import asyncio
from typing import Any

import pytest

from rollplane.engines.vllm import versions
from rollplane.errors import InvalidRequest


@pytest.mark.parametrize(("version", "line"), [("0.31.0", "0.31"), ("0.31.0+cpu", "0.31"), ("0.29.1", "0.29")])
def test_releases_that_were_tried_pass(version: str, line: str) -> None:
    assert versions.check_version(version) == line


@pytest.mark.parametrize("version", ["0.30.0", "0.3.1", "1.0.0", "0.310.0"])
def test_others_are_refused_by_name_unless_allowed(version: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"vLLM {version} .*allow_untested_vllm"):
        versions.check_version(version)

    assert versions.check_version(version, allow_untested=True)


class Core:
    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()


class Engine:
    """An engine whose outputs are processed one by one, as vLLM's handler does it."""

    def __init__(self) -> None:
        self.errored = False
        self.engine_core = Core()
        self.processed = 0

    async def handle(self) -> None:
        while True:
            outputs = await self.engine_core.outputs_queue.get()
            for _ in outputs.outputs:
                await asyncio.sleep(0)
                self.processed += 1


class Outputs:
    outputs = (1, 2, 3)


async def test_settling_waits_for_every_output_that_arrived() -> None:
    engine = Engine()
    for _ in range(5):
        engine.engine_core.outputs_queue.put_nowait(Outputs())
    handler = asyncio.create_task(engine.handle())

    assert await versions.settle(engine)
    assert engine.processed == 15
    handler.cancel()


async def test_a_dead_engine_does_not_settle() -> None:
    engine = Engine()
    engine.errored = True

    assert not await versions.settle(engine)
