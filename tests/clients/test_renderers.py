"""PyPI `renderers`: what its `client.generate` makes of our answers, and how it takes our errors."""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from renderers import DefaultRendererConfig, Qwen3RendererConfig, create_renderer
from renderers.base import load_tokenizer
from renderers.client import OverlongPromptError, generate
from tests.clients.conftest import MODEL

MESSAGES = [{"role": "user", "content": "hello"}]
RL_DEFAULTS = {"top_k": -1, "min_p": 0.0, "return_token_ids": True, "temperature": 1.0, "seed": 3}


async def ask(server: str, directory: Path, **changes: Any) -> Any:
    sampling = {"max_tokens": 12, **RL_DEFAULTS, **changes.pop("sampling", {})}
    renderer = create_renderer(load_tokenizer(str(directory)), changes.pop("config", DefaultRendererConfig()))
    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
        return await generate(
            client=client, renderer=renderer, model=MODEL, messages=MESSAGES, sampling_params=sampling, **changes
        )


async def test_a_rendered_chat_comes_back_with_a_logprob_per_token(server: str, moe_model: Path) -> None:
    found = await ask(
        server, moe_model, cache_salt="v0", priority=2, extra_headers={"X-Session-ID": "s1"}, sampling={"top_p": 0.9}
    )

    assert len(found["completion_logprobs"]) == len(found["completion_ids"]) == 12
    assert len(found["sampling_mask"]) == 12
    assert all(token in row for token, row in zip(found["completion_ids"], found["sampling_mask"], strict=True))


async def test_routed_experts_keep_the_layout_that_it_cuts_out_of_the_body(server: str, moe_model: Path) -> None:
    """It looks for the bytes `"routed_experts":{"data":"`; any other layout is decoded the slow way, to text."""
    found = await ask(server, moe_model)

    routed = found["routed_experts"]
    assert isinstance(routed["data"], memoryview)
    rows = len(found["prompt_ids"]) + len(found["completion_ids"]) - 1
    array = np.frombuffer(base64.b64decode(routed["data"]), dtype=routed["dtype"]).reshape(routed["shape"])
    assert (array.shape[0], routed["start"]) == (rows, 0)


async def test_routed_experts_in_vllms_own_encoding_pass_through(server: str, moe_model: Path) -> None:
    """The other encoding, as it would be with `--routes-encoding npy`: a string, for clients with vLLM's models."""
    prompt = load_tokenizer(str(moe_model)).encode("hello")
    async with httpx.AsyncClient(base_url=server) as http:
        body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 4},
            "rollplane": {"routed_experts_encoding": "npy"},
        }
        answer = (await http.post("/inference/v1/generate", json=body)).json()

    routed = answer["choices"][0]["routed_experts"]
    assert isinstance(routed, str)
    assert base64.b64decode(routed).startswith(b"\x93NUMPY")


async def test_a_typed_renderer_stops_at_its_own_tokens(server: str, tool_tokenizer: Path) -> None:
    found = await ask(server, tool_tokenizer, config=Qwen3RendererConfig(thinking_retention="all"))

    assert found["finish_reason"] in ("stop", "length")
    assert found["completion_ids"]


async def test_a_prompt_over_the_context_is_refused_before_it_is_sent(server: str, moe_model: Path) -> None:
    """It reads `max_model_len` from our model cards."""
    with pytest.raises(OverlongPromptError):
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
            await generate(
                client=client,
                renderer=create_renderer(load_tokenizer(str(moe_model)), DefaultRendererConfig()),
                model=MODEL,
                messages=[{"role": "user", "content": "word " * 3000}],
                sampling_params={"max_tokens": 4},
            )


async def test_a_refusal_is_final_and_names_the_field(server: str, moe_model: Path) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await ask(server, moe_model, sampling={"temperature": -1.0})
