"""Adapters of a fleet: whoever was away during a change has the fleet's contents before it serves, or nothing."""

from pathlib import Path

import pytest
from tests.unit.rl.local_workers import LocalWorker, write_adapter
from tests.unit.rl.test_fleet import fleet_of
from tests.waiting import until

from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import Conflict, EngineFailed
from rollplane.rl.control_record import RecordFile
from rollplane.rl.fleet import Fleet, FleetSettings

QUICK = FleetSettings(retry_s=0.01)


def loaded(worker: LocalWorker) -> dict[str, str]:
    assert worker.state is not None
    return {record.name: record.digest for record in worker.state.adapters if record.state == "ready"}


async def test_a_worker_that_was_away_during_a_reload_gets_the_new_contents_before_it_serves(tmp_path: Path) -> None:
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        await fleet.load_adapter("tuned", write_adapter(tmp_path, "a1", value=1))
        workers[1].cut()
        record = await fleet.load_adapter("tuned", write_adapter(tmp_path, "a2", value=2))
        assert loaded(workers[1])["tuned"] != record.digest
        await workers[1].mend()
        assert not fleet.members[1].routable  # it has the name, with the contents of before
        await until(lambda: fleet.members[1].routable)
        assert loaded(workers[1]) == {"tuned": record.digest}


async def test_a_worker_that_was_away_during_an_unload_drops_it_before_it_serves(tmp_path: Path) -> None:
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        await fleet.load_adapter("tuned", write_adapter(tmp_path, "a1", value=1))
        workers[1].cut()
        await fleet.unload_adapter("tuned")
        await workers[1].mend()
        assert not fleet.members[1].routable
        await until(lambda: fleet.members[1].routable)
        assert loaded(workers[1]) == {}
        # The name may be used again.
        await fleet.load_adapter("tuned", write_adapter(tmp_path, "a2", value=2))
        assert [set(loaded(worker)) for worker in workers] == [{"tuned"}, {"tuned"}]
        assert all(member.routable for member in fleet.members)


async def test_a_joiner_gets_policy_and_adapters_and_refuses_files_that_changed_since(tmp_path: Path) -> None:
    async with fleet_of(MockSettings(), fleet_settings=QUICK) as (fleet, _):
        path = write_adapter(tmp_path, "a1", value=1)
        first = await fleet.load_adapter("tuned", path)
        late = LocalWorker("http://late")
        await late.start()
        member = fleet.add(late)
        assert not member.routable
        await until(lambda: member.routable)
        assert loaded(late) == {"tuned": first.digest}
        write_adapter(tmp_path, "a1", value=9)
        later = LocalWorker("http://later")
        await later.start()
        member = fleet.add(later)
        await until(lambda: "have changed since the fleet loaded them" in (member.reason or ""))
        assert not member.routable
        # Loaded again, they are the fleet's.
        second = await fleet.load_adapter("tuned", path)
        await until(lambda: member.routable)
        assert loaded(later) == loaded(late) == {"tuned": second.digest}


async def test_a_worker_that_could_not_go_back_is_brought_back_by_itself(tmp_path: Path) -> None:
    """One load fails, and on the worker where it succeeded the unloading fails too."""
    refusing = MockSettings(faults=(Fault(kind="fail", operation="load_adapter"),))
    async with fleet_of(MockSettings(), refusing, fleet_settings=QUICK) as (fleet, workers):
        gone = workers[0].worker.unload_adapter
        tries = 0

        async def unload(name: str, *, operation: object = None) -> object:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise EngineFailed("not now")
            return await gone(name)

        workers[0].worker.unload_adapter = unload  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineFailed):
            await fleet.load_adapter("tuned", write_adapter(tmp_path, "a1", value=1))
        assert not fleet.members[0].routable
        await until(lambda: fleet.members[0].routable)
        assert loaded(workers[0]) == {}
        assert tries == 2


async def test_the_next_owner_knows_contents_and_what_was_dropped(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    fleet = Fleet(epoch=1, record=RecordFile(path))
    worker = LocalWorker("http://w0")
    await worker.start()
    fleet.add(worker)
    kept = await fleet.load_adapter("kept", write_adapter(tmp_path, "a1", value=1))
    await fleet.load_adapter("gone", write_adapter(tmp_path, "a2", value=2))
    await fleet.unload_adapter("gone")
    await fleet.close()
    after = Fleet(epoch=1, record=RecordFile(path))
    assert after.adapter_digests == {"kept": kept.digest}
    assert list(after.dropped_adapters) == ["gone"]
    await after.close()


async def test_workers_that_read_different_files_at_one_path_are_refused_and_go_back(tmp_path: Path) -> None:
    async with fleet_of(MockSettings(), MockSettings()) as (fleet, workers):
        first = await fleet.load_adapter("tuned", write_adapter(tmp_path, "a1", value=1.0))
        other = write_adapter(tmp_path, "other", value=3.0)
        load = workers[1].worker.load_adapter

        async def elsewhere(name: str, path: str, *, operation: object = None) -> object:
            return await load(name, other if path.endswith("a2") else path)

        workers[1].worker.load_adapter = elsewhere  # type: ignore[method-assign, assignment]
        with pytest.raises(Conflict, match="read different contents") as refused:
            await fleet.load_adapter("tuned", write_adapter(tmp_path, "a2", value=2.0))
        assert set((refused.value.details or {})["digests"]) == {"http://w0", "http://w1"}
        assert loaded(workers[0]) == loaded(workers[1]) == {"tuned": first.digest}
        assert all(member.routable for member in fleet.members)
