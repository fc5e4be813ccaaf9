"""A frontend over two workers, all on real sockets in one event loop: what a trainer sees of a fleet."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.server_support import GENERATE, Served, eventually, serving
from tests.e2e.test_server_admin import adapter, call, checkpoint, prime_rl_transcript

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.discovery.static import StaticDiscovery
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.info import MoeShape
from rollplane.rl.fleet import Fleet
from rollplane.router.router import Router, RouterSettings
from rollplane.testing import ScriptedEngine
from rollplane.worker import Worker, WorkerSettings

PROMPT = [5, 6, 7]


@dataclass(frozen=True)
class Fleeted:
    front: Served
    workers: list[Served]


@contextlib.asynccontextmanager
async def fleet_of(*engines: Any) -> AsyncIterator[Fleeted]:
    async with contextlib.AsyncExitStack() as stack:
        workers = []
        for i, engine in enumerate(engines):
            worker = Worker(engine, settings=WorkerSettings(name=f"worker-{i}"))
            workers.append(await stack.enter_async_context(serving(worker)))
        fleet = Fleet()
        router = Router(fleet, discovery=StaticDiscovery([worker.url for worker in workers]))
        front = await stack.enter_async_context(serving(router, role="frontend", admin=fleet))

        async def joined() -> bool:
            return len(fleet.members) == len(workers) and all(member.routable for member in fleet.members)

        await eventually(joined)
        yield Fleeted(front, workers)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleeted]:
    settings = MockSettings(max_model_len=64, moe=MoeShape(layers=2, top_k=2, num_experts=8))
    async with fleet_of(MockEngine(settings), MockEngine(settings)) as found:
        yield found


def ask(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": sampling}


async def test_omitted_max_tokens_runs_to_the_end_of_the_context_through_the_router(fleet: Fleeted) -> None:
    answer = await fleet.front.generate(ask(ignore_eos=True))

    assert len(answer["choices"][0]["token_ids"]) == 64 - len(PROMPT)


async def test_an_answer_is_the_workers_own(fleet: Fleeted) -> None:
    body = ask(max_tokens=8, logprobs=2, seed=1)
    direct = await fleet.workers[0].generate(body)
    routed = await fleet.front.generate(body)
    streamed = await fleet.front.chunks(body)

    assert routed["choices"] == direct["choices"]
    assert routed["rollplane"]["worker"].startswith("worker-")
    terminal = streamed[-3]["choices"][0]
    assert terminal["routed_experts"] == direct["choices"][0]["routed_experts"]


async def test_our_client_reads_binary_answers_through_the_router(fleet: Fleeted) -> None:
    async with Client(fleet.front.url) as client:
        response = await client.generate(PROMPT, sampling_params={"max_tokens": 4, "logprobs": 1}, routed_experts=True)

    assert response.choices[0].routed_experts is not None
    assert response.choices[0].token_ids.size == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_hanging_up_reaches_the_engine_through_both_hops(stream: bool) -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine([gate])
    async with fleet_of(engine) as fleet:
        body = {**ask(max_tokens=8), "stream": stream}
        asked = [asyncio.create_task(fleet.front.post(GENERATE, body).__aenter__()) for _ in range(10)]

        async def all_running() -> bool:
            return len(engine.requests) == 10

        async def all_closed() -> bool:
            return len(engine.closed_early) == 10

        await eventually(all_running)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await eventually(all_closed)


async def test_bad_requests_do_not_open_a_circuit(fleet: Fleeted) -> None:
    for _ in range(50):
        refused = await fleet.front.generate({"token_ids": [1] * 64, "sampling_params": {}}, status=400)
        assert "maximum context length" in refused["error"]["message"]

    await fleet.front.generate(ask(max_tokens=1))


async def test_the_names_of_prime_rl_act_on_the_whole_fleet(fleet: Fleeted, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "step_1", "one")
    lora = adapter(tmp_path / "lora_1", "one")
    async with fleet.front.session.post(fleet.front.url + "/pause?mode=keep&clear_cache=false") as answer:
        assert answer.status == 200
    for worker in fleet.workers:
        assert (await call(worker, "/is_paused", method="GET"))[1]["is_paused"] is True
    assert (await call(fleet.front, "/update_weights", {"weight_dir": weights}))[0] == 200
    async with fleet.front.session.post(fleet.front.url + "/resume") as answer:
        assert answer.status == 200
    assert (await call(fleet.front, "/load_lora_adapter", {"lora_name": "policy", "lora_path": lora}))[0] == 200
    for worker in fleet.workers:
        assert (await call(worker, "/weight_info", method="GET"))[1] == {"weight_version": "step_1"}
        cards = (await call(worker, "/v1/models", method="GET"))[1]["data"]
        assert [card["id"] for card in cards] == ["mock", "policy"]
    answer = await fleet.front.generate({**ask(max_tokens=2), "model": "policy"})
    assert answer["choices"][0]["policy_versions"] == [["step_1", 0]]
    assert answer["rollplane"]["adapter_generation"] == 1
    assert (await call(fleet.front, "/get_world_size", method="GET"))[1] == {"world_size": 2}


async def test_the_calls_of_prime_rl_in_their_order_through_the_frontend(fleet: Fleeted, tmp_path: Path) -> None:
    await prime_rl_transcript(fleet.front, tmp_path, world_size=2)


async def test_discovery_speaks_protocol_1_alike_at_a_worker_and_at_the_frontend(fleet: Fleeted) -> None:
    names = "namespace component endpoint instance_id transport request_plane_url system_url model routes world_size"
    found = {}
    for served in (fleet.front, *fleet.workers):
        status, answer = await call(served, "/v1/rl/workers", method="GET")
        assert (status, answer["protocol_version"], answer["namespace"]) == (200, 1, "rollplane")
        for record in answer["workers"]:
            assert set(names.split()) <= set(record)
            assert {"weight_transfer", "lora", "logprobs_mode", "routed_experts", "sampling_mask"} <= set(
                record["capabilities"]
            )
            assert "update_weights_from_disk" in record["routes"]
            assert {"start_weight_update", "sleep", "init_weights_update_group"}.isdisjoint(record["routes"])
        found[served.url] = sorted(record["instance_id"] for record in answer["workers"])
    told, *own = found.values()
    assert told == sorted(instance for instances in own for instance in instances)


async def test_a_fleet_update_is_remembered_as_an_operation(fleet: Fleeted, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "v2", "two")
    async with AdminClient(fleet.front.url) as admin:
        await admin.update_policy(weights, operation_id="op-1")
        assert await admin.operation("op-1") == {"0": "done"}
        assert await admin.policy_version() == "v2"
        assert {record.policy_version for record in await admin.workers()} == {"v2"}


async def test_a_missing_checkpoint_is_a_404_through_the_fleet(fleet: Fleeted, tmp_path: Path) -> None:
    for path, body in (
        ("/update_weights", {"weight_dir": str(tmp_path / "not-yet")}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path / "not-yet")}),
    ):
        assert (await call(fleet.front, path, body))[0] == 404


async def test_an_abort_without_ids_ends_every_live_request_as_in_vllm() -> None:
    """On the frontend all that it has placed; on a worker all that it runs; and none for an empty list."""
    engines = [MockEngine(MockSettings(step_s=0.005)) for _ in range(2)]
    async with fleet_of(*engines) as fleet:
        for target in (fleet.front, fleet.workers[0]):
            asked = [
                asyncio.create_task(target.generate({**ask(max_tokens=4000, ignore_eos=True), "request_id": f"r{i}"}))
                for i in range(6)
            ]

            async def running() -> bool:
                return sum([(await engine.health()).running for engine in engines]) == 6

            await eventually(running)
            assert (await call(target, "/abort_requests", {"request_ids": []}))[1] == {"aborted": 0}
            assert (await call(target, "/abort_requests", {}))[1] == {"aborted": 6}
            answers = await asyncio.gather(*asked)
            assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 6


async def test_an_abort_at_the_frontend_reaches_the_worker() -> None:
    engine = MockEngine(MockSettings(step_s=0.005))
    async with fleet_of(engine) as fleet:
        body = {**ask(max_tokens=4000, ignore_eos=True, logprobs=1), "request_id": "long"}
        asked = asyncio.create_task(fleet.front.generate(body))

        async def running() -> bool:
            return (await engine.health()).running == 1

        await eventually(running)
        assert (await call(fleet.front, "/abort_requests", {"request_ids": ["long"]}))[1] == {"aborted": 1}
        choice = (await asked)["choices"][0]

    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) < 4000


async def test_a_frontend_that_reached_no_worker_is_not_ready_and_says_why() -> None:
    nobody = StaticDiscovery(["http://127.0.0.1:1"])
    router = Router(Fleet(), discovery=nobody, settings=RouterSettings(hold_limit_s=0.1))
    async with serving(router, role="frontend", admin=router.fleet) as served:
        for path, status in (("/ready", 503), ("/metrics", 200), ("/v1/models", 503)):
            async with served.get(path) as answer:
                assert answer.status == status, path
        refused = await served.generate(ask(max_tokens=1), status=503)
        assert refused["error"]["message"]
