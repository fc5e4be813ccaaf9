"""Policy updates of a whole fleet on real sockets: all workers or none, whatever fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.fleets import MockWorker, fleet_of, write_weights

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import Conflict, EngineFailed, InvalidRequest, NotFound, PreconditionFailed
from rollplane.protocol.admin import TensorMismatch
from rollplane.rl.fleet import FleetSettings
from rollplane.rl.remote import RemoteWorker

SAMPLING: dict[str, Any] = {"max_tokens": 8, "seed": 1, "ignore_eos": True}
FAILS_ONCE = Fault(kind="fail", operation="apply_weights", at=1)
LOST = Fault(kind="die", operation="apply_weights", at=1)


async def versions_of(client: Client, count: int) -> set[str]:
    answers = await asyncio.gather(*(client.generate([5, 6, i], sampling_params=SAMPLING) for i in range(count)))
    return {version for answer in answers for version, _ in answer.choices[0].policy_versions}


async def test_an_update_reaches_all_workers_and_says_what_it_did(tmp_path: Path) -> None:
    path = write_weights(tmp_path, "v1")
    async with (
        fleet_of([MockSettings()] * 3) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        report = await admin.update_policy(path)
        assert (report.policy_version, report.previous_version, report.applied) == ("v1", "initial", True)
        assert await admin.policy_version() == "v1"
        assert await versions_of(client, 12) == {"v1"}
        again = await admin.update_policy(path)
        assert not again.applied
        assert [worker.engine.calls("apply_weights") for worker in fleet.workers] == [1, 1, 1]
        records = await admin.workers()
        assert {record.policy_version for record in records} == {"v1"}
        assert {record.policy_digest for record in records} == {report.digest}


async def test_a_fleet_refuses_a_checkpoint_whose_digest_is_not_the_expected_one(tmp_path: Path) -> None:
    path = write_weights(tmp_path, "v1")
    async with fleet_of([MockSettings()] * 2) as fleet, AdminClient(fleet.frontend.url) as admin:
        with pytest.raises(Conflict, match="digest") as refused:
            await admin.update_policy(path, expected_digest="0" * 64)
        assert refused.value.param == "expected_digest"
        assert await admin.policy_version() == "initial"
        digest = str((refused.value.details or {})["digest"])
        assert (await admin.update_policy(path, expected_digest=digest)).digest == digest


async def test_tensors_that_are_not_the_models_are_refused_unless_they_are_allowed_and_then_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "v1"
    path.mkdir()
    (path / "mock_weights.json").write_text(json.dumps({"missing": ["a", "b"], "unexpected": ["c"]}))
    async with (
        fleet_of([MockSettings()] * 2) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        for allowed, still in (
            ((), "unexpected c; missing a, b"),
            (("missing",), "unexpected c"),
            (("unexpected",), "a, b"),
        ):
            with pytest.raises(InvalidRequest, match=still):
                await admin.update_policy(str(path), allow_tensors=allowed)  # type: ignore[arg-type]
        assert await admin.policy_version() == "initial"
        report = await admin.update_policy(str(path), allow_tensors=("missing", "unexpected"))
        told = TensorMismatch(missing=2, unexpected=1, missing_names=["a", "b"], unexpected_names=["c"])
        assert (report.ignored, report.applied) == (told, True)
        assert await versions_of(client, 4) == {"v1"}
        async with aiohttp.ClientSession() as session, session.get(f"{fleet.workers[0].url}/metrics") as metrics:
            assert 'rollplane_weights_mismatched_tensors{kind="missing"} 2.0' in await metrics.text()
        assert sum("not the model's in all tensors" in record.message for record in caplog.records) == 2
        assert (await admin.update_policy(str(path), allow_tensors=("missing", "unexpected"))).applied is False
    async with fleet_of([MockSettings()]) as fleet, AdminClient(fleet.workers[0].url) as one:
        assert (await one.stage_weights(str(path), allow_tensors=("missing", "unexpected"))).ignored == told
        with pytest.raises(InvalidRequest, match="allow_tensors"):
            await one.update_policy(str(path), allow_tensors=("all",))  # type: ignore[arg-type]


async def test_a_failed_update_with_fence_leaves_one_version_and_the_failed_worker_without_traffic(
    tmp_path: Path,
) -> None:
    path = write_weights(tmp_path, "v1")
    settings = [MockSettings(), MockSettings(faults=(FAILS_ONCE,)), MockSettings()]
    async with (
        fleet_of(settings) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        report = await admin.update_policy(path, on_failure="fence")
        assert report.policy_version == "v1"
        assert report.workers == [fleet.workers[0].url, fleet.workers[2].url]
        assert list(report.fenced) == [fleet.workers[1].url]
        assert "scripted" in report.fenced[fleet.workers[1].url]
        before = fleet.workers[1].engine.calls("generate")
        assert await versions_of(client, 30) == {"v1"}
        assert fleet.workers[1].engine.calls("generate") == before
        by_url = {record.system_url: record for record in await admin.workers()}
        assert by_url[fleet.workers[1].url].error is not None
        assert "fenced" in str(by_url[fleet.workers[1].url].error)
        versions = [by_url[worker.url].policy_version for worker in fleet.workers]
        assert (versions[0], versions[2]) == ("v1", "v1")
        assert versions[1] != "v1"
        # The next update takes the fenced worker in again.
        assert (await admin.update_policy(write_weights(tmp_path, "v2"))).applied
        assert await versions_of(client, 12) == {"v2"}
        assert fleet.workers[1].engine.calls("generate") > before


async def test_a_failed_update_with_rollback_leaves_all_at_the_previous_checkpoint(tmp_path: Path) -> None:
    first, second = write_weights(tmp_path, "v1"), write_weights(tmp_path, "v2")
    settings = [
        MockSettings(),
        MockSettings(faults=(Fault(kind="fail", operation="apply_weights", at=2),)),
        MockSettings(),
    ]
    async with (
        fleet_of(settings) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url, attempts=1) as admin,
    ):
        await admin.update_policy(first)
        with pytest.raises(EngineFailed) as failure:
            await admin.update_policy(second, on_failure="rollback", operation_id="up")
        assert failure.value.details is not None
        assert set(failure.value.details["policy_versions"].values()) == {"v1"}
        assert failure.value.details["fenced"] == []
        assert await versions_of(client, 30) == {"v1"}
        assert all(worker.engine.calls("generate") for worker in fleet.workers)
        assert {worker.worker.version for worker in fleet.workers} == {"v1"}
        # The same operation may be asked for again, and now succeeds.
        assert (await admin.update_policy(second, operation_id="up")).applied
        assert await versions_of(client, 12) == {"v2"}


async def test_without_a_known_previous_checkpoint_the_old_version_goes_on_where_it_still_is(tmp_path: Path) -> None:
    settings = [MockSettings(), MockSettings(faults=(FAILS_ONCE,)), MockSettings()]
    async with (
        fleet_of(settings) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url, attempts=1) as admin,
    ):
        with pytest.raises(EngineFailed) as failure:
            await admin.update_policy(write_weights(tmp_path, "v1"))
        assert failure.value.details is not None
        assert sorted(failure.value.details["fenced"]) == sorted([fleet.workers[0].url, fleet.workers[2].url])
        assert await versions_of(client, 9) == {"initial"}


async def test_a_checkpoint_that_one_worker_cannot_read_changes_nothing(tmp_path: Path) -> None:
    settings = [MockSettings(), MockSettings(faults=(Fault(kind="refuse", operation="stage_weights"),))]
    async with fleet_of(settings) as fleet, AdminClient(fleet.frontend.url, attempts=1) as admin:
        with pytest.raises(Exception, match="nothing changed"):
            await admin.update_policy(write_weights(tmp_path, "v1"))
        assert [worker.engine.calls("apply_weights") for worker in fleet.workers] == [0, 0]
        assert all(member.routable for member in fleet.fleet.members)
        with pytest.raises(NotFound, match="does not exist"):
            await admin.update_policy(str(tmp_path / "absent"))


async def test_an_update_that_is_asked_for_again_after_a_lost_connection_is_applied_once(tmp_path: Path) -> None:
    path = write_weights(tmp_path, "v1")
    async with fleet_of([MockSettings(apply_s=0.3)] * 2) as fleet, AdminClient(fleet.frontend.url) as admin:
        body = {"model_path": path, "operation_id": "op-1"}
        async with aiohttp.ClientSession() as session:
            lost = asyncio.create_task(session.post(f"{fleet.frontend.url}/engine/update_weights_from_disk", json=body))
            await fleet.until(lambda: fleet.fleet.held_for is not None)
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
        assert await admin.operation("op-1") == {"0": "running"}
        report = await admin.update_policy(path, operation_id="op-1")
        assert report.applied
        assert report.policy_version == "v1"
        assert [worker.engine.calls("apply_weights") for worker in fleet.workers] == [1, 1]
        assert await admin.operation("op-1") == {"0": "done"}
        with pytest.raises(NotFound, match="op-9"):
            await admin.operation("op-9")
        with pytest.raises(Conflict, match="other arguments"):
            await admin.update_policy(write_weights(tmp_path, "v2"), operation_id="op-1")
        # Also without an id: the same version and contents are no work.
        assert not (await admin.update_policy(path)).applied


async def test_requests_during_an_update_are_held_or_go_on_and_none_is_lost(tmp_path: Path) -> None:
    path = write_weights(tmp_path, "v1")
    async with (
        fleet_of([MockSettings(step_s=0.005, apply_s=0.1)] * 3) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        sampling = {**SAMPLING, "max_tokens": 60}
        running = [asyncio.create_task(client.generate([5, 6, i], sampling_params=sampling)) for i in range(12)]
        await fleet.until(lambda: all(worker.worker.live_requests for worker in fleet.workers))
        update = asyncio.create_task(admin.update_policy(path, mode="keep"))
        await fleet.until(lambda: fleet.fleet.held_for is not None)
        late = [asyncio.create_task(client.generate([7, 8, i], sampling_params=sampling)) for i in range(6)]
        await update
        answers = await asyncio.gather(*running, *late)
        spans = [answer.choices[0].policy_versions for answer in answers]
        assert all(answer.choices[0].token_ids.size == 60 for answer in answers)
        assert all([version for version, _ in one] in (["initial", "v1"], ["v1"]) for one in spans)
        assert all(one == [("v1", 0)] for one in spans[12:])


async def test_versions_are_routed_by_the_fleets_own_order(tmp_path: Path) -> None:
    async with (
        fleet_of([MockSettings()] * 2) as fleet,
        Client(fleet.frontend.url, attempts=1) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        for name in ("zeta", "alpha"):
            await admin.update_policy(write_weights(tmp_path, name))
        await client.generate([5, 6], sampling_params=SAMPLING, min_policy_version="zeta")
        await client.generate([5, 6], sampling_params=SAMPLING, min_policy_version="initial")
        await client.generate([5, 6], sampling_params=SAMPLING, policy_version="alpha")
        for wanted in ({"policy_version": "zeta"}, {"min_policy_version": "omega"}):
            with pytest.raises(PreconditionFailed, match="'alpha'") as refusal:
                await client.generate([5, 6], sampling_params=SAMPLING, **wanted)  # type: ignore[arg-type]
            assert refusal.value.details == {"policy_versions": ["alpha"]}


async def test_a_late_joiner_takes_no_request_until_it_has_the_fleets_weights(tmp_path: Path) -> None:
    path = write_weights(tmp_path, "v1")
    late = MockWorker(MockSettings(stage_s=0.2), name="late")
    async with (
        fleet_of([MockSettings()]) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        await admin.update_policy(path)
        await late.start()
        try:
            member = fleet.fleet.add(RemoteWorker(late.url, poll_s=0.1))
            await fleet.until(lambda: late.engine.calls("stage_weights"))
            assert not member.routable
            assert await versions_of(client, 6) == {"v1"}
            assert late.engine.calls("generate") == 0
            await fleet.until(lambda: member.routable)
            assert late.worker.version == "v1"
            assert await versions_of(client, 12) == {"v1"}
            assert late.engine.calls("generate") > 0
        finally:
            await late.kill()


async def test_a_restarted_worker_is_brought_back_before_it_serves(tmp_path: Path) -> None:
    path = write_weights(tmp_path, "v1")
    async with (
        fleet_of([MockSettings()] * 2) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        await admin.update_policy(path)
        port, old = fleet.workers[0].port, fleet.fleet.members[0].instance
        await fleet.workers[0].kill()
        await fleet.until(lambda: not fleet.fleet.members[0].routable)
        fleet.workers[0] = MockWorker(MockSettings(), name="restarted", port=port)
        await fleet.workers[0].start()
        assert await versions_of(client, 6) == {"v1"}
        await fleet.until(lambda: fleet.fleet.members[0].routable)
        assert fleet.fleet.members[0].instance != old
        assert fleet.workers[0].worker.version == "v1"
        assert await versions_of(client, 12) == {"v1"}
        assert fleet.workers[0].engine.calls("generate") > 0


async def test_a_worker_that_dies_while_applying_is_fenced_and_its_requests_move(tmp_path: Path) -> None:
    settings = [MockSettings(step_s=0.01), MockSettings(step_s=0.01, faults=(LOST,))]
    async with (
        fleet_of(settings) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url, attempts=1) as admin,
    ):
        tasks = [
            asyncio.create_task(client.generate([5, 6, i], sampling_params={**SAMPLING, "max_tokens": 40}))
            for i in range(8)
        ]
        await fleet.until(lambda: all(worker.worker.live_requests for worker in fleet.workers))
        report = await admin.update_policy(write_weights(tmp_path, "v1"), on_failure="fence")
        assert report.policy_version == "v1"
        answers = await asyncio.gather(*tasks)
        assert all(answer.choices[0].token_ids.size == 40 for answer in answers)
        assert fleet.fleet.members[1].state == "fenced"


async def test_a_fleet_that_was_paused_stays_paused_through_an_update(tmp_path: Path) -> None:
    async with (
        fleet_of([MockSettings()] * 2) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        await admin.pause("keep")
        assert (await admin.update_policy(write_weights(tmp_path, "v1"))).applied
        assert {worker.worker.state for worker in fleet.workers} == {"paused"}
        task = asyncio.create_task(client.generate([5, 6], sampling_params=SAMPLING))
        await fleet.until(lambda: "1 held" in repr(fleet.router))
        await admin.resume()
        assert (await task).choices[0].policy_versions == [("v1", 0)]


async def test_the_initial_checkpoint_makes_the_first_update_reversible(tmp_path: Path) -> None:
    from rollplane.rl.fleet_update import Checkpoint

    initial = write_weights(tmp_path, "v0")
    settings = [MockSettings(), MockSettings(faults=(FAILS_ONCE,))]
    known = FleetSettings(initial=Checkpoint(path=initial, version="v0"))
    async with (
        fleet_of(settings, fleet_settings=known) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url, attempts=1) as admin,
    ):
        with pytest.raises(EngineFailed):
            await admin.update_policy(write_weights(tmp_path, "v1"))
        assert fleet.workers[0].worker.version == "v0"
        assert fleet.workers[1].worker.version == "initial"
        assert await versions_of(client, 4) <= {"v0", "initial"}


async def test_world_sizes_are_said_for_every_worker_and_sum_up() -> None:
    async with fleet_of([MockSettings()] * 3) as fleet, AdminClient(fleet.frontend.url) as admin:
        assert [record.world_size for record in await admin.workers()] == [1, 1, 1]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{fleet.frontend.url}/get_world_size") as answer,
        ):
            assert (await answer.json())["world_size"] == 3
