"""Limits of a fleet over HTTP: what is over them waits, and what may not wait is a 429 with when to come back."""

import asyncio
import hashlib
from typing import Any

import aiohttp
import msgspec
from tests.e2e.fleets import fleet_of
from tests.models import tiny
from tests.waiting import until

from rollplane.engines.mock.settings import MockSettings
from rollplane.router.fair_queue import QueueSettings
from rollplane.router.router import RouterSettings
from rollplane.testing.requests import make_request

Answer = tuple[int, dict[str, str], dict[str, Any]]


async def post(session: aiohttp.ClientSession, url: str, *, key: str, traffic: str = "train") -> Answer:
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 40, "ignore_eos": True},
        "rollplane": {"traffic_class": traffic},
    }
    async with session.post(
        f"{url}/inference/v1/generate",
        data=msgspec.json.encode(body),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    ) as answer:
        return answer.status, dict(answer.headers), msgspec.json.decode(await answer.read())


async def test_overload_waits_up_to_the_limit_and_the_rest_is_told_when_to_come_back() -> None:
    queue = QueueSettings(max_running=4, max_waiting=4)
    async with (
        fleet_of([MockSettings(step_s=0.01)] * 2, router_settings=RouterSettings(queue=queue)) as fleet,
        aiohttp.ClientSession() as session,
    ):
        answers = await asyncio.gather(*(post(session, fleet.frontend.url, key="k") for _ in range(12)))
        assert sorted(status for status, _, _ in answers) == [200] * 8 + [429] * 4
        for status, headers, body in answers:
            if status == 429:
                assert float(headers["Retry-After"]) >= 1
                assert body["error"]["code"] == "overloaded"
        assert repr(fleet.router.queue) == "<FairQueue 0 running, {} waiting, 4 refused>"


async def test_one_key_does_not_take_what_another_has_and_a_hang_up_leaves_the_queue() -> None:
    queue = QueueSettings(max_running_per_key=1, max_waiting_per_key=1)
    async with (
        fleet_of([MockSettings(step_s=0.02)], router_settings=RouterSettings(queue=queue)) as fleet,
        aiohttp.ClientSession() as session,
    ):
        first = asyncio.create_task(post(session, fleet.frontend.url, key="greedy"))
        await until(lambda: fleet.router.queue.running == 1)
        second = asyncio.create_task(post(session, fleet.frontend.url, key="greedy"))
        await until(lambda: fleet.router.queue.waiting == {"train": 1})
        assert (await post(session, fleet.frontend.url, key="greedy"))[0] == 429
        other = asyncio.create_task(post(session, fleet.frontend.url, key="other", traffic="eval"))
        await until(lambda: fleet.router.queue.running == 2)
        second.cancel()
        await until(lambda: fleet.router.queue.waiting == {})
        assert [(await task)[0] for task in (first, other)] == [200, 200]
        assert fleet.router.queue.running == 0


async def test_a_request_that_waits_for_room_can_be_aborted() -> None:
    queue = QueueSettings(max_running=1)
    async with (
        fleet_of([MockSettings(step_s=0.02)], router_settings=RouterSettings(queue=queue)) as fleet,
        aiohttp.ClientSession() as session,
    ):
        first = asyncio.create_task(post(session, fleet.frontend.url, key="k"))
        await until(lambda: fleet.router.queue.running == 1)
        second = asyncio.create_task(post(session, fleet.frontend.url, key="k"))
        await until(lambda: bool(fleet.router.queue.waiting))
        assert await fleet.router.abort_all() == 2
        bodies = [(await task)[2] for task in (first, second)]
        assert [body["choices"][0]["finish_reason"] for body in bodies] == ["abort", "abort"]
        assert bodies[1]["choices"][0]["token_ids"] == []


async def test_a_keys_limit_holds_over_every_route_however_its_header_is_spelt() -> None:
    queue = QueueSettings(max_running_per_key=1, max_waiting_per_key=0)
    async with (
        fleet_of([MockSettings(step_s=0.02, vocab_tokens=1024)], router_settings=RouterSettings(queue=queue)) as fleet,
        aiohttp.ClientSession() as session,
    ):
        fleet.frontend.service.texts.directory = tiny.shared_model("qwen3", layers=2)
        chat = {"messages": [{"role": "user", "content": "def main"}]}
        bodies: dict[str, dict[str, Any]] = {"completions": {"prompt": [5, 6, 7]}, "chat/completions": chat}
        first = asyncio.create_task(post(session, fleet.frontend.url, key="k"))
        await until(lambda: fleet.router.queue.running == 1)
        for route, body in bodies.items():
            for header in ("Bearer k", "bearer   k "):
                sent = {**body, "max_tokens": 4, "ignore_eos": True}
                url = f"{fleet.frontend.url}/v1/{route}"
                async with session.post(url, json=sent, headers={"Authorization": header}) as answer:
                    assert answer.status == 429, (route, header)
                    assert answer.headers["Retry-After"]
        async with session.post(
            f"{fleet.frontend.url}/v1/completions",
            json={"prompt": [5, 6], "max_tokens": 4},
            headers={"Authorization": "Bearer other"},
        ) as answer:
            assert answer.status == 200
        assert (await first)[0] == 200
        async with session.get(f"{fleet.frontend.url}/metrics") as answer:
            page = await answer.text()
        caller = hashlib.sha256(b"k").hexdigest()[:8]
        labels = f'caller="{caller}",fleet="default",model="",traffic_class="eval",why="key_full"'
        assert f"rollplane_queue_turned_away_total{{{labels}}} 4.0" in page
        assert 'rollplane_queue_limit{fleet="default",limit="max_running_per_key"} 1.0' in page
        assert 'rollplane_queue_wait_seconds_count{fleet="default",traffic_class="train"} 1.0' in page
        assert 'rollplane_queue_wait_seconds_count{fleet="default",traffic_class="eval"} 1.0' in page


async def test_evaluations_wait_in_a_class_of_their_own_and_get_their_share() -> None:
    """Four trainings for each evaluation, while both wait."""
    queue = QueueSettings(max_running=1, shares={"train": 4.0, "eval": 1.0})
    order: list[str] = []
    async with (
        fleet_of([MockSettings(vocab_tokens=1024)], router_settings=RouterSettings(queue=queue)) as fleet,
        aiohttp.ClientSession() as session,
    ):
        fleet.frontend.service.texts.directory = tiny.shared_model("qwen3", layers=2)
        held = await fleet.router.queue.enter(make_request(), ends=None, woken=asyncio.Event())
        assert held is not None

        async def train() -> None:
            assert (await post(session, fleet.frontend.url, key="k"))[0] == 200
            order.append("train")

        async def evaluate() -> None:
            sent = {"prompt": [5, 6], "max_tokens": 4}
            async with session.post(f"{fleet.frontend.url}/v1/completions", json=sent) as answer:
                assert answer.status == 200, await answer.text()
            order.append("eval")

        tasks = [asyncio.create_task(evaluate()) for _ in range(3)]
        await until(lambda: fleet.router.queue.waiting == {"eval": 3})
        tasks += [asyncio.create_task(train()) for _ in range(8)]
        await until(lambda: fleet.router.queue.waiting == {"eval": 3, "train": 8})
        fleet.router.queue.leave(held)
        await asyncio.gather(*tasks)
    assert order[:8].count("eval") == 2
