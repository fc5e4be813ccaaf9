"""Routed experts and sampling masks of vLLM's model runner V2, which needs a GPU."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.models.tiny import shared_model
from tests.vllm.support import ask, logprobs, prompt, running, tokens
from transformers import AutoModelForCausalLM

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.errors import InvalidRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAYERS, TOP_K = 4, 2
SAMPLING = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    arguments = ("--enable-return-routed-experts", "--return-sampling-mask", "--max-logprobs", "-1")
    async with running(shared_model("qwen3-moe"), *arguments, "--gpu-memory-utilization", "0.2") as started:
        yield started


def chosen_by_transformers(token_ids: list[int]) -> np.ndarray[Any, Any]:
    """[tokens, layers, top_k]"""
    model = AutoModelForCausalLM.from_pretrained(shared_model("qwen3-moe"), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    found: np.ndarray[Any, Any] = torch.stack([layer.topk(TOP_K).indices for layer in logits], dim=1).numpy()
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_routes_are_those_of_transformers(engine: VllmEngine, stream: bool) -> None:
    """As sets per token and layer: two experts of nearly one weight may change places between kernels."""
    token_ids = prompt(40)

    answer = await ask(engine, token_ids, stream=stream, options={"routed_experts": True}, **SAMPLING)

    routes = answer.choices[0].routed_experts
    assert routes is not None
    assert routes.array.shape == (40 + 8 - 1, LAYERS, TOP_K)
    expected = chosen_by_transformers([*token_ids, *tokens(answer)[:-1]])
    same = (np.sort(routes.array, axis=-1) == np.sort(expected, axis=-1)).all(axis=-1)
    assert same.mean() > 0.99


async def test_the_start_leaves_rows_out_and_nothing_else(engine: VllmEngine) -> None:
    found = []
    for start in (0, 30):
        answer = await ask(engine, options={"routed_experts": True}, routed_experts_prompt_start=start, **SAMPLING)
        found.append(answer.choices[0].routed_experts)

    whole, tail = found
    assert whole is not None
    assert tail is not None
    assert tail.start == 30
    assert tail.array.tolist() == whole.array[30:].tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mask_is_the_support_of_its_token(engine: VllmEngine, stream: bool) -> None:
    asked = {**SAMPLING, "top_k": 20, "top_p": 0.9, "logprobs": -1}

    answer = await ask(engine, stream=stream, options={"sampling_mask": True}, **asked)

    choice = answer.choices[0]
    mask = choice.sampling_mask
    assert mask is not None
    assert choice.logprobs is not None
    assert choice.logprobs.alternatives is not None
    others = choice.logprobs.alternatives
    for row, token in enumerate(tokens(answer)):
        ids = mask.ids[mask.offsets[row] : mask.offsets[row + 1]]
        assert token in ids
        assert 1 <= ids.size <= 20
        place = slice(others.offsets[row], others.offsets[row + 1])
        inside = np.isin(others.ids[place], ids)
        assert np.exp(others.values[place][inside]).sum() == pytest.approx(1.0, abs=1e-3)


async def test_a_mask_without_truncation_is_the_whole_vocabulary(engine: VllmEngine) -> None:
    """vLLM returns none unless something truncates; it is asked for a top-k as wide as the vocabulary then."""
    answer = await ask(engine, options={"sampling_mask": True}, **SAMPLING)
    assert answer.choices[0].sampling_mask is not None
    assert np.diff(answer.choices[0].sampling_mask.offsets).tolist() == [1024] * SAMPLING["max_tokens"]


async def test_the_widest_lists_are_taken_and_wider_ones_refused(engine: VllmEngine) -> None:
    """A wider list ends the engine on model runner V2; the control request shows that it lives."""
    control = logprobs(await ask(engine, logprobs=0, **SAMPLING))
    info = engine.info
    for name, most in (
        ("stop_token_ids", info.max_stop_token_ids),
        ("allowed_token_ids", info.max_allowed_token_ids),
    ):
        assert most is not None
        ids = list(range(most))
        await ask(engine, max_tokens=2, temperature=0.0, **{name: ids})
        with pytest.raises(InvalidRequest, match=name):
            await ask(engine, max_tokens=2, temperature=0.0, **{name: [*ids, 7]})

    np.testing.assert_allclose(logprobs(await ask(engine, logprobs=0, **SAMPLING)), control, atol=1e-3)
