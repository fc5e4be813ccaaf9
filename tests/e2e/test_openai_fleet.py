"""Evaluation traffic through a frontend's router, and what a hang-up, a pause and a failed worker do to it."""

import asyncio
from typing import Any

import aiohttp
from tests.e2e.fleets import FleetUnderTest, fleet_of
from tests.e2e.server_support import data_of, eventually
from tests.models import tiny

from rollplane.client.admin import AdminClient
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.rendered import RenderBody, Rendered

WORDS = MockSettings(vocab_tokens=1024)
SLOW = MockSettings(vocab_tokens=1024, step_s=0.01)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "def main"}], "max_tokens": 12, "seed": 5}


def chats(fleet: FleetUnderTest) -> str:
    fleet.frontend.service.texts.directory = tiny.shared_model("qwen3", layers=2)
    return f"{fleet.frontend.url}/v1/chat/completions"


async def test_a_chat_goes_through_the_router_streamed_and_unary_alike() -> None:
    async with fleet_of([WORDS, WORDS]) as fleet, aiohttp.ClientSession() as http:
        url = chats(fleet)
        async with http.post(url, json=CHAT) as answer:
            assert answer.status == 200, await answer.text()
            whole = await answer.json()
        async with http.post(url, json={**CHAT, "stream": True}) as answer:
            chunks = data_of(await answer.read())

    text = "".join(choice["delta"]["content"] for chunk in chunks[:-1] for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert whole["rollplane"]["worker"] in ("worker-0", "worker-1")
    assert whole["choices"][0]["policy_versions"] == [["initial", 0]]


async def test_media_are_processed_by_a_worker_and_come_back_as_features() -> None:
    asked: list[RenderBody] = []

    async def render(body: RenderBody) -> Rendered:
        asked.append(body)
        return Rendered(token_ids=[*body.token_ids, 9], features={"mm_hashes": {"image": ["h"]}})

    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    async with fleet_of([WORDS]) as fleet, aiohttp.ClientSession() as http:
        fleet.frontend.service.texts.directory = tiny.shared_model("qwen-vl")
        url = f"{fleet.frontend.url}/v1/chat/completions/render"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        async with http.post(url, json=body) as answer:
            unable = answer.status, await answer.text()
        fleet.workers[0].worker.engine.render_media = render  # type: ignore[attr-defined]
        async with http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            found = await answer.json()

    assert unable[0] == 400
    assert "makes no features" in unable[1]
    (one,) = asked
    assert [part.url for part in one.content_parts] == ["data:image/png;base64,AA=="]
    assert found["token_ids"] == [*one.token_ids, 9]
    assert found["features"] == {"mm_hashes": {"image": ["h"]}}


async def test_a_hang_up_ends_every_prompts_work() -> None:
    async with fleet_of([SLOW]) as fleet, aiohttp.ClientSession() as http:
        fleet.frontend.service.texts.directory = tiny.shared_model("qwen3", layers=2)
        body = {"prompt": [[5, 6], [7, 8]], "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with http.post(f"{fleet.frontend.url}/v1/completions", json=body) as answer:
            await answer.content.readany()

        async def idle() -> bool:
            return fleet.workers[0].worker.live_requests == 0

        await eventually(idle)


async def test_a_chat_is_held_while_the_fleet_is_paused() -> None:
    async with fleet_of([WORDS]) as fleet, aiohttp.ClientSession() as http, AdminClient(fleet.frontend.url) as admin:
        url = chats(fleet)
        await admin.pause()
        asked = asyncio.create_task(http.post(url, json=CHAT).__aenter__())

        async def held() -> bool:
            return fleet.frontend.service.lifecycle.in_flight == 1

        await eventually(held)
        await admin.resume()
        answer = await asked
        assert answer.status == 200
        await answer.read()
