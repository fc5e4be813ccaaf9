"""Native weight transfer and sleep over `vllm.Control`, against a mock server that has them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.mock_server import MockVllmServer
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import Conflict, EngineDied, InvalidRequest, Unavailable
from rollplane.rl.base import Operation
from rollplane.testing import answer, make_request, watching
from rollplane.worker import Worker

JOIN = {"master_address": "127.0.0.1", "master_port": 29_500, "rank_offset": 1, "world_size": 2}
PART = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]]}


@asynccontextmanager
async def running(**server: Any) -> AsyncIterator[tuple[GrpcEngine, MockVllmServer]]:
    mock = MockSettings(
        vocab_tokens=1024, step_s=server.pop("step_s", 0.0), transfer_backend=server.get("transfer_backend")
    )
    served = MockVllmServer(MockEngine(mock), **server)
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
        assert (engine.info.capabilities.native_transfer, engine.native.backend) == ("nccl", "nccl")
        assert (engine.info.capabilities.sleep, engine.sleeping.offered) == (False, False)
    async with running(sleep_mode=True) as (engine, _):
        assert (engine.info.capabilities.native_transfer, engine.native.backend) == (None, None)
        assert (engine.info.capabilities.sleep, engine.sleeping.offered) == (True, True)


async def test_an_update_carries_the_backends_own_objects_and_names_the_weights_last() -> None:
    async with running(transfer_backend="nccl") as (engine, server):
        before = await answer(engine, make_request(max_tokens=8, seed=3))
        await engine.native.init(JOIN)
        await engine.pause("keep")
        await engine.native.start()
        await engine.native.update(PART)

        assert (engine.policy_version, server.engine.policy_version) == ("initial", "initial")  # type: ignore[attr-defined]

        await engine.native.finish("v1")
        report = await engine.resume()
        after = await answer(engine, make_request(max_tokens=8, seed=3))

        assert after.choices[0].token_ids.tolist() != before.choices[0].token_ids.tolist()
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
        await engine.native.init(JOIN)
        with pytest.raises(Conflict, match="only while the engine is paused"):
            await engine.native.start()

        assert server.transfer.state == "closed"


async def test_steps_out_of_order_reach_nobody() -> None:
    async with running(transfer_backend="nccl") as (engine, server):
        await engine.pause("keep")
        for early in (engine.native.update(PART), engine.native.finish("v1")):
            with pytest.raises(Conflict, match="start one first"):
                await early

        assert server.transfer.seen == []


async def test_after_a_step_that_fails_nobody_knows_the_weights_until_an_update_succeeds() -> None:
    """No rpc loads the old ones again. The session is closed there, so that the next update can start."""
    async with running(transfer_backend="nccl") as (engine, server):
        worker = Worker(engine)
        await worker.start()
        await worker.init_weight_transfer(JOIN)
        await worker.start_weight_update()
        with pytest.raises(EngineDied, match=r"of unknown version: .*no tensor was named"):
            await worker.update_weights({"names": []})

        assert (worker.state, worker.version, server.transfer.state) == ("failed", "initial", "closed")
        with pytest.raises(Unavailable, match="of unknown version"):
            await answer(worker, make_request(max_tokens=1))
        with pytest.raises(Unavailable, match="update again before resuming"):
            await worker.resume()
        with pytest.raises(Conflict, match="start one first"):
            await worker.finish_weight_update("v1")

        await worker.start_weight_update()
        await worker.update_weights(PART)
        assert (await worker.finish_weight_update("v2")).policy_version == "v2"

        assert worker.state == "paused"
        await worker.resume()
        found = await answer(worker, make_request(max_tokens=1))
        assert found.choices[0].policy_versions == [("v2", 0)]
        await worker.close()


async def test_a_trainer_that_does_not_come_back_is_given_up_at_its_deadline() -> None:
    async with running(transfer_backend="nccl") as (engine, server):
        worker = Worker(engine)
        await worker.start()
        await worker.init_weight_transfer(JOIN)
        await worker.start_weight_update(operation=Operation(deadline_s=0.05))
        with pytest.raises(Unavailable, match="of unknown version"):
            await answer(worker, make_request(max_tokens=1))

        assert worker.state == "failed"
        assert server.transfer.state == "closed"
        await worker.close()


async def test_nothing_cached_by_older_weights_serves_a_request_and_kept_ones_are_marked() -> None:
    """Also what a server caches without a salt: it is told to drop all of it."""
    async with running(transfer_backend="nccl", step_s=0.001) as (engine, server):
        worker = Worker(engine)
        await worker.start()
        prompt = list(range(3, 67))
        await worker.init_weight_transfer(JOIN)
        kept = make_request(prompt, max_tokens=3000, ignore_eos=True, stream=True)
        async with watching(worker, kept) as (watch,):
            await watch.until_tokens(2)
            await worker.start_weight_update()
            await worker.update_weights(PART)
            await worker.finish_weight_update("v1")
            mock = server.engine
            assert isinstance(mock, MockEngine)
            computed = (await mock.health()).counters["prompt_tokens_computed"]
            await answer(worker, make_request(prompt, max_tokens=1))
            assert (await mock.health()).counters["prompt_tokens_computed"] - computed == len(prompt)
            await worker.abort(kept.request_id)
            got = await watch.answer()
        assert [name for name, _ in got.choices[0].policy_versions] == ["initial", "v1"]
        made = got.choices[0].policy_versions[1][1]
        assert got.served_by.recomputed == [(0, len(prompt) + made - 1)]
        await worker.close()


async def test_draft_weights_are_refused_by_a_server_without_a_draft_model() -> None:
    async with running(transfer_backend="nccl") as (engine, _):
        with pytest.raises(Conflict, match="draft weight updates are not enabled"):
            await engine.control.start_weight_update(draft=True)


async def test_no_backend_refuses_before_anything_is_sent() -> None:
    async with running() as (engine, server):
        for call in (
            engine.native.init(JOIN),
            engine.native.start(),
            engine.native.update(PART),
            engine.native.finish("v1"),
        ):
            with pytest.raises(InvalidRequest, match="without a weight transfer backend"):
                await call

        assert server.transfer.seen == []


async def test_asleep_requests_are_refused_until_the_server_says_that_it_is_awake() -> None:
    async with running(sleep_mode=True) as (engine, server):
        await engine.pause("abort")
        await engine.sleeping.sleep()

        assert (await engine.health()).state == "asleep"
        with pytest.raises(Unavailable, match="asleep"):
            await answer(engine, make_request(max_tokens=1))
        assert not server.calls

        await engine.sleeping.wake_up(["weights"])  # for the new weights; there is no cache to serve with yet

        assert (await engine.health()).state == "asleep"

        await engine.sleeping.wake_up(["kv_cache"])

        assert (await engine.health()).state == "paused"
        await engine.resume()
        assert (await answer(engine, make_request(max_tokens=1))).choices[0].token_ids.size == 1
        assert server.transfer.seen == [("Sleep", 1), ("WakeUp", ["weights"]), ("WakeUp", ["kv_cache"])]


async def test_a_sleep_of_somebody_else_is_seen_at_the_start() -> None:
    async with running(sleep_mode=True) as (engine, server):
        await engine.sleeping.sleep()
        other = GrpcEngine(GrpcSettings(endpoint=f"127.0.0.1:{server.port}", vocab_size=1024))
        await other.start()

        assert (await other.health()).state == "asleep"
        worker = Worker(other)
        await worker.start()
        assert (worker.state, (await worker.health()).state) == ("asleep", "asleep")
        with pytest.raises(Unavailable, match="asleep"):
            await answer(worker, make_request(max_tokens=1))
        await worker.wake_up()
        await worker.resume()
        assert (await answer(worker, make_request(max_tokens=1))).choices[0].token_ids.size == 1
        await worker.close()


async def test_a_server_that_was_found_paused_can_be_resumed() -> None:
    async with running() as (engine, server):
        await engine.pause("keep")
        other = Worker(GrpcEngine(GrpcSettings(endpoint=f"127.0.0.1:{server.port}", vocab_size=1024)))
        await other.start()

        assert other.state == "paused"
        assert (await other.resume()).was_paused
        assert (await answer(other, make_request(max_tokens=1))).choices[0].token_ids.size == 1
        await other.close()


async def test_a_server_without_sleep_mode_refuses_to_sleep_and_serves() -> None:
    async with running() as (engine, _):
        with pytest.raises(Conflict, match="sleep mode"):
            await engine.sleeping.sleep()

        assert (await engine.health()).state == "ready"
