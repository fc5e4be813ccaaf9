"""The fleet over real workers in this process: order of steps, deadlines, epochs, membership."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.rl.local_workers import LocalWorker
from tests.waiting import until

from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import Conflict, DeadlineExceeded, EngineFailed, NotFound, Unavailable
from rollplane.rl.base import OnFailure, Operation, PolicyAdmin
from rollplane.rl.fleet import Fleet, FleetSettings
from rollplane.rl.members import TRANSITIONS, Member


def weights(root: Path, name: str) -> str:
    path = root / name
    path.mkdir()
    (path / "mock_weights.json").write_text(f'{{"weights": "{name}"}}')
    return str(path)


@asynccontextmanager
async def fleet_of(
    *settings: MockSettings, fleet_settings: FleetSettings | None = None
) -> AsyncIterator[tuple[Fleet, list[LocalWorker]]]:
    fleet = Fleet(settings=fleet_settings, epoch=7)
    workers = [LocalWorker(f"http://w{i}", one) for i, one in enumerate(settings)]
    for worker in workers:
        await worker.start()
        fleet.add(worker)
    try:
        yield fleet, workers
    finally:
        await fleet.close()


def test_a_fleet_is_a_policy_admin() -> None:
    assert isinstance(Fleet(), PolicyAdmin)


def test_nothing_leaves_gone_and_fenced_never_becomes_current_by_itself() -> None:
    assert TRANSITIONS["gone"] == frozenset()
    assert "current" not in TRANSITIONS["fenced"]
    assert set(TRANSITIONS) == set().union(*TRANSITIONS.values())


async def test_the_line_of_a_fleet_says_where_it_stands() -> None:
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        assert repr(fleet) == "<Fleet initial epoch=7: 2 current>"
        assert repr(fleet.members[0]) == "<Member http://w0 current initial>"
        workers[0].cut()
        assert repr(fleet.members[0]) == "<Member http://w0 current unreachable initial>"
        assert [member.routable for member in fleet.members] == [False, True]
        await workers[0].mend()
        assert fleet.members[0].routable
        await fleet.pause()
        assert repr(fleet) == "<Fleet initial epoch=7: 2 current, held for pause>"


async def test_an_update_stages_on_all_before_it_pauses_any_and_applies_when_all_are_paused(tmp_path: Path) -> None:
    async with fleet_of(*[MockSettings()] * 3) as (fleet, workers):
        for worker in workers:
            worker.gates["stage"] = asyncio.Event()
            worker.gates["pause"] = asyncio.Event()
        update = asyncio.create_task(fleet.update_from_disk(weights(tmp_path, "v1")))
        await until(lambda: all(worker.operations for worker in workers))
        for worker in workers[:2]:
            worker.gates["stage"].set()
        await asyncio.sleep(0)
        assert all(name == "stage" for worker in workers for name, _ in worker.operations)
        assert fleet.held_for is None
        workers[2].gates["stage"].set()
        await until(lambda: all(worker.operations[-1][0] == "pause" for worker in workers))
        assert fleet.held_for == "policy update"
        workers[0].gates["pause"].set()
        workers[1].gates["pause"].set()
        await asyncio.sleep(0)
        assert not any(name == "update" for worker in workers for name, _ in worker.operations)
        workers[2].gates["pause"].set()
        report = await update
        assert report.policy_version == "v1"
        assert fleet.held_for is None
        assert [worker.worker.state for worker in workers] == ["ready"] * 3
        assert fleet.sequence is not None
        assert fleet.sequence.number("v1") == 1


async def test_every_command_carries_the_fleets_epoch_and_an_older_one_is_refused(tmp_path: Path) -> None:
    async with fleet_of(MockSettings()) as (fleet, (worker,)):
        await fleet.update_from_disk(weights(tmp_path, "v1"), operation=Operation(id="op"))
        named = [operation for _, operation in worker.operations if operation is not None]
        assert {operation.epoch for operation in named} == {7}
        assert worker.worker.epoch == 7
        with pytest.raises(Conflict, match="epoch 6"):
            await fleet.update_from_disk(weights(tmp_path, "v2"), operation=Operation(id="old", epoch=6))
        # A fleet that took over with a newer epoch: the old owner's commands are refused by the worker.
        worker.worker.epoch = 8
        with pytest.raises(Conflict, match="nothing changed"):
            await fleet.update_from_disk(str(tmp_path / "v1"), version="v3")


async def test_two_askings_of_one_operation_are_one_update(tmp_path: Path) -> None:
    path = weights(tmp_path, "v1")
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        one, two = await asyncio.gather(
            fleet.update_from_disk(path, operation=Operation(id="op")),
            fleet.update_from_disk(path, operation=Operation(id="op")),
        )
        assert one == two
        assert [worker.mock.calls("apply_weights") for worker in workers] == [1, 1]
        assert fleet.operation("op") == {"0": "done"}
        with pytest.raises(NotFound):
            fleet.operation("other")


async def test_a_failed_operation_says_why_when_it_is_asked_about(tmp_path: Path) -> None:
    async with fleet_of(MockSettings()) as (fleet, _):
        with pytest.raises(NotFound):
            await fleet.update_from_disk(str(tmp_path / "absent"), operation=Operation(id="op"))
        assert "nothing changed" in fleet.operation("op")["0"]


async def test_a_deadline_in_the_middle_leaves_no_worker_of_unknown_version_in_service(tmp_path: Path) -> None:
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        workers[1].gates["update"] = asyncio.Event()
        with pytest.raises(DeadlineExceeded):
            await fleet.update_from_disk(
                weights(tmp_path, "v1"), operation=Operation(id="op", deadline_s=2.0), on_failure="fence"
            )
        assert workers[0].worker.version == "v1"
        assert [member.state for member in fleet.members] == ["fenced", "current"]
        assert [worker.worker.state for worker in workers] == ["paused", "ready"]
        assert await fleet.policy_version() == "initial"
        assert workers[0].dropped
        # Asked for again, it is finished.
        workers[1].gates["update"].set()
        await fleet.update_from_disk(str(tmp_path / "v1"), operation=Operation(id="op"), on_failure="fence")
        assert [member.state for member in fleet.members] == ["current", "current"]
        assert [worker.worker.state for worker in workers] == ["ready", "ready"]
        assert await fleet.policy_version() == "v1"


async def test_a_worker_that_is_cut_off_during_an_update_is_fenced_and_the_rest_go_on(tmp_path: Path) -> None:
    async with fleet_of(*[MockSettings()] * 3) as (fleet, workers):
        workers[1].gates["update"] = asyncio.Event()
        update = asyncio.create_task(fleet.update_from_disk(weights(tmp_path, "v1"), on_failure="fence"))
        await until(lambda: workers[1].operations and workers[1].operations[-1][0] == "update")
        workers[1].cut()
        workers[1].gates["update"].set()
        assert (await update).policy_version == "v1"
        assert [member.state for member in fleet.members] == ["current", "fenced", "current"]
        assert [member.routable for member in fleet.members] == [True, False, True]


@pytest.mark.parametrize("on_failure", ["fence", "rollback"])
async def test_a_worker_that_was_fenced_unheard_returns_by_itself_once_it_is_heard(
    tmp_path: Path, on_failure: OnFailure
) -> None:
    """Fenced: it is brought to the new version. Rolled back before any checkpoint was known: it is as it was."""
    async with fleet_of(*[MockSettings()] * 2) as (fleet, workers):
        gate = "update" if on_failure == "fence" else "pause"
        workers[1].gates[gate] = asyncio.Event()
        update = asyncio.create_task(fleet.update_from_disk(weights(tmp_path, "v1"), on_failure=on_failure))
        await until(lambda: workers[1].operations and workers[1].operations[-1][0] == gate)
        workers[1].cut()
        workers[1].gates.pop(gate).set()
        await asyncio.gather(update, return_exceptions=True)
        assert fleet.members[1].state == "fenced"
        await workers[1].mend()
        await until(lambda: fleet.members[1].routable)
        assert {worker.worker.version for worker in workers} == {"v1" if on_failure == "fence" else "initial"}
        assert [worker.worker.state for worker in workers] == ["ready", "ready"]


async def test_a_command_that_was_given_up_unanswered_can_do_nothing_later(tmp_path: Path) -> None:
    """A stopped worker may carry out an update that the fleet has rolled back: its epoch is over by then."""
    async with fleet_of(*[MockSettings()] * 2) as (fleet, workers):
        await fleet.update_from_disk(weights(tmp_path, "v1"))
        workers[1].gates["update"] = asyncio.Event()
        second = weights(tmp_path, "v2")
        update = asyncio.create_task(fleet.update_from_disk(second))
        await until(lambda: workers[1].operations and workers[1].operations[-1][0] == "update")
        _, given_up = workers[1].operations[-1]
        workers[1].cut()
        workers[1].gates.pop("update").set()
        with pytest.raises(EngineFailed) as failed:
            await update
        details = failed.value.details or {}
        assert details["outcome"] == "rolled_back"
        ((url, reason),) = details["workers"].items()
        assert failed.value.message.endswith(f"; the first, {url}: {reason}")
        await workers[1].mend()
        await until(lambda: fleet.members[1].routable)
        # Also where it seems to be at the right version already.
        assert [name for name, _ in workers[1].operations][-2:] == ["update", "resume"]
        with pytest.raises(Conflict, match="epoch 8"):
            await workers[1].worker.update_from_disk(second, version="v2", operation=given_up)
        assert await fleet.policy_version() == "v1"


@pytest.mark.parametrize("call", ["pause", "resume", "set_version"])
async def test_a_pause_resume_or_label_that_was_given_up_unanswered_can_do_nothing_later(call: str) -> None:
    """It arrives after the worker was asked again: neither stops one that serves nor starts one that is to rest."""
    async with fleet_of(*[MockSettings()] * 2) as (fleet, workers):
        far = workers[1]
        if call == "resume":
            await fleet.pause()
        far.gates[call] = asyncio.Event()
        asked: dict[str, Any] = {
            "pause": fleet.pause, "resume": fleet.resume, "set_version": lambda: fleet.set_policy_version("v9")
        }  # fmt: skip
        running = asyncio.create_task(asked[call]())
        await until(lambda: far.operations and far.operations[-1][0] == call)
        _, given_up = far.operations[-1]
        assert given_up is not None
        far.cut()
        far.gates.pop(call).set()
        with pytest.raises(EngineFailed, match="cut off"):
            await running
        assert workers[0].worker.state == "ready"

        await far.mend()
        await until(lambda: fleet.members[1].state == "current" and not fleet.members[1].unsteady)
        assert (far.worker.state, far.worker.epoch) == ("ready", 8)
        late: dict[str, Any] = {
            "pause": far.worker.pause, "resume": far.worker.resume,
            "set_version": lambda *, epoch: far.worker.set_policy_version("late", epoch=epoch),
        }  # fmt: skip
        if call == "resume":
            await fleet.pause()
        with pytest.raises(Conflict, match="epoch 7, this worker follows epoch 8"):
            await late[call](epoch=given_up.epoch)
        assert far.worker.state == ("paused" if call == "resume" else "ready")
        assert far.worker.version != "late"


async def test_an_update_whose_pause_was_not_answered_resumes_in_a_new_epoch(tmp_path: Path) -> None:
    async with fleet_of(*[MockSettings()] * 2) as (fleet, workers):
        far = workers[1]
        far.gates["pause"] = asyncio.Event()
        update = asyncio.create_task(fleet.update_from_disk(weights(tmp_path, "v1")))
        await until(lambda: far.operations and far.operations[-1][0] == "pause")
        far.cut()
        far.gates.pop("pause").set()
        with pytest.raises(EngineFailed):
            await update
        await far.mend()
        await until(lambda: fleet.members[1].routable)

        assert [worker.worker.epoch for worker in workers] == [8, 8]
        with pytest.raises(Conflict, match="epoch 7"):
            await far.worker.pause(epoch=7)
        assert [worker.worker.state for worker in workers] == ["ready", "ready"]


async def test_a_fenced_worker_that_restarts_is_brought_up_to_date(tmp_path: Path) -> None:
    failing = MockSettings(faults=(Fault(kind="fail", operation="apply_weights"),))
    async with fleet_of(MockSettings(), failing) as (fleet, workers):
        await fleet.update_from_disk(weights(tmp_path, "v1"), on_failure="fence")
        assert fleet.members[1].state == "fenced"
        workers[1].settings = MockSettings()
        async with asyncio.timeout(10):
            await workers[1].restart()
            while not fleet.members[1].routable:
                await fleet.changed.wait()
        assert workers[1].worker.version == "v1"


async def test_a_worker_of_another_model_is_refused_by_name() -> None:
    async with fleet_of(MockSettings(), MockSettings(max_model_len=128)) as (fleet, _):
        member = fleet.members[1]
        assert member.state == "fenced"
        assert member.reason == "it does not belong to this fleet: its max_model_len is 128, the fleet's 4096"
        assert fleet.info.max_model_len == 4096


async def test_a_pause_that_one_worker_refuses_pauses_none() -> None:
    failing = MockSettings(faults=(Fault(kind="fail", operation="pause"),))
    async with fleet_of(MockSettings(), failing) as (fleet, workers):
        with pytest.raises(EngineFailed, match="http://w1"):
            await fleet.pause()
        assert [worker.worker.state for worker in workers] == ["ready", "ready"]
        assert not fleet.paused


async def test_a_label_moves_no_weights_and_joins_the_order_of_versions() -> None:
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        await fleet.set_policy_version("step-1")
        assert await fleet.policy_version() == "step-1"
        assert [worker.mock.calls("apply_weights") for worker in workers] == [0, 0]
        assert fleet.sequence is not None
        assert fleet.sequence.at_least("step-1", "initial")


async def test_a_fleet_without_workers_says_so(tmp_path: Path) -> None:
    fleet = Fleet()
    for call in (
        fleet.pause(),
        fleet.resume(),
        fleet.policy_version(),
        fleet.update_from_disk(weights(tmp_path, "v1")),
    ):
        with pytest.raises(Unavailable, match="there are no workers"):
            await call
    assert await fleet.workers() == []


async def test_members_follow_the_list_of_addresses() -> None:
    fleet = Fleet()
    made: list[str] = []

    def make(url: str) -> LocalWorker:
        made.append(url)
        return LocalWorker(url)

    fleet.set_workers(["http://a", "http://b/"], make)
    first = fleet.members
    fleet.set_workers(["http://b", "http://c"], make)
    assert made == ["http://a", "http://b", "http://c"]
    assert [member.url for member in fleet.members] == ["http://b", "http://c"]
    assert fleet.members[0] is first[1]
    assert first[0].state == "gone"
    with pytest.raises(Conflict, match="member already"):
        fleet.add(LocalWorker("http://c"))
    await fleet.close()


async def test_records_show_why_a_worker_takes_no_requests() -> None:
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        workers[1].cut()
        records = await fleet.workers()
        assert records[0].error is None
        assert records[1].error is not None
        assert (records[1].model, records[1].world_size, records[1].state) == ("mock", 1, "failed")
        assert Member(LocalWorker("http://new")).reason == "not reached yet"


async def test_a_worker_whose_engine_is_stuck_takes_no_request_until_it_moves() -> None:
    """Its process answers every probe: what it tells of its progress is what counts."""
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        member = fleet.members[1]
        tell = workers[1].state
        assert tell is not None

        def says(**health: Any) -> None:
            workers[1].state = msgspec.structs.replace(tell, health=msgspec.structs.replace(tell.health, **health))

        says(running=1, last_progress_s=121.0)
        assert not member.routable
        error = (await fleet.workers())[1].error
        assert error is not None
        assert "no progress for 121.0 s; the limit is 120 s" in error
        for fine in ({"running": 1, "last_progress_s": 119.0}, {"running": 0, "last_progress_s": 999.0}):
            says(**fine)
            assert member.routable


async def test_a_fenced_worker_that_cannot_stage_does_not_keep_the_others_from_an_update(tmp_path: Path) -> None:
    dying = MockSettings(faults=(Fault(kind="die", operation="apply_weights"),))
    async with fleet_of(MockSettings(), dying) as (fleet, _):
        await fleet.update_from_disk(weights(tmp_path, "v1"), on_failure="fence")
        assert [member.state for member in fleet.members] == ["current", "fenced"]
        await fleet.update_from_disk(weights(tmp_path, "v2"))
        assert await fleet.policy_version() == "v2"
        assert [member.state for member in fleet.members] == ["current", "fenced"]


async def test_a_worker_that_joins_during_an_update_takes_no_request_before_it_is_current(tmp_path: Path) -> None:
    async with fleet_of(MockSettings()) as (fleet, (worker,)):
        worker.gates["update"] = asyncio.Event()
        update = asyncio.create_task(fleet.update_from_disk(weights(tmp_path, "v1")))
        await until(lambda: worker.operations and worker.operations[-1][0] == "update")
        late = LocalWorker("http://late")
        late.gates["update"] = asyncio.Event()
        await late.start()
        member = fleet.add(late)
        assert fleet.held_for is not None
        worker.gates["update"].set()
        await update
        assert (member.state, member.routable) == ("joining", False)
        late.gates["update"].set()
        async with asyncio.timeout(10):
            while not member.routable:
                await fleet.changed.wait()
        assert late.worker.version == "v1"
