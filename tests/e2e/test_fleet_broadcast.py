"""Weights from a trainer's memory through a frontend: one address, one group, all workers or none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.e2e.server_support import Served, eventually, serving
from tests.e2e.test_broadcast import embedded, fresh_tokens, tensors, tokens

from rollplane.client.admin import AdminClient
from rollplane.client.weights import WeightSender
from rollplane.discovery.static import StaticDiscovery
from rollplane.errors import Conflict, EngineFailed, InvalidRequest, NotFound
from rollplane.protocol.broadcast import TransferGroup
from rollplane.rl.fleet import Fleet
from rollplane.router.router import Router


@dataclass(frozen=True)
class Fleeted:
    front: Served
    fleet: Fleet
    workers: list[Served]


@contextlib.asynccontextmanager
async def fleet_of(count: int) -> AsyncIterator[Fleeted]:
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(serving(embedded())) for _ in range(count)]
        fleet = Fleet()
        router = Router(fleet, discovery=StaticDiscovery([worker.url for worker in workers]))
        front = await stack.enter_async_context(serving(router, role="frontend", admin=fleet))

        async def joined() -> bool:
            return len(fleet.members) == count and all(member.routable for member in fleet.members)

        await eventually(joined)
        yield Fleeted(front, fleet, workers)


async def test_a_broadcast_to_the_frontend_is_a_policy_update_of_every_worker() -> None:
    async with fleet_of(2) as found, WeightSender([found.front.url], bucket_bytes=1 << 19) as sender:
        before = await tokens(found.front)
        for seed in (1, 2):
            [report] = (await sender.send(tensors(seed), version=f"v{seed}")).values()
            assert report.policy_version == f"v{seed}"
            assert report.workers == [worker.url for worker in found.workers]
            assert [await tokens(worker) for worker in found.workers] == [await tokens(found.front)] * 2
        after = await tokens(found.front)
        assert after == (await fresh_tokens(2), [["v2", 0]])
        assert after[0] != before[0]
        assert found.fleet.checkpoint is not None
        assert found.fleet.checkpoint.path is None
        assert found.fleet.version == "v2"


async def test_tensors_that_are_not_the_models_change_nothing_and_leave_no_group() -> None:
    async with fleet_of(2) as found, WeightSender([found.front.url], deadline_s=20.0) as sender:
        before = await tokens(found.front)
        wrong = tensors(1)
        wrong["surplus"] = wrong.pop("model.norm.weight")
        async with asyncio.timeout(30):
            with pytest.raises(InvalidRequest):
                await sender.send(wrong, version="v1")
        assert await tokens(found.front) == before
        assert repr(found.fleet.weight_group) == "<FleetGroup none of 0 workers>"
        assert not found.fleet.paused


async def test_what_does_not_add_up_is_refused_before_anyone_joins() -> None:
    async with fleet_of(2) as found, AdminClient(found.front.url) as admin:
        group = TransferGroup(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=5)
        with pytest.raises(InvalidRequest, match="ranks 1 to 2, so it must be 3"):
            await admin.init_weights_group(group)
        with pytest.raises(Conflict, match="no staged weights"):
            await admin.apply_staged("0" * 64, version="v1")
        assert (await admin.destroy_weights_group()).active is False
        assert await admin.policy_version() == "v0"


async def test_a_worker_that_restarts_after_a_broadcast_waits_for_the_next_update() -> None:
    """There is no checkpoint to bring it from: it must not serve what it started with."""
    async with fleet_of(2) as found, WeightSender([found.front.url]) as sender:
        await sender.send(tensors(1), version="v1")
        member = found.fleet.members[1]
        worker: Any = found.workers[1].service.worker
        await worker.set_policy_version("v0")  # as a new process would say

        async def told() -> bool:
            return "is on no disk" in (member.reason or "")

        await eventually(told)
        assert not member.routable
        assert (await tokens(found.front))[1] == [["v1", 0]]


async def test_the_policy_route_takes_a_checkpoint_or_a_broadcast_and_never_both() -> None:
    async with fleet_of(1) as found:
        tensor = {"name": "t", "dtype": "float32", "shape": [1]}
        for body, says in (
            ({}, "give one of them"),
            ({"model_path": "/m", "tensors": [tensor]}, "give one of them"),
            ({"tensors": [tensor]}, "no directory to be named by"),
        ):
            async with found.front.post("/v1/rl/policy", body) as answer:
                assert answer.status == 400
                assert says in (await answer.json())["error"]["message"]
        async with found.front.post("/v1/rl/policy", {"tensors": [tensor], "weight_version": "v1"}) as answer:
            assert answer.status == 409
            assert "no weight group" in (await answer.json())["error"]["message"]


async def test_worker_routes_of_a_frontend_that_has_no_such_thing_are_a_404() -> None:
    async with fleet_of(1) as found, AdminClient(found.front.url) as admin:
        with pytest.raises(NotFound):
            await admin.stage_weights("/nowhere")
        with pytest.raises((Conflict, EngineFailed)):
            await admin.apply_staged("1" * 64, version="v9")
