"""A frontend that has just started, before it has reached a worker: requests wait, as they wait for a worker, and no longer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from tests.e2e.fleets import MockWorker, Served, serve_frontend
from tests.e2e.server_support import data_of
from tests.models import tiny
from tests.waiting import until

from rollplane.client.client import Client
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from rollplane.rl.fleet import Fleet
from rollplane.rl.remote import RemoteWorker
from rollplane.router.fair_queue import QueueSettings
from rollplane.router.models import Models
from rollplane.router.router import Router, RouterSettings

SAMPLING: dict[str, Any] = {"max_tokens": 6, "seed": 1, "ignore_eos": True}


class Started:
    """A frontend over an empty fleet, and a worker that is not in it yet."""

    def __init__(self, router: Router, frontend: Served, worker: MockWorker) -> None:
        self.router = router
        self.frontend = frontend
        self.worker = worker
        self.url = frontend.url

    def discover(self) -> None:
        self.router.fleet.add(RemoteWorker(self.worker.url, poll_s=0.1))

    async def waiting(self, count: int, traffic: str = "train") -> None:
        await until(lambda: self.router.queue.waiting.get(traffic, 0) == count)


@contextlib.asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[Started]:
    router = Router(Fleet(), settings=RouterSettings(**settings))
    frontend, worker = serve_frontend(router, router.fleet), MockWorker(MockSettings(vocab_tokens=1024))
    frontend.service.texts.directory = tiny.shared_model("qwen3", layers=2)
    await worker.start()
    await frontend.start()
    try:
        yield Started(router, frontend, worker)
    finally:
        await frontend.kill()
        await router.close()
        await worker.kill()


async def test_requests_of_every_kind_wait_for_the_first_worker() -> None:
    async with started() as start, Client(start.url, attempts=1) as client, aiohttp.ClientSession() as http:

        async def stream() -> int:
            async with client.stream([5, 6, 7], sampling_params=SAMPLING) as deltas:
                return sum([delta.token_ids.size async for delta in deltas])

        async def evaluate(route: str, body: dict[str, Any]) -> int:
            async with http.post(f"{start.url}/v1/{route}", json={**body, **SAMPLING}) as answer:
                content = await answer.read()
                assert answer.status == 200, content
                if body.get("stream"):
                    assert content.endswith(b"data: [DONE]\n\n")
                    return len(data_of(content))
                return int((await answer.json())["usage"]["completion_tokens"])

        unary = asyncio.create_task(client.generate([5, 6, 7], sampling_params=SAMPLING))
        streamed = asyncio.create_task(stream())
        chat = {"messages": [{"role": "user", "content": "def main"}]}
        evaluations = [
            asyncio.create_task(evaluate("completions", {"prompt": [5, 6, 7]})),
            asyncio.create_task(evaluate("chat/completions", chat)),
            asyncio.create_task(evaluate("completions", {"prompt": [5, 6, 7], "stream": True})),
        ]
        await start.waiting(2)
        await start.waiting(3, "eval")
        # What cannot be served by anyone is still refused once the model is known, and what is no request at once.
        with pytest.raises(InvalidRequest):
            await client.generate([5], sampling_params={"max_tokens": 0})
        too_long = asyncio.create_task(client.generate([5] * 9000, sampling_params=SAMPLING))
        await start.waiting(3)
        start.discover()
        assert (await unary).choices[0].token_ids.size == await streamed == 6
        assert (await asyncio.gather(*evaluations))[:2] == [6, 6]
        with pytest.raises(InvalidRequest, match="maximum context length"):
            await too_long
        assert start.router.queue.waiting == {}


@pytest.mark.parametrize("named", [True, False])
async def test_an_abort_ends_the_wait_for_the_first_worker_of_one_request_or_of_all(named: bool) -> None:
    """No model is known yet, so there is no answer to end: the callers are told, and nothing is asked for again."""
    async with started() as start, Client(start.url) as client, aiohttp.ClientSession() as http:

        async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            async with http.post(start.url + path, json=body) as answer:
                return answer.status, await answer.json()

        async def stream() -> None:
            async with client.stream([5, 6, 7], sampling_params=SAMPLING, request_id="streamed") as deltas:
                async for _ in deltas:
                    pass

        chat = {"messages": [{"role": "user", "content": "def main"}], "request_id": "chat", **SAMPLING}
        unary = asyncio.create_task(client.generate([5, 6, 7], sampling_params=SAMPLING, request_id="unary"))
        streamed, evaluated = asyncio.create_task(stream()), asyncio.create_task(post("/v1/chat/completions", chat))
        pair = {"prompt": [[5, 6], [7, 8]], "request_id": "pair", **SAMPLING}
        both = asyncio.create_task(post("/v1/completions", pair))
        kept = asyncio.create_task(client.generate([5, 6, 7], sampling_params=SAMPLING, request_id="kept"))
        await start.waiting(3)
        await start.waiting(2, "eval")
        if named:
            assert await post("/engine/abort_request", {"request_id": "nobody"}) == (
                200,
                {"status": "ok", "aborted": 0},
            )
            for name in ("unary", "streamed", "chat", "pair-1"):
                assert await post("/engine/abort_request", {"request_id": name}) == (
                    200,
                    {"status": "ok", "aborted": 1},
                )
        else:
            assert (await post("/abort_requests", {}))[0] == 200
        for task in (unary, streamed):
            with pytest.raises(Cancelled, match="aborted before a worker was reached"):
                await task
        assert (await evaluated)[0] == 499
        assert (await both)[0] == 499
        if named:
            start.discover()
            assert (await kept).choices[0].token_ids.size == 6
        else:
            with pytest.raises(Cancelled):
                await kept
        assert start.router.queue.waiting == {}


async def test_only_so_many_wait_and_the_rest_is_told_when_to_come_back() -> None:
    queue = QueueSettings(max_waiting=2)
    async with started(queue=queue) as start, Client(start.url, attempts=1) as client:
        first = [asyncio.create_task(client.generate([5, i], sampling_params=SAMPLING)) for i in range(2)]
        await start.waiting(2)
        with pytest.raises(Overloaded, match="the limit is 2") as refusal:
            await client.generate([5, 6], sampling_params=SAMPLING)
        assert (refusal.value.retry_after_s or 0) >= 1
        start.discover()
        assert [answer.choices[0].token_ids.size for answer in await asyncio.gather(*first)] == [6, 6]


async def test_the_wait_ends_with_the_deadline_the_hold_limit_or_the_caller() -> None:
    async with started(hold_limit_s=0.2) as start, Client(start.url, attempts=1) as client:
        with pytest.raises(DeadlineExceeded, match="no worker was reached yet"):
            await client.generate([5, 6], sampling_params=SAMPLING, deadline_s=0.1)
        with pytest.raises(Unavailable, match="no worker was reached yet"):
            await client.generate([5, 6], sampling_params=SAMPLING)
        gone = asyncio.create_task(client.generate([5, 6], sampling_params=SAMPLING, deadline_s=60.0))
        await start.waiting(1)
        gone.cancel()
        await start.waiting(0)


@pytest.mark.parametrize("named", [True, False])
async def test_a_request_that_may_be_of_any_fleet_is_ended_once(named: bool) -> None:
    models = Models({name: Router(Fleet(), name=name) for name in ("default", "frozen")})
    frontend = serve_frontend(models, models.default.fleet)
    await frontend.start()
    try:
        async with Client(frontend.url, attempts=1) as client:
            asked = client.generate([5, 6], sampling_params=SAMPLING, model="teacher", request_id="a")
            waiting = asyncio.create_task(asked)
            await until(lambda: all(sum(router.queue.waiting.values()) == 1 for router in models.routers.values()))
            assert await (models.abort("a") if named else models.abort_all()) == 1
            with pytest.raises(Cancelled):
                await waiting
            assert await models.abort("a") == 0
    finally:
        await frontend.kill()
        await models.close()


async def test_one_fleet_serves_while_another_was_not_reached() -> None:
    worker = MockWorker(MockSettings(model="teacher"))
    await worker.start()
    policy, teacher = Router(Fleet()), Router(Fleet(), name="frozen")
    models = Models({"default": policy, "frozen": teacher})
    frontend = serve_frontend(models, policy.fleet)
    await frontend.start()
    try:
        async with Client(frontend.url, attempts=1) as client:
            # By a name that only a reached fleet can tell, and by the fleet's own.
            asked = [
                asyncio.create_task(client.generate([5, 6], sampling_params=SAMPLING, model=name))
                for name in ("teacher", "frozen")
            ]
            await until(lambda: sum(teacher.queue.waiting.values()) == 2)
            teacher.fleet.add(RemoteWorker(worker.url, poll_s=0.1))
            answers = await asyncio.gather(*asked)
            assert {answer.served_by.instance for answer in answers} == {worker.worker.instance_id}
            with pytest.raises(DeadlineExceeded):
                await client.generate([5, 6], sampling_params=SAMPLING, deadline_s=0.1)
    finally:
        await frontend.kill()
        await models.close()
        await worker.kill()
