"""Routed experts from a real vLLM through our HTTP route are those that Transformers' router chooses."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.models.tiny import shared_model
from tests.vllm.support import make_engine, prompt
from tests.waiting import until
from transformers import AutoModelForCausalLM

from rollplane.config import ServerSettings
from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.protocol.artifacts import decode_routes_structured
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.testing import make_request, watching
from rollplane.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAYERS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def engine() -> VllmEngine:
    return make_engine(shared_model("qwen3-moe"), "--enable-return-routed-experts")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(engine: VllmEngine) -> AsyncIterator[Worker]:
    serving = Worker(engine)
    await serving.start()
    yield serving
    await serving.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(worker: Worker) -> AsyncIterator[httpx.AsyncClient]:
    service = Service(
        role="worker",
        engine=worker,
        admin=worker,
        worker=worker,
        settings=ServerSettings(),
        keys=KeyRing([], []),
        metrics=Metrics(),
    )
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as made:
        yield made


async def generate(client: httpx.AsyncClient, token_ids: list[int], **fields: Any) -> httpx.Response:
    sampling = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "ignore_eos": True, **fields.pop("sampling", {})}
    body = {"token_ids": token_ids, "sampling_params": sampling, "rollplane": {"routed_experts": True}, **fields}
    return await client.post("/inference/v1/generate", json=body)


def chosen_by_transformers(token_ids: list[int]) -> np.ndarray[Any, Any]:
    """[tokens, layers, top_k], the experts of each token in the order of their weights."""
    model = AutoModelForCausalLM.from_pretrained(shared_model("qwen3-moe"), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    found: np.ndarray[Any, Any] = torch.stack([layer.topk(TOP_K).indices for layer in logits], dim=1).numpy()
    return found


async def test_routes_are_those_of_transformers(client: httpx.AsyncClient) -> None:
    token_ids = prompt(40)

    answer = await generate(client, token_ids)

    [choice] = answer.json()["choices"]
    routes = decode_routes_structured(choice["routed_experts"])
    assert routes.start == 0
    assert routes.array.dtype == np.uint8
    assert routes.array.shape == (40 + 5 - 1, LAYERS, TOP_K)
    expected = chosen_by_transformers([*token_ids, *choice["token_ids"][:-1]])
    assert np.unique(expected).size > 4  # a router that always says the same would hide a shift of rows
    assert routes.array.tolist() == expected.tolist()


async def test_the_start_leaves_rows_out_and_nothing_else(client: httpx.AsyncClient) -> None:
    token_ids = prompt(40, variant=1)
    whole = (await generate(client, token_ids)).json()["choices"][0]

    answer = (await generate(client, token_ids, sampling={"routed_experts_prompt_start": 30})).json()["choices"][0]

    routes = decode_routes_structured(answer["routed_experts"])
    assert answer["token_ids"] == whole["token_ids"]
    assert routes.start == 30
    assert routes.array.tolist() == decode_routes_structured(whole["routed_experts"]).array[30:].tolist()


async def test_the_next_turn_has_the_row_of_the_former_last_token(client: httpx.AsyncClient) -> None:
    """A turn has none for it: it was sampled and not forwarded."""
    first = (await generate(client, prompt(40, variant=6))).json()["choices"][0]
    so_far = [*prompt(40, variant=6), *first["token_ids"], *prompt(10, variant=7)]
    start = 40 + 5 - 1

    warm = (await generate(client, so_far, sampling={"routed_experts_prompt_start": start})).json()["choices"][0]
    salted = {"cache_salt": "cold", "sampling": {"routed_experts_prompt_start": 0}}
    cold = decode_routes_structured((await generate(client, so_far, **salted)).json()["choices"][0]["routed_experts"])

    routes = decode_routes_structured(warm["routed_experts"])
    assert routes.start == start
    assert routes.array.tolist() == cold.array[start:].tolist()
    assert decode_routes_structured(first["routed_experts"]).array.tolist() == cold.array[:start].tolist()


async def test_a_start_past_the_prompt_is_refused_before_it_ends_the_engine(client: httpx.AsyncClient) -> None:
    refused = await generate(client, prompt(40), sampling={"routed_experts_prompt_start": 40})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "sampling_params.routed_experts_prompt_start"
    assert (await generate(client, prompt(40))).status_code == 200


async def test_what_a_cache_holds_keeps_its_routes(client: httpx.AsyncClient) -> None:
    token_ids = prompt(70, variant=2)
    cold = (await generate(client, token_ids)).json()

    warm = (await generate(client, token_ids)).json()

    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert warm["choices"][0]["routed_experts"] == cold["choices"][0]["routed_experts"]


async def test_a_stream_says_its_routes_once_with_its_last_chunk(client: httpx.AsyncClient) -> None:
    token_ids = prompt(40, variant=3)
    whole = (await generate(client, token_ids)).json()["choices"][0]["routed_experts"]

    text = (await generate(client, token_ids, stream=True)).text

    chunks = [httpx.Response(200, text=line[6:]).json() for line in text.splitlines() if line.startswith("data: {")]
    said = [c["routed_experts"] for chunk in chunks for c in chunk["choices"] if c.get("routed_experts") is not None]
    assert said == [whole]


async def test_an_end_before_the_first_token_has_no_row_of_the_right_shape(
    client: httpx.AsyncClient, worker: Worker, engine: VllmEngine
) -> None:
    await engine.pause("keep")
    waiting = asyncio.ensure_future(generate(client, prompt(40), request_id="early"))
    await until(lambda: engine._live_requests())
    assert await worker.abort("early") == 1
    answer = await asyncio.wait_for(waiting, 10)
    await engine.resume()

    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == []
    assert choice["routed_experts"]["shape"] == [0, LAYERS, TOP_K]


async def test_routes_after_an_update_are_the_new_weights(client: httpx.AsyncClient, engine: VllmEngine) -> None:
    token_ids = prompt(40, variant=4)
    before = (await generate(client, token_ids)).json()["choices"][0]["routed_experts"]
    seen = []
    for version, options in (("other", {"seed": 1}), ("back", {})):
        staged = await engine.stage_weights(str(shared_model("qwen3-moe", **options)))
        await engine.pause("keep")
        await engine.apply_weights(staged, version=version)
        await engine.resume()
        seen.append((await generate(client, token_ids)).json()["choices"][0]["routed_experts"])

    assert seen[0]["data"] != before["data"]
    assert seen[1] == before


async def test_routes_from_before_an_update_stay_those_of_the_old_weights(
    client: httpx.AsyncClient, engine: VllmEngine
) -> None:
    """Of a unary request that lives through it and keeps its KV."""
    token_ids, sampling = prompt(40, variant=5), {"max_tokens": 400}
    old = (await generate(client, token_ids, sampling=sampling)).json()["choices"][0]
    staged = await engine.stage_weights(str(shared_model("qwen3-moe", seed=1)))
    pace = make_request(prompt(variant=8), seed=1, max_tokens=600, ignore_eos=True, stream=True)
    waiting = asyncio.ensure_future(generate(client, token_ids, sampling=sampling))
    await until(lambda: engine._live_requests())
    async with watching(engine, pace) as (paced,):  # it comes second, so the first has tokens when this one has
        await paced.until_tokens(20)
        await engine.pause("keep")
        await engine.apply_weights(staged, version="mid")
        await engine.resume()
        choice = (await waiting).json()["choices"][0]
    back = await engine.stage_weights(str(shared_model("qwen3-moe")))
    await engine.pause("wait")
    await engine.apply_weights(back, version="after")
    await engine.resume()

    [_, (version, boundary)] = choice["policy_versions"]
    assert version == "mid"
    assert 0 < boundary < 400
    made, before = (decode_routes_structured(c["routed_experts"]).array for c in (choice, old))
    rows = 40 + boundary - 1  # the last of the old tokens was forwarded by the new weights
    assert made.shape == before.shape == (40 + 400 - 1, LAYERS, TOP_K)
    assert made[:rows].tolist() == before[:rows].tolist()
    assert made[rows:].tolist() != before[rows:].tolist()
