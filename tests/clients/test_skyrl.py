"""SkyRL's remote client, unmodified: data through `proxy_url`, control to `server_urls`; both are one worker of ours here."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.clients.conftest import MODEL
from tests.clients.skyrl_client import load

PROMPTS = [[8, 9, 10], [301, 302]]
SAMPLING = {"max_tokens": 4, "temperature": 1.0, "logprobs": 0, "seed": 3, "ignore_eos": True}


def batch(**fields: Any) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "session_ids": ["a", "b"], **fields}


@pytest.fixture
async def client(server: str) -> AsyncIterator[Any]:
    made = load().RemoteInferenceClient(proxy_url=server, server_urls=[server], data_parallel_size=1, model_name=MODEL)
    async with made as opened:
        yield opened


async def test_it_generates_and_detokenizes(client: Any) -> None:
    made = await client.generate(batch(cache_salt="train_3"))

    assert [len(ids) for ids in made["response_ids"]] == [4, 4]
    assert [len(row) for row in made["response_logprobs"]] == [4, 4]
    assert all(value < 0 for row in made["response_logprobs"] for value in row)
    assert made["stop_reasons"] == ["length", "length"]
    assert all(isinstance(text, str) and text for text in made["responses"])


async def test_routed_experts_come_as_lists_from_the_prompts_first_token_on(client: Any) -> None:
    plain = await client.generate(batch())
    client.enable_return_routed_experts = True

    made = await client.generate(batch())

    assert made["response_ids"] == plain["response_ids"]
    routes = made["rollout_expert_indices"]
    assert [len(rows) for rows in routes] == [len(prompt) + 4 - 1 for prompt in PROMPTS]
    assert {len(row) for rows in routes for row in rows} == {2}, "a list per layer"
    assert {len({*layer}) for rows in routes for row in rows for layer in row} == {2}, "two experts each"


async def test_it_samples_with_scored_prompts(client: Any) -> None:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
        "num_samples": 2,
        "sampling_params": {"temperature": 1.0, "max_tokens": 3, "seed": 1},
        "session_id": "a",
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    made = await client.sample({"json": body})

    assert [len(each["tokens"]) == len(each["logprobs"]) for each in made["sequences"]] == [True, True]
    assert made["prompt_logprobs"][0] is None
    assert all(value < 0 for value in made["prompt_logprobs"][1:])
    assert [None if row is None else len(row) for row in made["topk_prompt_logprobs"]] == [None, 2, 2]


async def test_text_goes_both_ways_over_http(client: Any) -> None:
    (ids,) = await client.tokenize(["def main"])
    assert await client.detokenize([ids]) == ["def main"]

    messages = [{"role": "user", "content": "def main"}]
    chat = await client.chat_completion({"json": {"messages": messages, "max_tokens": 3, "session_id": "a"}})
    text = await client.completion({"json": {"prompt": "def main", "max_tokens": 3}})
    rendered = await client.render_chat_completion({"json": {"messages": messages}})

    assert isinstance(chat["choices"][0]["message"]["content"], str)
    assert text["usage"]["completion_tokens"] == 3
    assert rendered["token_ids"][: len(ids)] != []
    assert chat["usage"]["prompt_tokens"] == len(rendered["token_ids"])


async def test_an_ended_session_is_no_warning(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await client.finish_session("a")

    assert caplog.records == []


async def test_a_paused_server_holds_what_is_asked_and_goes_on(client: Any) -> None:
    assert await client.get_world_size() == (1, 1)
    await client.pause()
    asked = asyncio.create_task(client.generate(batch()))
    await client.reset_prefix_cache()
    assert not asked.done()
    await client.resume()

    assert [len(ids) for ids in (await asked)["response_ids"]] == [4, 4]


async def test_an_adapter_is_replaced_under_its_name(client: Any, adapters: list[Path]) -> None:
    made = []
    for path in adapters:
        await client.load_lora_adapter("skyrl-lora", str(path))
        made.append((await client.generate(batch(), model="skyrl-lora"))["response_logprobs"])
    await client.unload_lora_adapter("skyrl-lora")

    assert made[0] != made[1]
    with pytest.raises(aiohttp.ClientResponseError) as gone:
        await client.generate(batch(), model="skyrl-lora")
    assert gone.value.status == 404


async def test_what_is_not_offered_is_an_error_at_once(client: Any) -> None:
    """Its weight streams name code in a worker extension; sleep is for engines that share the trainer's device."""
    calls = ((client.start_weight_update(), 404), (client.finish_weight_update(), 404), (client.sleep(), 400))
    for refused, status in calls:
        with pytest.raises(aiohttp.ClientResponseError) as error:
            await refused
        assert error.value.status == status
