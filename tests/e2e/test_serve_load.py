"""Five hundred requests at once through `rollplane serve --workers 2`: none lost, none refused; and one worker killed."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.test_fleet_processes import children, serving

from rollplane.client.client import Client
from rollplane.errors import RollplaneError
from rollplane.protocol.response import GenerateResponse

REQUESTS = 500
SAMPLING: dict[str, Any] = {"ignore_eos": True, "logprobs": 0}
SERVE = ["--workers", "2", "--port", "0", "--engine", "mock", "--backoff-s", "0.05"]


async def ask(client: Client, i: int, *, max_tokens: int = 40) -> GenerateResponse:
    sampling = {**SAMPLING, "max_tokens": max_tokens, "seed": i}
    return await client.generate([3 + i % 7, i], sampling_params=sampling, request_id=f"load-{i}")


def tokens(answer: GenerateResponse) -> list[int]:
    ids: list[int] = answer.choices[0].token_ids.tolist()
    return ids


@pytest.mark.timeout(300)
async def test_five_hundred_requests_at_once_are_all_answered(tmp_path: Path) -> None:
    options = [*SERVE, "--engine-option", "step_s=0.01"]
    async with serving(*options, log=tmp_path / "log") as (_, url), Client(url, attempts=1) as client:
        answers = await asyncio.gather(*(ask(client, i) for i in range(REQUESTS)))
        again = await asyncio.gather(*(ask(client, i) for i in range(0, REQUESTS, 50)))
    assert [answer.request_id for answer in answers] == [f"load-{i}" for i in range(REQUESTS)]
    assert {len(tokens(answer)) for answer in answers} == {40}
    assert len({answer.served_by.instance for answer in answers}) == 2
    assert [tokens(answer) for answer in again] == [tokens(answers[i]) for i in range(0, REQUESTS, 50)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.full)])
async def test_twice_the_load_that_can_be_served_waits_and_nobody_is_turned_away(seconds: int, tmp_path: Path) -> None:
    """Without a limit that was configured; `test_fleet_limits.py` has those."""
    slots, steps, step_s = 4, 8, 0.05  # two workers: 20 requests a second
    rate = 2 * 2 * slots / (steps * step_s)
    options = [*SERVE, "--engine-option", f"step_s={step_s}", "--engine-option", f"max_num_seqs={slots}"]
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": steps, "ignore_eos": True}}
    statuses: list[int] = []
    async with serving(*options, log=tmp_path / "log") as (_, url), aiohttp.ClientSession() as session:

        async def post() -> None:
            async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
                await answer.read()
                statuses.append(answer.status)

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for i in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
                group.create_task(post())
        took = time.monotonic() - began
    assert statuses == [200] * int(rate * seconds)
    assert took > 1.5 * seconds, "that was no overload"


@pytest.mark.timeout(300)
async def test_a_killed_worker_loses_no_request_and_mixes_none(tmp_path: Path) -> None:
    options = [*SERVE, "--engine-option", "step_s=0.05"]
    async with serving(*options, log=tmp_path / "log") as (process, url), Client(url, attempts=1) as client:
        victim = children(process.pid)["worker-1"]
        first_try = [asyncio.create_task(ask(client, i)) for i in range(1, REQUESTS)]
        # Its answer says that the workers are busy: they step all their sequences together.
        first_try.insert(0, asyncio.create_task(ask(client, 0, max_tokens=1)))
        await asyncio.wait(first_try, return_when=asyncio.FIRST_COMPLETED)
        os.kill(victim, signal.SIGKILL)
        assert sum(task.done() for task in first_try) < REQUESTS // 2
        results = await asyncio.gather(*first_try, return_exceptions=True)
        failed = {i: result for i, result in enumerate(results) if isinstance(result, BaseException)}
        assert all(isinstance(error, RollplaneError) and error.retryable for error in failed.values()), failed
        retried = {i: await ask(client, i) for i in failed}
        reference = await asyncio.gather(*(ask(client, i) for i in range(REQUESTS)))
    for i, right in enumerate(reference[1:], start=1):
        result = retried.get(i, results[i])
        assert isinstance(result, GenerateResponse)
        assert tokens(result) == tokens(right), f"request {i}"
