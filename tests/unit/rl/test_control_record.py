"""What outlives a control owner, and what the next one does with it."""

import asyncio
from pathlib import Path

import pytest
from tests.unit.rl.local_workers import LocalWorker
from tests.unit.rl.test_fleet import weights
from tests.waiting import until

from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import Conflict, InvalidRequest, Unavailable
from rollplane.rl.control_record import ControlRecord, RecordFile
from rollplane.rl.fleet import Fleet
from rollplane.rl.fleet_update import Checkpoint

RECORD = ControlRecord(epoch=3, checkpoint=Checkpoint(path="/w", version="v1", digest="d"), versions=["v0", "v1"])


async def started(*settings: MockSettings) -> list[LocalWorker]:
    workers = [LocalWorker(f"http://w{i}", one) for i, one in enumerate(settings)]
    for worker in workers:
        await worker.start()
    return workers


async def routable(fleet: Fleet) -> None:
    async with asyncio.timeout(10):
        while not all(member.routable for member in fleet.members):
            await fleet.changed.wait()


def test_a_record_reads_back_and_has_one_owner(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "fleet.json")
    assert file.open() is None
    file.write(RECORD)
    with pytest.raises(Conflict, match="another process owns"):
        RecordFile(tmp_path / "fleet.json").open()
    file.close()
    file.close()
    with pytest.raises(Unavailable, match="not open"):
        file.write(RECORD)
    again = RecordFile(tmp_path / "fleet.json")
    assert again.open() == RECORD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fleet.json", "fleet.json.lock"]
    again.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"epoch": 1, "surprise": 2}', '{"epoch": "1"}'])
def test_a_file_that_is_no_record_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="no control record"):
        RecordFile(path).open()
    assert path.read_text() == text


def test_a_record_that_cannot_be_kept_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be kept"):
        RecordFile(tmp_path / "absent" / "fleet.json").open()


async def test_the_next_owner_has_a_higher_epoch_the_same_checkpoint_and_the_same_order_of_versions(
    tmp_path: Path,
) -> None:
    (worker,) = await started(MockSettings())
    path = tmp_path / "fleet.json"
    first = Fleet(epoch=7, record=RecordFile(path))
    first.add(worker)
    for name in ("zeta", "alpha"):
        await first.update_from_disk(weights(tmp_path, name))
    checkpoint = first.checkpoint
    await first.close()
    second = Fleet(epoch=1, record=RecordFile(path))
    assert second.epoch == 8
    assert second.checkpoint == checkpoint
    assert second.sequence is not None
    assert [second.sequence.number(name) for name in ("initial", "zeta", "alpha")] == [0, 1, 2]
    await second.close()


async def test_a_stale_worker_is_not_taken_for_current_by_the_next_owner(tmp_path: Path) -> None:
    failing = MockSettings(faults=(Fault(kind="fail", operation="apply_weights"),))
    workers = await started(MockSettings(), failing)
    path = tmp_path / "fleet.json"
    first = Fleet(record=RecordFile(path))
    for worker in workers:
        first.add(worker)
    await first.update_from_disk(weights(tmp_path, "v1"), on_failure="fence")
    assert [worker.worker.version for worker in workers] == ["v1", "initial"]
    assert workers[1].worker.state == "paused"
    assert first._record is not None
    first._record.close()  # as the end of the process does

    second = Fleet(record=RecordFile(path))
    workers[1].gates["update"] = asyncio.Event()
    for worker in workers:
        second.add(worker)
    assert [member.routable for member in second.members] == [True, False]
    workers[1].gates["update"].set()
    await routable(second)
    assert [worker.worker.version for worker in workers] == ["v1", "v1"]
    await second.close()


async def test_workers_that_an_owner_left_paused_in_the_middle_of_an_update_serve_under_the_next(
    tmp_path: Path,
) -> None:
    workers = await started(MockSettings(), MockSettings())
    path = tmp_path / "fleet.json"
    first = Fleet(record=RecordFile(path))
    for worker in workers:
        first.add(worker)
    await first.update_from_disk(weights(tmp_path, "v1"))
    for worker in workers:
        worker.gates["update"] = asyncio.Event()
    update = asyncio.create_task(first.update_from_disk(weights(tmp_path, "v2")))
    await until(lambda: all(worker.operations[-1][0] == "update" for worker in workers))
    assert [worker.worker.state for worker in workers] == ["paused", "paused"]
    left = path.read_bytes()  # what a process that is killed now leaves behind

    other = tmp_path / "taken over"
    other.write_bytes(left)
    second = Fleet(record=RecordFile(other))
    for worker in workers:
        copy = LocalCopy(worker)
        await copy.refresh()
        second.add(copy)
    await routable(second)
    assert [worker.worker.version for worker in workers] == ["v1", "v1"]
    assert [worker.worker.state for worker in workers] == ["ready", "ready"]
    update.cancel()
    await asyncio.gather(update, return_exceptions=True)
    for worker in workers:
        worker.gates["update"].set()
    await first.close()
    await second.close()


async def test_a_fleet_that_was_paused_is_still_held_by_the_next_owner(tmp_path: Path) -> None:
    (worker,) = await started(MockSettings())
    path = tmp_path / "fleet.json"
    first = Fleet(record=RecordFile(path))
    first.add(worker)
    await first.pause()
    assert first._record is not None
    first._record.close()
    second = Fleet(record=RecordFile(path))
    second.add(worker)
    assert second.held_for == "pause"
    await second.resume()
    assert second.held_for is None
    assert second.members[0].routable
    await second.close()


class LocalCopy(LocalWorker):
    """The same worker, reached by another owner: its gates do not hold this one."""

    def __init__(self, worker: LocalWorker) -> None:
        super().__init__(worker.url, worker.settings)
        self.mock, self.worker = worker.mock, worker.worker
        self.state, self.reachable = worker.state, True
