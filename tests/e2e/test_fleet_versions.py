"""Versions that a request asks for, over workers that a trainer updates one by one behind the frontend."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.fleets import FleetUnderTest, fleet_of, write_weights

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import PreconditionFailed

SAMPLING: dict[str, Any] = {"max_tokens": 4, "seed": 1, "ignore_eos": True}


async def update_directly(fleet: FleetUnderTest, index: int, path: str) -> None:
    """An update that passes the frontend by; returns once the frontend has seen it."""
    async with AdminClient(fleet.workers[index].url) as admin:
        await admin.update_policy(path)
    await fleet.until(lambda: fleet.fleet.members[index].version == Path(path).name)


async def served(client: Client, **asked: Any) -> set[str]:
    answers = await asyncio.gather(*(client.generate([5, 6, i], sampling_params=SAMPLING, **asked) for i in range(8)))
    return {version for answer in answers for version, _ in answer.choices[0].policy_versions}


async def test_only_workers_within_the_lag_serve_and_the_metrics_say_how_far_each_is_behind(tmp_path: Path) -> None:
    async with fleet_of([MockSettings()] * 3) as fleet, Client(fleet.frontend.url, attempts=1) as client:
        await update_directly(fleet, 0, write_weights(tmp_path, "v1"))
        await update_directly(fleet, 1, str(tmp_path / "v1"))
        await update_directly(fleet, 1, write_weights(tmp_path, "v2"))
        assert await served(client, max_policy_lag=0) == {"v2"}
        assert await served(client, max_policy_lag=1) == {"v1", "v2"}
        assert await served(client) == {"initial", "v1", "v2"}
        assert {worker.url: worker.policy_lag for worker in fleet.router.placement().workers} == {
            fleet.workers[0].url: 1,
            fleet.workers[1].url: 0,
            fleet.workers[2].url: 2,
        }


async def test_a_request_waits_for_a_worker_within_the_lag_and_at_its_deadline_is_told_what_there_is(
    tmp_path: Path,
) -> None:
    async with fleet_of([MockSettings()] * 2) as fleet, Client(fleet.frontend.url, attempts=1) as client:
        path = write_weights(tmp_path, "v1")
        await update_directly(fleet, 0, path)
        await fleet.workers[0].kill()
        await fleet.until(lambda: not fleet.fleet.members[0].routable)
        asked: dict[str, Any] = {"sampling_params": SAMPLING, "max_policy_lag": 0}
        with pytest.raises(PreconditionFailed, match="at most 0 updates behind the newest, 'v1'"):
            await client.generate([5, 6], **asked)
        with pytest.raises(PreconditionFailed) as refusal:
            await client.generate([5, 6], **asked, deadline_s=0.3)
        assert refusal.value.details == {"policy_versions": ["initial"], "newest": "v1", "lags": {"initial": 1}}
        waiting = asyncio.create_task(client.generate([5, 6], **asked, deadline_s=20.0))
        await fleet.until(lambda: "1 held" in repr(fleet.router))
        await update_directly(fleet, 1, path)
        assert (await waiting).choices[0].policy_versions == [("v1", 0)]


@pytest.mark.parametrize("wanted", [{"policy_version": "v1"}, {"min_policy_version": "v1"}])
async def test_a_request_with_a_deadline_waits_for_the_update_that_brings_its_version(
    tmp_path: Path, wanted: dict[str, Any]
) -> None:
    async with (
        fleet_of([MockSettings()] * 2) as fleet,
        Client(fleet.frontend.url, attempts=1) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        with pytest.raises(PreconditionFailed, match="'initial'"):
            await client.generate([5, 6], sampling_params=SAMPLING, deadline_s=0.2, **wanted)
        waiting = asyncio.create_task(client.generate([5, 6], sampling_params=SAMPLING, deadline_s=20.0, **wanted))
        await fleet.until(lambda: "1 held" in repr(fleet.router))
        await admin.update_policy(write_weights(tmp_path, "v1"))
        assert (await waiting).choices[0].policy_versions == [("v1", 0)]
