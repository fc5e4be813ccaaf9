"""What is kept of operations: in order, bounded, and for whoever comes late."""

import asyncio

import pytest
from tests.unit.rl.local_workers import LocalWorker
from tests.unit.rl.test_fleet import fleet_of, weights
from tests.waiting import until

from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import Conflict, EngineFailed, InvalidRequest
from rollplane.protocol.admin import OperationEvent
from rollplane.rl.base import Operation
from rollplane.rl.fleet import Fleet
from rollplane.rl.operation_log import MAX_EVENTS, MAX_LOGS, MAX_WHOLE, OperationLog, OperationLogs
from rollplane.rl.operations import Operations


def kinds(log: OperationLog) -> list[str]:
    return [event.event for event in log.since(0)]


def test_events_are_numbered_and_those_after_one_are_found() -> None:
    log = OperationLog("op")
    log.began(0, "policy update")
    tell = log.teller(0)
    tell("stage")
    tell("stage", worker="http://w0", seconds=0.25)
    tell("apply", worker="http://w1", error=EngineFailed("no"))
    assert log.running
    log.done(0, {"applied": True})
    assert [event.number for event in log.since(0)] == [1, 2, 3, 4, 5]
    assert kinds(log) == ["began", "phase", "worker", "worker", "done"]
    assert log.since(3) == log.since(0)[3:]
    assert log.since(3)[0].error == "no"
    assert (log.running, log.outcomes) == (False, {0: "done"})
    assert repr(log) == "<OperationLog op 5 events, ended>"


def test_a_step_that_failed_may_begin_again_and_the_log_goes_on() -> None:
    log = OperationLog("op")
    log.began(0, "policy update")
    log.failed(0, Conflict("not now", details={"a": 1}))
    assert log.outcomes == {0: "not now"}
    log.began(0, "policy update")
    assert log.running
    log.done(0, None)
    assert kinds(log) == ["began", "failed", "began", "done"]
    failed = log.since(1)[0]
    assert (failed.error, failed.code, failed.details) == ("not now", "conflict", {"a": 1})


def test_an_operation_runs_while_one_of_its_steps_does() -> None:
    log = OperationLog("op")
    log.began(0, "load")
    log.began(1, "load")
    log.done(0, None)
    assert log.running
    log.done(1, None)
    assert not log.running


def test_what_is_kept_is_bounded() -> None:
    log = OperationLog("op")
    tell = log.teller(0)
    for _ in range(MAX_EVENTS + 10):
        tell("stage")
    assert [log.since(0)[0].number, len(log.since(0))] == [11, MAX_EVENTS]
    logs = OperationLogs()
    for i in range(MAX_LOGS + 50):
        one = logs.open(f"op-{i}")
        one.began(0, "policy update")
        one.done(0, None)
    kept = [found for i in range(MAX_LOGS + 50) if (found := logs.find(f"op-{i}")) is not None]
    assert len(kept) <= MAX_LOGS + 1
    assert kinds(kept[0]) == ["done"]
    assert sum(len(found.since(0)) == 2 for found in kept) <= MAX_WHOLE + 1
    # One that runs is never let go.
    logs.open("long").began(0, "policy update")
    for i in range(MAX_LOGS + 50):
        one = logs.open(f"later-{i}")
        one.began(0, "x")
        one.done(0, None)
    assert logs.find("long") is not None


async def test_an_update_of_a_fleet_tells_every_phase_on_every_worker(tmp_path: object) -> None:
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, _):
        await fleet.update_from_disk(weights(tmp_path, "v1"), operation=Operation(id="op"))  # type: ignore[arg-type]
        events = await events_of(fleet, "op")
        assert [event.phase for event in events if event.event == "phase"] == [
            *("stage", "gate", "pause", "apply", "settle", "open")
        ]
        for phase in ("stage", "pause", "apply", "settle"):
            told = {event.worker for event in events if event.event == "worker" and event.phase == phase}
            assert told == {"http://w0", "http://w1"}, phase
        assert not any(event.error for event in events)
        assert [events[0].event, events[-1].event] == ["began", "done"]
        assert events[0].what == "policy update of the fleet"
        assert events[-1].report is not None
        assert events[-1].report["policy_version"] == "v1"


async def test_a_failed_update_tells_which_worker_failed_at_what_and_how_it_ended(tmp_path: object) -> None:
    failing = MockSettings(faults=(Fault(kind="fail", operation="apply_weights"),))
    async with fleet_of(MockSettings(), failing) as (fleet, _):
        with pytest.raises(EngineFailed):
            await fleet.update_from_disk(weights(tmp_path, "v1"), operation=Operation(id="op"))  # type: ignore[arg-type]
        events = await events_of(fleet, "op")
        failures = [(event.phase, event.worker) for event in events if event.event == "worker" and event.error]
        assert ("apply", "http://w1") in failures
        assert events[-1].event == "failed"
        assert events[-1].details is not None
        assert events[-1].details["outcome"] == "rolled_back"
        assert fleet.operation("op") == {"0": events[-1].error}


async def test_an_operation_that_was_cancelled_says_so() -> None:
    operations = Operations()
    run = asyncio.create_task(operations.run(Operation(id="op"), (), lambda: asyncio.sleep(3600), what="policy update"))
    await until(lambda: operations.status("op") == {0: "running"})
    await operations.close()
    await asyncio.gather(run, return_exceptions=True)
    assert operations.status("op") == {0: "the policy update was cancelled"}


async def events_of(fleet: Fleet, operation_id: str) -> list[OperationEvent]:
    log = fleet.operation_logs.find(operation_id)
    assert log is not None
    await until(lambda: not log.running)
    return log.since(0)


async def test_adapters_are_told_of_like_policies(tmp_path: object) -> None:
    worker = LocalWorker("http://w0")
    await worker.start()
    fleet = Fleet(epoch=1)
    fleet.add(worker)
    try:
        with pytest.raises(InvalidRequest):
            await fleet.load_adapter("", str(tmp_path), operation=Operation(id="op"))
        events = await events_of(fleet, "op")
        assert [(event.event, event.phase) for event in events] == [
            *(("began", None), ("phase", "load"), ("worker", "load"), ("failed", None))
        ]
    finally:
        await fleet.close()
