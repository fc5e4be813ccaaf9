"""Native updates and sleep as parts of the policy table: what meets them half-way, and what they leave when they fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rl.test_fleet import weights

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import Conflict, DeadlineExceeded, EngineDied, EngineFailed, Unavailable
from rollplane.rl.base import Operation
from rollplane.testing import answer, make_request
from rollplane.worker import Worker

PART = {"names": ["w"]}


@asynccontextmanager
async def started(*faults: Fault) -> AsyncIterator[Worker]:
    worker = Worker(MockEngine(MockSettings(transfer_backend="mock", sleep_mode=True, faults=faults)))
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


async def opened(worker: Worker, *, deadline_s: float = 60.0) -> None:
    await worker.init_weight_transfer({})
    await worker.start_weight_update(operation=Operation(deadline_s=deadline_s))


async def serves(worker: Worker) -> list[tuple[str, int | None]]:
    return (await answer(worker, make_request(max_tokens=1))).choices[0].policy_versions


async def test_the_line_says_where_it_stands() -> None:
    async with started() as worker:
        assert repr(worker.native) == "<NativeControl mock, not joined>"
        await opened(worker)
        assert repr(worker.native) == "<NativeControl mock, open>"
        await worker.finish_weight_update("v1")
        await worker.sleep()
        assert repr(worker.native) == "<NativeControl mock, joined, asleep>"


async def test_nothing_else_changes_the_policy_between_a_start_and_its_finish(tmp_path: Path) -> None:
    async with started() as worker:
        await opened(worker)
        for call in (
            worker.update_from_disk(weights(tmp_path, "v9")),
            worker.set_policy_version("v9"),
            worker.resume(),
            worker.sleep(),
            worker.start_weight_update(),
        ):
            with pytest.raises(Conflict, match="open"):
                await call
        with pytest.raises(Conflict, match="cannot pause while the worker is receiving"):
            await worker.pause()
        await worker.update_weights(PART)
        await worker.finish_weight_update("v1")

        assert await serves(worker) == [("v1", 0)]
        assert (await worker.update_from_disk(weights(tmp_path, "v2"))).policy_version == "v2"


async def test_a_name_is_made_up_that_no_version_had() -> None:
    async with started() as worker:
        await worker.set_policy_version("update-1")
        for expected in ("update-2", "update-3"):
            await opened(worker)
            assert (await worker.finish_weight_update()).policy_version == expected


@pytest.mark.parametrize(("restores", "state"), [(True, "ready"), (False, "failed")])
async def test_a_step_that_outlives_the_updates_deadline_is_called_off(restores: bool, state: str) -> None:
    """An engine that does not say that the old weights are back has weights that nobody knows."""
    async with started() as worker:
        native = worker.native
        assert native is not None

        async def hangs(_: dict[str, Any]) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if restores:
                    raise EngineFailed("called off; the old weights serve") from None
                raise

        native.transfer.update = hangs  # type: ignore[method-assign]
        await opened(worker, deadline_s=0.5)
        with pytest.raises(EngineFailed if restores else DeadlineExceeded):
            await worker.update_weights(PART)

        assert worker.state == state
        assert worker.version == "initial"
        if restores:
            assert await serves(worker) == [("initial", 0)]
            return
        with pytest.raises(Unavailable, match="of unknown version"):
            await serves(worker)
        await opened(worker)
        assert (await worker.finish_weight_update("v1")).policy_version == "v1"
        await worker.resume()
        assert await serves(worker) == [("v1", 0)]


async def test_an_engine_that_dies_in_a_step_serves_nothing() -> None:
    async with started(Fault(kind="die", operation="transfer_update")) as worker:
        await opened(worker)
        with pytest.raises(EngineDied):
            await worker.update_weights(PART)

        assert (worker.state, (await worker.health()).alive) == ("failed", False)


async def test_a_sleep_or_a_waking_that_fails_half_way_leaves_it_asleep_until_one_succeeds() -> None:
    failing = [Fault(kind="fail", operation="sleep"), Fault(kind="fail", operation="wake_up")]
    async with started(*failing) as worker:
        with pytest.raises(EngineFailed):
            await worker.sleep()
        assert worker.state == "asleep"
        with pytest.raises(EngineFailed):
            await worker.wake_up()
        assert worker.state == "asleep"
        with pytest.raises(Unavailable, match="asleep"):
            await serves(worker)
        assert (await worker.wake_up()).was_sleeping

        assert await serves(worker) == [("initial", 0)]


async def test_a_pause_while_asleep_is_kept_when_it_wakes() -> None:
    async with started() as worker:
        await worker.sleep()
        assert (await worker.pause()).already_paused
        await worker.wake_up()

        assert worker.state == "paused"
        await worker.resume()
        assert await serves(worker) == [("initial", 0)]


async def test_an_update_of_an_engine_asleep_waits_for_its_waking(tmp_path: Path) -> None:
    async with started() as worker:
        await worker.sleep()
        path = weights(tmp_path, "v1")
        await worker.init_weight_transfer({})
        for call in (worker.update_from_disk(path), worker.start_weight_update()):
            with pytest.raises(Conflict, match="wake it up first"):
                await call
        await worker.wake_up()
        await worker.update_from_disk(path)

        assert await serves(worker) == [("v1", 0)]
