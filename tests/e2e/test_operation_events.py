"""Operations followed over HTTP: as they run, from their middle, after their end, on a fleet and on a worker."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.fleets import MockWorker, fleet_of, write_weights

from rollplane.client.admin import AdminClient
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import EngineFailed, NotFound
from rollplane.protocol.admin import OperationEvent


async def test_an_update_is_followed_while_it_runs_and_after_its_end(tmp_path: Path) -> None:
    async with (
        fleet_of([MockSettings(stage_s=0.05, apply_s=0.05)] * 3) as fleet,
        AdminClient(fleet.frontend.url) as admin,
    ):
        seen: list[OperationEvent] = []
        staged = asyncio.Event()

        async def follow() -> None:
            async for event in admin.operation_events("run/step 7", wait_s=20.0):
                seen.append(event)
                if event.phase == "stage":
                    staged.set()

        following = asyncio.create_task(follow())  # before the operation begins
        update = asyncio.create_task(admin.update_policy(write_weights(tmp_path, "v1"), operation_id="run/step 7"))
        await asyncio.wait_for(staged.wait(), 20)
        assert not update.done()
        await update
        await asyncio.wait_for(following, 20)
        assert [event.number for event in seen] == list(range(1, len(seen) + 1))
        assert [event.phase for event in seen if event.event == "phase"] == [
            *("stage", "gate", "pause", "apply", "settle", "open")
        ]
        urls = {worker.url for worker in fleet.workers}
        assert {event.worker for event in seen if event.phase == "apply" and event.event == "worker"} == urls
        assert seen[-1].report is not None
        assert set(seen[-1].report["workers"]) == urls
        # Afterwards: all of it at once, or what came after an event.
        assert [event async for event in admin.operation_events("run/step 7")] == seen
        assert [event async for event in admin.operation_events("run/step 7", after=5)] == seen[5:]
        assert [event async for event in admin.operation_events("run/step 7", after=10**6)] == []
        assert await admin.operation("run/step 7") == {"0": "done"}


async def test_a_failed_update_ends_its_events_with_the_error(tmp_path: Path) -> None:
    failing = MockSettings(faults=(Fault(kind="fail", operation="apply_weights"),))
    async with fleet_of([MockSettings(), failing]) as fleet, AdminClient(fleet.frontend.url) as admin:
        with pytest.raises(EngineFailed) as failed:
            await admin.update_policy(write_weights(tmp_path, "v1"), operation_id="op")
        *_, last = [event async for event in admin.operation_events("op")]
        assert (last.event, last.error, last.code) == ("failed", failed.value.message, failed.value.code)
        assert last.details == failed.value.details
        assert await admin.operation("op") == {"0": failed.value.message}


async def test_an_operation_that_nobody_began_is_a_404_once_the_wait_is_over() -> None:
    async with fleet_of([MockSettings()]) as fleet, AdminClient(fleet.frontend.url) as admin:
        for wait_s in (0.0, 0.1):
            with pytest.raises(NotFound, match="no operation 'op'"):
                async for _ in admin.operation_events("op", wait_s=wait_s):
                    pass
        async with aiohttp.ClientSession() as session:
            for query in ("after=-1", "after=x", "wait_s=2.1", "wait_s=nan", "wait_s=x"):
                async with session.get(f"{fleet.frontend.url}/v1/rl/operations/op/events?{query}") as answer:
                    assert answer.status == 400, query
                    assert (await answer.json())["error"]["param"] == query.partition("=")[0]


async def test_a_reader_that_lost_its_connection_goes_on_where_it_was(tmp_path: Path) -> None:
    """As browsers' EventSource does it: the last id it saw, in a header."""
    async with fleet_of([MockSettings()]) as fleet, AdminClient(fleet.frontend.url) as admin:
        await admin.update_policy(write_weights(tmp_path, "v1"), operation_id="op")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{fleet.frontend.url}/v1/rl/operations/op/events", headers={"Last-Event-ID": "3"}) as answer,
        ):
            text = await answer.text()
        assert answer.content_type == "text/event-stream"
        assert text.startswith("id: 4\nevent: ")
        assert text.endswith("data: [DONE]\n\n")


async def test_a_reader_that_leaves_is_let_go_and_the_operation_goes_on(tmp_path: Path) -> None:
    async with fleet_of([MockSettings(apply_s=0.3)]) as fleet, AdminClient(fleet.frontend.url) as admin:
        update = asyncio.create_task(admin.update_policy(write_weights(tmp_path, "v1"), operation_id="op"))
        events = admin.operation_events("op")
        assert (await anext(events)).event == "began"
        await events.aclose()
        assert (await update).applied


async def test_a_worker_alone_tells_of_its_operations_too(tmp_path: Path) -> None:
    worker = MockWorker(MockSettings())
    await worker.start()
    try:
        async with AdminClient(worker.url) as admin:
            await admin.update_policy(write_weights(tmp_path, "v1"), operation_id="op")
            events = [event async for event in admin.operation_events("op")]
            assert [event.event for event in events] == ["began", "done"]
            assert await admin.operation("op") == {"0": "done"}
    finally:
        await worker.kill()
