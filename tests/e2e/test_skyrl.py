"""The names that only SkyRL's client uses; the client itself runs in `tests/clients`."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pybase64
import pytest
from tests.e2e.server_support import Served, serving, strict_json

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.info import MoeShape
from rollplane.worker import Worker

PATH = "/skyrl/v1/generate"
BODY: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "sampling_params": {"max_tokens": 4, "logprobs": 0, "seed": 3, "ignore_eos": True},
    "cache_salt": "train_3",
}


@pytest.fixture
async def moe() -> AsyncIterator[Served]:
    settings = MockSettings(max_model_len=64, moe=MoeShape(layers=2, top_k=2, num_experts=300))
    async with serving(Worker(MockEngine(settings))) as served:
        yield served


async def ask(served: Served, body: dict[str, Any], *, status: int = 200) -> dict[str, Any]:
    async with served.post(PATH, body) as answer:
        content = await answer.read()
        assert answer.status == status, content
        return strict_json(content)


async def test_routed_experts_are_lists_of_the_rows_that_generate_gives(moe: Served) -> None:
    named = (await ask(moe, BODY))["choices"][0]
    own = (await moe.generate(BODY))["choices"][0]

    packed = own["routed_experts"]
    raw = pybase64.b64decode(packed["data"])
    rows = np.frombuffer(raw, packed["dtype"]).reshape(packed["shape"])
    assert named["routed_experts"] == rows.tolist()
    assert len(named["routed_experts"]) == 3 + 4 - 1
    assert {**named, "routed_experts": None} == {**own, "routed_experts": None}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stream": True}, "stream"),
        ({"rollplane": {"routed_experts": False}}, "rollplane.routed_experts"),
        ({"rollplane": {"routed_experts_encoding": "npy"}}, "rollplane.routed_experts_encoding"),
        (
            {"sampling_params": {**BODY["sampling_params"], "routed_experts_prompt_start": 1}},
            "sampling_params.routed_experts_prompt_start",
        ),
    ],
)
async def test_what_lists_cannot_say_is_refused(moe: Served, change: dict[str, Any], param: str) -> None:
    refused = await ask(moe, {**BODY, **change}, status=400)

    assert refused["error"]["param"] == param


async def test_a_model_without_routes_is_refused_rather_than_answered_without_them() -> None:
    async with serving(Worker(MockEngine(MockSettings()))) as dense:
        refused = await ask(dense, BODY, status=400)

    assert "routed_experts" in refused["error"]["param"]


async def test_an_ended_session_is_taken_note_of(moe: Served) -> None:
    async with moe.post("/finish_session", params={"session_id": "7"}) as answer:
        assert answer.status == 200
    async with moe.post("/finish_session") as answer:
        assert answer.status == 400
