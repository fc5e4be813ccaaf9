"""A worker that dies while it makes an answer: a unary request runs again whole elsewhere, a stream says so and ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.models import tiny
from tests.unit.rl.local_workers import LocalWorker
from tests.waiting import until

from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.errors import RollplaneError
from rollplane.protocol.events import ChoiceEvent
from rollplane.rl.fleet import Fleet
from rollplane.router.policies import RoundRobin
from rollplane.router.router import Router
from rollplane.testing import answer, make_request

TOKENS = 150
ASKED: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 100, "stop_token_ids": list(range(300, 700))},
    "repetition_penalty": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "choices": {"n": 2},
}
"""What a continuation elsewhere, with the tokens so far as its prompt, would get wrong."""


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[Router, list[LocalWorker], list[EmbeddedEngine]]]:
    settings = EmbeddedSettings(model=str(tiny.shared_model("qwen3", layers=2)), threads=1, max_num_seqs=4)
    engines = [EmbeddedEngine(settings) for _ in range(2)]
    fleet = Fleet(epoch=1)
    workers = [LocalWorker(f"http://w{i}", engine=engine) for i, engine in enumerate(engines)]
    for worker in workers:
        await worker.start()
        fleet.add(worker)
    router = Router(fleet, policy=RoundRobin())
    await router.start()
    try:
        yield router, workers, engines
    finally:
        await router.close()
        for engine in engines:
            await engine.close()


def request(asked: dict[str, Any], *, stream: bool) -> Any:
    sampling = {"seed": 5, "temperature": 1.0, "max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True, **asked}
    return make_request([11, 12, 13], stream=stream, **sampling)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_request_whose_worker_dies_half_way_is_answered_as_if_it_had_not(asked: dict[str, Any]) -> None:
    async with two_workers() as (router, _, engines):
        whole = await answer(router, request(asked, stream=False))
        running = asyncio.create_task(answer(router, request(asked, stream=False)))
        await until(lambda: any(engine._live for engine in engines))
        [first] = [engine for engine in engines if engine._live]
        for _ in range(4):
            await first.loaded_adapters()  # each is answered between two steps
        assert not running.done(), "it ended before its worker did, so this test would show nothing"
        await first.close()
        got = await running

        assert got.served_by.attempt == 2
        assert [c.token_ids.tolist() for c in got.choices] == [c.token_ids.tolist() for c in whole.choices]
        assert [c.finish_reason for c in got.choices] == [c.finish_reason for c in whole.choices]


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_a_stream_whose_worker_dies_after_three_tokens_ends_with_an_error_and_repeats_none(
    asked: dict[str, Any],
) -> None:
    async with two_workers() as (router, _, engines):
        whole = await answer(router, request(asked, stream=False))
        seen: dict[int, list[int]] = {}

        async def read() -> None:
            async for event in router.generate(request(asked, stream=True)):
                if isinstance(event, ChoiceEvent):
                    seen.setdefault(event.index, []).extend(event.token_ids.tolist())
                    if sum(map(len, seen.values())) >= 3:
                        for engine in engines:
                            if engine._live:
                                await engine.close()

        with pytest.raises(RollplaneError):
            await read()

        for index, tokens in seen.items():
            assert tokens == whole.choices[index].token_ids.tolist()[: len(tokens)]
        assert sum(map(len, seen.values())) < TOKENS
        again = await answer(router, request(asked, stream=False))
        assert [c.token_ids.tolist() for c in again.choices] == [c.token_ids.tolist() for c in whole.choices]
