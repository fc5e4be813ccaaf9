"""Idempotency keys through a frontend: asking again gives the first answer, never a second sample."""

import asyncio
from typing import Any

import pytest
from tests.e2e.fleets import fleet_of
from tests.waiting import until

from rollplane.client.client import Client
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import IdempotencyMismatch

UNSEEDED: dict[str, Any] = {"max_tokens": 12, "logprobs": 0, "ignore_eos": True, "temperature": 1.0}


async def test_asking_again_gives_the_first_answer_from_the_worker_that_made_it() -> None:
    async with fleet_of([MockSettings()] * 3) as fleet, Client(fleet.frontend.url) as client:
        first = await client.generate([5, 6, 7], sampling_params=UNSEEDED, idempotency_key="k")
        again = await client.generate([5, 6, 7], sampling_params=UNSEEDED, idempotency_key="k")
        others = [
            await client.generate([5, 6, 7], sampling_params=UNSEEDED, idempotency_key=f"other-{i}") for i in range(12)
        ]
    assert first.choices[0].token_ids.tolist() == again.choices[0].token_ids.tolist()
    assert first.served_by.instance == again.served_by.instance
    beside = [other for other in others if other.served_by.instance == first.served_by.instance]
    assert beside
    assert all(other.choices[0].token_ids.tolist() != first.choices[0].token_ids.tolist() for other in beside)


async def test_a_key_used_with_another_body_is_a_422() -> None:
    async with fleet_of([MockSettings()] * 2) as fleet, Client(fleet.frontend.url) as client:
        await client.generate([5, 6, 7], sampling_params=UNSEEDED, idempotency_key="k")
        with pytest.raises(IdempotencyMismatch) as refused:
            await client.generate([5, 6, 8], sampling_params=UNSEEDED, idempotency_key="k")
    assert refused.value.status == 422


async def test_a_caller_that_lost_its_connection_joins_what_still_runs() -> None:
    settings = [MockSettings(step_s=0.05)] * 2
    async with fleet_of(settings) as fleet, Client(fleet.frontend.url) as client:
        asking: dict[str, Any] = {"sampling_params": UNSEEDED, "request_id": "a", "idempotency_key": "k"}
        first = asyncio.create_task(client.generate([5, 6, 7], **asking))

        def live() -> int:
            return sum(worker.worker.live_requests for worker in fleet.workers)

        await fleet.until(lambda: live() == 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        answer = await client.generate([5, 6, 7], **asking)
        assert answer.choices[0].token_ids.size == 12
        await until(lambda: live() == 0)
