"""Native weight transfer and sleep over `vllm.Control`, against a mock server that has them. No weights move here."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.mock_server import MockVllmServer
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import Conflict, EngineFailed, InvalidRequest, Unavailable
from rollplane.testing import answer, make_request

JOIN = {"master_address": "127.0.0.1", "master_port": 29_500, "rank_offset": 1, "world_size": 2}
PART = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]]}


@asynccontextmanager
async def running(**server: Any) -> AsyncIterator[tuple[GrpcEngine, MockVllmServer]]:
    served = MockVllmServer(MockEngine(MockSettings(vocab_tokens=1024)), **server)
    await served.start()
    engine = GrpcEngine(GrpcSettings(endpoint=f"127.0.0.1:{served.port}", vocab_size=1024))
    try:
        await engine.start()
        yield engine, served
    finally:
        await engine.close()
        await served.stop()


async def test_a_backend_is_offered_where_the_server_reports_it() -> None:
    async with running(transfer_backend="nccl") as (engine, _):
        assert engine.info.capabilities.weight_transfer == ["nccl"]
    async with running() as (engine, _):
        assert engine.info.capabilities.weight_transfer == []


async def test_an_update_carries_the_backends_own_objects_and_names_the_weights_last() -> None:
    async with running(transfer_backend="nccl") as (engine, server):
        await engine.init_weight_transfer(JOIN)
        await engine.pause("keep")
        await engine.start_weight_update()
        await engine.update_weights(PART)

        assert (engine.policy_version, server.engine.policy_version) == ("initial", "initial")  # type: ignore[attr-defined]

        await engine.finish_weight_update("v1")
        report = await engine.resume()

        assert server.transfer.seen == [
            ("InitWeightTransferEngine", JOIN),
            ("StartWeightUpdate", None),
            ("UpdateWeights", PART),
            ("FinishWeightUpdate", "v1"),
        ]
        assert (report.policy_version, await engine.control.weight_version()) == ("v1", "v1")
        found = await answer(engine, make_request(max_tokens=2))
        assert found.choices[0].policy_versions == [("v1", 0)]


async def test_an_update_starts_only_while_paused() -> None:
    async with running(transfer_backend="nccl") as (engine, server):
        await engine.init_weight_transfer(JOIN)
        with pytest.raises(Conflict, match="only while the engine is paused"):
            await engine.start_weight_update()

        assert server.transfer.state == "closed"


async def test_steps_out_of_order_are_the_servers_errors_and_the_version_stays() -> None:
    async with running(transfer_backend="nccl") as (engine, _):
        await engine.init_weight_transfer(JOIN)
        await engine.pause("keep")
        with pytest.raises(EngineFailed, match="start_weight_update must be called before update_weights"):
            await engine.update_weights(PART)
        await engine.start_weight_update()
        with pytest.raises(EngineFailed, match="update is open"):
            await engine.start_weight_update()
        with pytest.raises(EngineFailed, match="no tensor was named"):
            await engine.update_weights({"names": []})
        with pytest.raises(EngineFailed, match="before finish_weight_update"):
            await engine.finish_weight_update("v1")

        assert engine.policy_version == "initial"


async def test_draft_weights_are_refused_by_a_server_without_a_draft_model() -> None:
    async with running(transfer_backend="nccl") as (engine, _):
        with pytest.raises(Conflict, match="draft weight updates are not enabled"):
            await engine.control.start_weight_update(draft=True)


async def test_no_backend_refuses_before_anything_is_sent() -> None:
    async with running() as (engine, server):
        for call in (
            engine.init_weight_transfer(JOIN),
            engine.start_weight_update(),
            engine.update_weights(PART),
            engine.finish_weight_update("v1"),
        ):
            with pytest.raises(InvalidRequest, match="without a weight transfer backend"):
                await call

        assert server.transfer.seen == []


async def test_asleep_requests_are_refused_until_the_server_says_that_it_is_awake() -> None:
    async with running(sleep_mode=True) as (engine, server):
        await engine.sleep(level=2)

        assert (await engine.health()).state == "asleep"
        with pytest.raises(Unavailable, match="asleep"):
            await answer(engine, make_request(max_tokens=1))
        assert not server.calls

        await engine.wake_up(["weights"])  # for the new weights; there is no cache to serve with yet

        assert (await engine.health()).state == "asleep"

        await engine.wake_up(["kv_cache"])

        assert (await engine.health()).state == "ready"
        assert (await answer(engine, make_request(max_tokens=1))).choices[0].token_ids.size == 1
        assert server.transfer.seen == [("Sleep", 2), ("WakeUp", ["weights"]), ("WakeUp", ["kv_cache"])]


async def test_a_sleep_of_somebody_else_is_seen_at_the_start() -> None:
    async with running(sleep_mode=True) as (engine, server):
        await engine.sleep()
        other = GrpcEngine(GrpcSettings(endpoint=f"127.0.0.1:{server.port}", vocab_size=1024))
        await other.start()

        assert (await other.health()).state == "asleep"
        await other.close()


async def test_a_server_without_sleep_mode_refuses_to_sleep_and_serves() -> None:
    async with running() as (engine, _):
        with pytest.raises(Conflict, match="sleep mode"):
            await engine.sleep()

        assert (await engine.health()).state == "ready"
