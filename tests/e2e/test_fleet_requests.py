"""Requests through a frontend and three workers on real sockets."""

import asyncio
from typing import Any

import pytest
from tests.e2e.fleets import fleet_of

from rollplane.client.client import Client
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import Conflict, InvalidRequest

SAMPLING: dict[str, Any] = {"max_tokens": 8, "seed": 1, "logprobs": 0, "ignore_eos": True}
SLOW = MockSettings(step_s=0.01)


async def test_an_answer_through_the_fleet_is_the_workers_own() -> None:
    async with fleet_of([MockSettings()] * 3) as fleet, Client(fleet.frontend.url) as client:
        through = await client.generate([5, 6, 7], sampling_params=SAMPLING, request_id="a")
        async with Client(fleet.workers[0].url) as direct:
            straight = await direct.generate([5, 6, 7], sampling_params=SAMPLING, request_id="a")
        assert through.choices[0].token_ids.tolist() == straight.choices[0].token_ids.tolist()
        assert through.choices[0].policy_versions == [("initial", 0)]
        assert through.served_by.attempt == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_logprobs_survive_every_hop(n: int) -> None:
    sampling = {**SAMPLING, "n": n, "logprobs": 2, "temperature": 1.0}
    async with fleet_of([MockSettings()]) as fleet, Client(fleet.frontend.url) as client:
        unary = await client.generate([5, 6, 7], sampling_params=sampling)
        async with client.stream([5, 6, 7], sampling_params=sampling) as stream:
            deltas = [delta async for delta in stream]
        streamed = stream.response
        for one, other in zip(unary.choices, streamed.choices, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs.values.size == one.token_ids.size == 8
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.logprobs.values.tolist() == other.logprobs.values.tolist()
            assert one.logprobs.alternatives is not None
            assert other.logprobs.alternatives is not None
            assert one.logprobs.alternatives.ids.tolist() == other.logprobs.alternatives.ids.tolist()
        assert {delta.index for delta in deltas} == set(range(n))


async def test_a_stream_folds_to_the_unary_answer_with_routes_and_masks() -> None:
    from rollplane.protocol.info import MoeShape

    settings = MockSettings(moe=MoeShape(layers=2, top_k=2, num_experts=8), sampling_mask=True)
    sampling = {**SAMPLING, "top_k": 4, "temperature": 1.0}
    async with fleet_of([settings]) as fleet, Client(fleet.frontend.url) as client:
        asked = {"sampling_params": sampling, "routed_experts": True, "sampling_mask": True}
        unary = await client.generate([5, 6, 7], **asked)
        async with client.stream([5, 6, 7], **asked) as stream:
            async for _ in stream:
                pass
        assert stream.response.model == unary.model == "mock"
        one, other = unary.choices[0], stream.response.choices[0]
        assert one.routed_experts is not None
        assert other.routed_experts is not None
        assert one.routed_experts.array.tolist() == other.routed_experts.array.tolist()
        assert one.sampling_mask is not None
        assert other.sampling_mask is not None
        assert one.sampling_mask.rows() == other.sampling_mask.rows()


async def test_requests_survive_the_end_of_one_of_three_workers() -> None:
    async with fleet_of([SLOW] * 3) as fleet, Client(fleet.frontend.url) as client:
        tasks = [
            asyncio.create_task(
                client.generate([5, 6, i], sampling_params={**SAMPLING, "max_tokens": 30}, request_id=f"r{i}")
            )
            for i in range(24)
        ]
        await fleet.until(lambda: all(worker.worker.live_requests for worker in fleet.workers))
        victim = fleet.workers[0]
        moved = victim.worker.live_requests
        await victim.kill()
        answers = await asyncio.gather(*tasks)
        assert all(answer.choices[0].token_ids.size == 30 for answer in answers)
        assert all(answer.choices[0].finish_reason == "length" for answer in answers)
        assert sum(answer.served_by.attempt > 1 for answer in answers) >= moved > 0
        await fleet.until(lambda: not fleet.fleet.members[0].routable)


async def test_a_hang_up_aborts_at_every_hop() -> None:
    """50 unary posts that would run for long, all hung up."""
    settings = MockSettings(step_s=0.01, max_model_len=16_384)
    async with fleet_of([settings, settings]) as fleet:
        async with Client(fleet.frontend.url) as client:
            tasks = [
                asyncio.create_task(client.generate([5, 6, i], sampling_params={**SAMPLING, "max_tokens": 8000}))
                for i in range(50)
            ]
            await fleet.until(lambda: sum(worker.worker.live_requests for worker in fleet.workers) == 50)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.until(lambda: not any(worker.worker.live_requests for worker in fleet.workers))
        for worker in fleet.workers:
            assert (await worker.engine.health()).running == 0
        assert all(routed.sequences == 0 and routed.tokens == 0 for routed in fleet.router.workers)


async def test_a_live_request_id_with_another_body_is_a_conflict_and_with_the_same_body_joins() -> None:
    """Also when the two would have gone to different workers."""
    async with fleet_of([SLOW] * 2) as fleet, Client(fleet.frontend.url, attempts=1) as client:
        sampling = {**SAMPLING, "max_tokens": 40}
        first = asyncio.create_task(client.generate([5, 6, 7], sampling_params=sampling, request_id="same"))
        await fleet.until(lambda: any(worker.worker.live_requests for worker in fleet.workers))
        with pytest.raises(Conflict, match="same"):
            await client.generate([9, 9, 9], sampling_params=sampling, request_id="same")
        second = await client.generate([5, 6, 7], sampling_params=sampling, request_id="same")
        assert second.choices[0].token_ids.tolist() == (await first).choices[0].token_ids.tolist()
        assert sum(worker.engine.calls("generate") for worker in fleet.workers) == 1


async def test_a_request_id_is_free_again_after_its_caller_hung_up() -> None:
    """The retry of a request whose first attempt was dropped."""
    async with fleet_of([SLOW] * 2) as fleet, Client(fleet.frontend.url, attempts=1) as client:
        sampling = {**SAMPLING, "max_tokens": 40}
        first = asyncio.create_task(client.generate([5, 6, 7], sampling_params=sampling, request_id="same"))
        await fleet.until(lambda: any(worker.worker.live_requests for worker in fleet.workers))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        again = await client.generate([5, 6, 7], sampling_params=sampling, request_id="same")
        assert again.choices[0].token_ids.size == 40


async def test_bad_requests_open_no_circuit() -> None:
    """50 over-length prompts, then a good one."""
    async with fleet_of([MockSettings(max_model_len=64)] * 2) as fleet, Client(fleet.frontend.url) as client:
        results = await asyncio.gather(
            *(client.generate([5] * 200, sampling_params=SAMPLING) for _ in range(50)), return_exceptions=True
        )
        assert all(isinstance(r, InvalidRequest) and "maximum context length" in r.message for r in results)
        assert all(routed.circuit.state == "closed" for routed in fleet.router.workers)
        assert (await client.generate([5, 6], sampling_params=SAMPLING)).choices[0].token_ids.size == 8


async def test_an_engine_fault_moves_the_request_and_is_said() -> None:
    faulty = MockSettings(faults=(Fault(kind="fail"),))
    async with fleet_of([faulty, faulty]) as fleet, Client(fleet.frontend.url, attempts=1) as client:
        answers = [await client.generate([5, 6, i], sampling_params=SAMPLING) for i in range(3)]
        assert [answer.served_by.attempt for answer in answers] == [3, 1, 1]


async def test_a_request_that_is_held_starts_when_the_fleet_resumes() -> None:
    from rollplane.client.admin import AdminClient

    async with (
        fleet_of([MockSettings()] * 2) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        assert not (await admin.pause("keep")).already_paused
        task = asyncio.create_task(client.generate([5, 6, 7], sampling_params=SAMPLING, request_id="held"))
        await fleet.until(lambda: "1 held" in repr(fleet.router))
        assert not task.done()
        assert (await admin.resume()).was_paused
        assert (await task).choices[0].token_ids.size == 8
        assert not (await admin.resume()).was_paused


async def test_a_held_request_can_be_aborted() -> None:
    from rollplane.client.admin import AdminClient

    async with (
        fleet_of([MockSettings()]) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        await admin.pause("keep")
        task = asyncio.create_task(client.generate([5, 6, 7], sampling_params=SAMPLING, request_id="held"))
        await fleet.until(lambda: "1 held" in repr(fleet.router))
        assert await admin.abort("held") == 1
        answer = await task
        assert answer.choices[0].finish_reason == "abort"
        assert answer.choices[0].token_ids.size == 0
        await admin.resume()


async def test_an_abort_reaches_the_worker_that_has_the_request() -> None:
    async with fleet_of([SLOW] * 2) as fleet, Client(fleet.frontend.url) as client:
        sampling = {**SAMPLING, "max_tokens": 2000}
        task = asyncio.create_task(client.generate([5, 6, 7], sampling_params=sampling, request_id="long"))
        await fleet.until(lambda: any(worker.worker.live_requests for worker in fleet.workers))
        assert await client.abort("long") == 1
        answer = await task
        assert answer.choices[0].finish_reason == "abort"
        assert answer.choices[0].token_ids.size < 2000
        assert await client.abort("long") == 0
