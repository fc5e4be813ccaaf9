"""LoRA adapters of a whole fleet on real sockets."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.fleets import MockWorker, fleet_of
from tests.unit.rl.local_workers import write_adapter

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import EngineFailed, NotFound
from rollplane.rl.remote import RemoteWorker

SAMPLING: dict[str, Any] = {"max_tokens": 8, "seed": 1, "ignore_eos": True}


async def test_an_adapter_is_loaded_on_all_workers_and_replaced_under_its_name(tmp_path: Path) -> None:
    async with (
        fleet_of([MockSettings()] * 3) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        first = await admin.load_adapter("tuned", write_adapter(tmp_path, "a1", value=1.0))
        assert (first.generation, first.state) == (1, "ready")
        answers = await asyncio.gather(
            *(client.generate([5, 6, 7], sampling_params=SAMPLING, model="tuned") for _ in range(9))
        )
        assert {answer.served_by.adapter_generation for answer in answers} == {1}
        assert len({tuple(answer.choices[0].token_ids.tolist()) for answer in answers}) == 1
        second = await admin.load_adapter("tuned", write_adapter(tmp_path, "a2", value=2.0))
        assert second.generation == 2
        answers = await asyncio.gather(
            *(client.generate([5, 6, 7], sampling_params=SAMPLING, model="tuned") for _ in range(9))
        )
        assert {answer.served_by.adapter_generation for answer in answers} == {2}
        await admin.unload_adapter("tuned")
        with pytest.raises(NotFound):
            await client.generate([5, 6, 7], sampling_params=SAMPLING, model="tuned")


async def test_an_adapter_that_one_worker_cannot_load_is_on_none(tmp_path: Path) -> None:
    settings = [MockSettings(), MockSettings(faults=(Fault(kind="fail", operation="load_adapter"),))]
    async with fleet_of(settings) as fleet, AdminClient(fleet.frontend.url, attempts=1) as admin:
        with pytest.raises(EngineFailed):
            await admin.load_adapter("tuned", write_adapter(tmp_path, "a1", value=1.0))
        assert [await worker.engine.loaded_adapters() for worker in fleet.workers] == [[], []]
        assert "tuned" not in fleet.fleet.adapter_paths


async def test_a_late_joiner_has_the_fleets_adapters_before_it_serves(tmp_path: Path) -> None:
    late = MockWorker(name="late")
    async with fleet_of([MockSettings()]) as fleet, AdminClient(fleet.frontend.url) as admin:
        await admin.load_adapter("tuned", write_adapter(tmp_path, "a1", value=1.0))
        await late.start()
        try:
            member = fleet.fleet.add(RemoteWorker(late.url, poll_s=0.1))
            await fleet.until(lambda: member.routable)
            assert await late.engine.loaded_adapters() == ["tuned@1"]
        finally:
            await late.kill()
