"""Answers of many megabytes, which are written in pieces: what arrives is what the engine said, whatever the form."""

import msgspec
import numpy as np
import pybase64
import pytest
from tests.e2e.hops import FULL_HOPS, chain
from tests.e2e.server_support import data_of

from rollplane.protocol.answer import decode_msgpack
from rollplane.protocol.artifacts import Alternatives, TokenLogprobs
from rollplane.protocol.events import EndEvent, PromptEvent
from rollplane.protocol.info import Capabilities, MoeShape
from rollplane.testing import ScriptedEngine, script_choice, scripted_info

TOKENS, LAYERS, TOP_K = 9_000, 24, 8
BODY = {"token_ids": [5], "sampling_params": {"logprobs": 1}, "rollplane": {"routed_experts": True}}


def big_engine() -> tuple[ScriptedEngine, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 1000, TOKENS).astype(np.int32)
    values = -rng.random(TOKENS).astype(np.float32)
    routes = rng.permuted(np.tile(np.arange(64, dtype=np.uint8), (TOKENS, LAYERS, 1)), axis=2)[:, :, :TOP_K].copy()
    choice = script_choice(ids.tolist(), routed_experts=routes)
    ones = np.ones(TOKENS, np.int32)
    top = Alternatives(ids=ids, values=values, ranks=ones, offsets=np.arange(TOKENS + 1, dtype=np.int32))
    choice.logprobs = TokenLogprobs(values=values, alternatives=top)
    info = scripted_info(
        max_model_len=20_000,
        moe=MoeShape(layers=LAYERS, top_k=TOP_K, num_experts=64),
        capabilities=Capabilities(routed_experts=True),
    )
    return ScriptedEngine([PromptEvent(prompt_tokens=1), choice, EndEvent()], info=info), ids, values, routes


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_a_big_answer_arrives_whole_in_every_form(hops: str) -> None:
    engine, ids, values, routes = big_engine()
    async with chain(hops, engine) as served:
        for accept in ("application/json", "application/msgpack"):
            async with served.edge.post("/inference/v1/generate", BODY, headers={"Accept": accept}) as response:
                content = await response.read()
                assert response.status == 200
                assert int(response.headers["content-length"]) == len(content)
            if accept.endswith("msgpack"):
                choice = decode_msgpack(content).choices[0]
                assert choice.logprobs is not None
                assert choice.routed_experts is not None
                found = choice.token_ids, choice.logprobs.values, choice.routed_experts.array
            else:
                found = read(msgspec.json.decode(content)["choices"][0])
            assert all(np.array_equal(a, b) for a, b in zip(found, (ids, values, routes), strict=True))

        async with served.edge.post("/inference/v1/generate", {**BODY, "stream": True}) as response:
            chunks = data_of(await response.read())
        assert chunks[-1] == "[DONE]"
        last = [c for chunk in chunks if isinstance(chunk, dict) for c in chunk["choices"]]
        found = read(last[0])
        assert len(last) == 1
        assert all(np.array_equal(a, b) for a, b in zip(found, (ids, values, routes), strict=True))


def read(choice: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, logprobs and routes of a choice in JSON; its alternatives repeat the sampled tokens."""
    content = choice["logprobs"]["content"]
    assert [entry["top_logprobs"][0]["token"] for entry in content] == [entry["token"] for entry in content]
    values = np.array([entry["logprob"] for entry in content], dtype=np.float32)
    routes = choice["routed_experts"]
    array = np.frombuffer(pybase64.b64decode(routes["data"]), routes["dtype"]).reshape(routes["shape"])
    return np.array(choice["token_ids"], dtype=np.int32), values, array
