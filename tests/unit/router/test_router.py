"""The router over real workers in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.rl.local_workers import LocalWorker, write_adapter
from tests.unit.rl.test_fleet import weights
from tests.waiting import until

from rollplane.engines.base import Engine
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import (
    ContextOverflow,
    DeadlineExceeded,
    EngineFailed,
    EngineProtocolError,
    InvalidRequest,
    PreconditionFailed,
    Unavailable,
)
from rollplane.protocol.events import ChoiceEvent, Event
from rollplane.protocol.features import MediaItem
from rollplane.protocol.info import MoeShape
from rollplane.rl.fleet import Fleet
from rollplane.router.policies import RoundRobin
from rollplane.router.router import Router, RouterSettings
from rollplane.testing.requests import answer, collect, folded, make_request, plan_of

SHORT = RouterSettings(hold_limit_s=0.05)


@asynccontextmanager
async def router_of(
    *settings: MockSettings, router_settings: RouterSettings | None = None
) -> AsyncIterator[tuple[Router, list[LocalWorker]]]:
    fleet = Fleet(epoch=1)
    workers = [LocalWorker(f"http://w{i}", one) for i, one in enumerate(settings)]
    for worker in workers:
        await worker.start()
        fleet.add(worker)
    router = Router(fleet, policy=RoundRobin(), settings=router_settings)
    await router.start()
    try:
        yield router, workers
    finally:
        await router.close()


async def test_a_router_is_an_engine_and_says_where_it_stands() -> None:
    async with router_of(MockSettings(), MockSettings()) as (router, _):
        assert isinstance(router, Engine)
        assert router.info.model == "mock"
        assert repr(router) == "<Router 2/2 workers at initial, 0 placed, 0 held, <RoundRobin>>"
        health = await router.health()
        assert (health.alive, health.state, health.counters) == (True, "ready", {"workers": 2, "held": 0})


async def test_who_may_serve_is_looked_up_again_after_anything_was_told() -> None:
    async with router_of(MockSettings(), MockSettings()) as (router, workers):
        before = router._present()
        assert router._present() is before
        assert (len(before.routable), before.steady) == (2, True)
        for _ in range(3):
            router.workers[0].circuit.failed()
        assert (len(router._present().routable), router._present().steady) == (2, False)
        router.workers[0].circuit.succeeded()
        assert router._present().steady
        for change in (
            workers[1].cut,
            lambda: router.fleet.members[0].enter("updating"),
            lambda: router.fleet.remove("http://w1"),
        ):
            before = router._present()
            change()
            assert router._present() is not before
        assert repr(router._present()) == "<Lineup 0/1 routable>"


async def test_the_answer_folds_and_names_its_attempt() -> None:
    async with router_of(MockSettings()) as (router, _):
        response = await answer(router, make_request(max_tokens=5, logprobs=0))
        assert response.choices[0].token_ids.size == 5
        assert response.served_by.attempt == 1


async def test_faults_move_a_request_before_its_answer_and_the_attempts_are_counted() -> None:
    failing = MockSettings(faults=(Fault(kind="fail"),))
    async with router_of(failing, failing, MockSettings()) as (router, workers):
        response = await answer(router, make_request(max_tokens=5))
        calls = [worker.mock.calls("generate") for worker in workers]
        assert response.served_by.attempt == sum(calls) > 1
        assert [routed.circuit.faults for routed in router.workers] == [*calls[:2], 0]
        assert all(routed.sequences == 0 for routed in router.workers)


async def test_a_stream_never_moves_after_its_first_token() -> None:
    failing = MockSettings(faults=(Fault(kind="fail", after_tokens=2),))
    async with router_of(failing, MockSettings()) as (router, workers):
        seen = []

        async def read() -> None:
            async for event in router.generate(make_request(max_tokens=5, stream=True)):
                seen.append(event)

        with pytest.raises(EngineFailed):
            await read()
        assert sum(event.token_ids.size for event in seen if isinstance(event, ChoiceEvent)) == 2
        assert workers[1].mock.calls("generate") == 0


async def test_a_fleet_that_fails_everywhere_gives_the_error_after_bounded_attempts() -> None:
    failing = MockSettings(faults=(Fault(kind="fail", times=100),))
    settings = RouterSettings(max_attempts=3)
    async with router_of(failing, failing, router_settings=settings) as (router, workers):
        with pytest.raises(EngineFailed):
            await collect(router, make_request(max_tokens=5))
        assert sum(worker.mock.calls("generate") for worker in workers) == 3


async def test_the_last_worker_is_tried_although_its_circuit_is_open() -> None:
    failing = MockSettings(faults=(Fault(kind="fail", times=6),))
    settings = RouterSettings(max_attempts=2)
    async with router_of(failing, router_settings=settings) as (router, _):
        for _ in range(3):
            with pytest.raises(EngineFailed):
                await collect(router, make_request(max_tokens=2))
        assert router.workers[0].circuit.state == "open"
        assert (await answer(router, make_request(max_tokens=2))).choices[0].token_ids.size == 2
        assert router.workers[0].circuit.state == "closed"


async def test_a_callers_mistake_is_refused_once_and_touches_no_circuit() -> None:
    async with router_of(MockSettings(max_model_len=16), MockSettings(max_model_len=16)) as (router, workers):
        with pytest.raises(ContextOverflow, match="maximum context length"):
            await collect(router, make_request([5] * 20))
        assert [worker.mock.calls("generate") for worker in workers] == [0, 0]
        assert all(routed.circuit.faults == 0 for routed in router.workers)


async def test_without_workers_a_request_waits_and_then_says_so() -> None:
    async with router_of(router_settings=SHORT) as (router, _):
        with pytest.raises(Unavailable, match="no worker was reached"):
            await collect(router, make_request())


async def test_a_request_that_came_before_the_first_worker_is_served() -> None:
    async with router_of() as (router, _):
        task = asyncio.create_task(answer_when_known(router))
        await until(lambda: router._live.count)
        worker = LocalWorker("http://first")
        await worker.start()
        router.fleet.add(worker)
        assert await task == 3


async def answer_when_known(router: Router) -> int:
    events = await collect(router, make_request(max_tokens=3))
    return sum(event.token_ids.size for event in events if isinstance(event, ChoiceEvent))


async def test_a_held_request_goes_on_when_a_worker_comes_back() -> None:
    async with router_of(MockSettings()) as (router, (worker,)):
        worker.cut()
        task = asyncio.create_task(answer(router, make_request(max_tokens=3)))
        await until(lambda: "1 held" in repr(router))
        await worker.mend()
        assert (await task).choices[0].token_ids.size == 3


async def test_a_held_request_ends_at_its_deadline_with_504_and_at_the_hold_limit_with_503() -> None:
    async with router_of(MockSettings(), router_settings=SHORT) as (router, (worker,)):
        worker.cut()
        with pytest.raises(DeadlineExceeded, match="unreachable") as late:
            await collect(router, make_request(options={"deadline_s": 0.02}))
        assert late.value.param == "rollplane.deadline_s"
        with pytest.raises(Unavailable, match="unreachable"):
            await collect(router, make_request())
        assert "0 placed, 0 held" in repr(router)


async def test_the_deadline_that_is_left_travels_on() -> None:
    async with router_of(MockSettings(step_s=0.02)) as (router, _):
        with pytest.raises(DeadlineExceeded):
            await collect(router, make_request(max_tokens=500, options={"deadline_s": 0.1}))


async def test_a_fenced_fleet_refuses_at_once_with_the_reason() -> None:
    async with router_of(MockSettings()) as (router, _):
        router.fleet.members[0].enter("fenced", "its weights are unknown")
        with pytest.raises(Unavailable, match="its weights are unknown"):
            await collect(router, make_request())


async def test_an_old_view_of_a_workers_version_costs_a_retry_and_never_a_wrong_answer(tmp_path: Path) -> None:
    async with router_of(MockSettings()) as (router, (worker,)):
        await router.fleet.update_from_disk(weights(tmp_path, "v1"))
        # Behind the fleet's back the process is replaced: what it has is not what was told.
        told = worker.state
        await worker.worker.set_policy_version("elsewhere")
        assert worker.state is told
        response = await answer(router, make_request(max_tokens=3))
        assert response.choices[0].policy_versions == [("v1", 0)]
        assert worker.worker.version == "v1"


async def test_a_version_that_nobody_has_is_refused_with_what_there_is() -> None:
    async with router_of(MockSettings()) as (router, _):
        with pytest.raises(PreconditionFailed, match="'v9'; there is 'initial'"):
            await collect(router, make_request(options={"policy_version": "v9"}))


async def test_an_abort_of_a_held_request_gives_a_whole_answer_without_tokens() -> None:
    settings = MockSettings(moe=MoeShape(layers=2, top_k=2, num_experts=8), sampling_mask=True)
    async with router_of(settings) as (router, (worker,)):
        worker.cut()
        request = make_request(n=2, temperature=1.0, top_k=3, logprobs=0, request_id="held")
        task = asyncio.create_task(collect(router, request))
        await until(lambda: "1 held" in repr(router))
        assert await router.abort("held") == 1
        response = folded(await task, plan_of(request, router.info))
        assert [choice.finish_reason for choice in response.choices] == ["abort", "abort"]
        assert response.choices[0].routed_experts is not None
        assert response.choices[0].routed_experts.array.shape == (0, 2, 2)
        assert await router.abort("held") == 0


async def test_media_are_identified_before_they_travel_and_a_false_claim_is_refused() -> None:
    item = MediaItem(modality="image", producer_hash="p", offset=0, length=2, kwargs=b"pixels", mm_hash="0" * 64)
    async with router_of(MockSettings()) as (router, _):
        with pytest.raises(InvalidRequest, match="claims the identity"):
            await collect(router, make_request(fields={"features": [item]}))
        item.mm_hash = None
        await collect(router, make_request(max_tokens=2, fields={"features": [item]}))
        assert item.mm_hash is not None


async def test_an_answer_that_breaks_the_contract_is_not_asked_for_elsewhere() -> None:
    async with router_of(MockSettings(), MockSettings()) as (router, workers):

        async def broken(request: object) -> list[Event]:
            raise EngineProtocolError("7 logprobs for 8 tokens")

        workers[0].worker.whole = broken  # type: ignore[method-assign]
        with pytest.raises(EngineProtocolError):
            await collect(router, make_request())
        assert workers[1].mock.calls("generate") == 0
        assert router.workers[0].circuit.faults == 1


async def test_a_closed_router_ends_what_it_holds() -> None:
    async with router_of(MockSettings()) as (router, (worker,)):
        worker.cut()
        task = asyncio.create_task(collect(router, make_request()))
        await until(lambda: "1 held" in repr(router))
        await router.close()
        with pytest.raises(Unavailable, match="closing"):
            await task


async def test_requests_for_an_adapter_wait_until_every_worker_has_it_and_others_go_on(tmp_path: Path) -> None:
    async with router_of(MockSettings(), MockSettings()) as (router, workers):
        workers[1].gates["load"] = asyncio.Event()
        loading = asyncio.create_task(router.fleet.load_adapter("tuned", write_adapter(tmp_path, "a1", value=1.0)))
        await until(lambda: workers[1].operations and workers[1].operations[-1][0] == "load")
        held = asyncio.create_task(answer(router, make_request(max_tokens=3, fields={"model": "tuned"})))
        await until(lambda: "1 held" in repr(router))
        assert (await answer(router, make_request(max_tokens=3))).choices[0].token_ids.size == 3
        assert not held.done()
        workers[1].gates["load"].set()
        await loading
        assert (await held).served_by.adapter_generation == 1
