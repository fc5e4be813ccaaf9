"""What log-probabilities mean and that none is lost, through every hop, on real models where the numbers matter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e.hops import FRONTEND, FULL_HOPS, HOPS, chain
from tests.e2e.server_support import GENERATE, Served, strict_json
from tests.models import tiny
from transformers import AutoModelForCausalLM

from rollplane.client.client import Client
from rollplane.client.replay import masked_logprobs
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.protocol.response import GenerateResponse

PROMPT = [5, 6, 7, 300, 301]


def embedded(model: Path) -> EmbeddedEngine:
    return EmbeddedEngine(EmbeddedSettings(model=str(model), threads=1, max_model_len=512))


def ask(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": sampling}


def logits_of(model: Path, response: GenerateResponse) -> np.ndarray[Any, Any]:
    """What Transformers says of the sampled positions: float32 [T, V], temperature 1."""
    ids = [*PROMPT, *response.choices[0].token_ids.tolist()]
    reference = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1]
    return np.asarray(logits.numpy())


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled(temperature: float) -> None:
    """log_softmax(logits / temperature), and the answer names its mode."""
    model = tiny.shared_model("qwen3", layers=2)
    sampling = {
        "temperature": temperature,
        "top_p": 1.0,
        "logprobs": 0,
        "max_tokens": 24,
        "seed": 2,
        "ignore_eos": True,
    }
    async with chain(FRONTEND, embedded(model)) as made, Client(made.edge.url) as client:
        response = await client.generate(PROMPT, sampling_params=sampling)
        # A second request scores the same ids with the model's own distribution, at temperature 1.
        whole = [*PROMPT, *response.choices[0].token_ids.tolist()]
        scored = await client.generate(whole, sampling_params={"prompt_logprobs": 0, "max_tokens": 1})

    choice = response.choices[0]
    assert response.served_by.logprobs_mode == "sampling"
    assert choice.logprobs is not None
    logits = logits_of(model, response)
    rows = np.arange(choice.token_ids.size)
    assert np.allclose(choice.logprobs.values, log_softmax(logits / temperature)[rows, choice.token_ids], atol=1e-4)
    assert scored.prompt_logprobs is not None
    own = scored.prompt_logprobs.values[scored.prompt_logprobs.offsets[len(PROMPT) : -1]]
    assert np.allclose(own, log_softmax(logits)[rows, choice.token_ids], atol=1e-4)
    assert np.allclose(own, choice.logprobs.values, atol=1e-4) is (temperature == 1.0)


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.7, "top_k": 20}])
async def test_a_mask_lets_a_trainer_renormalise_to_a_ratio_of_one(truncation: dict[str, Any]) -> None:
    model = tiny.shared_model("qwen3", layers=2)
    asked: dict[str, Any] = {"temperature": 0.8, "logprobs": 0, "max_tokens": 24, "seed": 2, "ignore_eos": True}
    async with chain(FRONTEND, embedded(model)) as made, Client(made.edge.url) as client:
        masked = await client.generate(PROMPT, sampling_params=asked | truncation, sampling_mask=True)
        bare = await client.generate(PROMPT, sampling_params=asked | truncation, sampling_mask=False)

    choice = masked.choices[0]
    assert choice.logprobs is not None
    assert choice.sampling_mask is not None
    mask, logits = choice.sampling_mask, logits_of(model, masked)
    trainer = masked_logprobs(logits, choice.token_ids, mask.ids, mask.offsets, temperature=0.8)
    assert np.allclose(np.exp(trainer - choice.logprobs.values), 1.0, atol=1e-3)
    assert masked.served_by.warnings == []
    # Without the mask the ratio is off by the kept mass, and the answer says that it will be.
    unmasked = log_softmax(logits / 0.8)[np.arange(24), choice.token_ids]
    assert np.exp(unmasked - choice.logprobs.values).mean() < 0.95
    assert bare.choices[0].token_ids.tolist() == choice.token_ids.tolist()
    [warning] = bare.served_by.warnings
    assert "no sampling mask" in warning


@pytest.mark.parametrize("hops", HOPS)
async def test_truncation_without_a_mask_is_warned_of_through_every_hop(hops: str) -> None:
    async with chain(hops, MockSettings()) as made:
        warned = await made.edge.generate(ask(top_p=0.8, logprobs=1, max_tokens=3))
        stream = await made.edge.chunks(ask(top_p=0.8, logprobs=1, max_tokens=3))
        plain = await made.edge.generate(ask(logprobs=1, max_tokens=3))

    assert "no sampling mask" in warned["rollplane"]["warnings"][0]
    assert stream[-2]["rollplane"]["warnings"] == warned["rollplane"]["warnings"]
    assert "warnings" not in plain["rollplane"]


@pytest.mark.parametrize("hops", HOPS)
async def test_json_is_strict_and_infinite_alternatives_are_floored_and_counted(hops: str) -> None:
    async with chain(hops, MockSettings()) as made:
        tree = await _raw(made.edge, ask(allowed_token_ids=[7], logprobs=5, max_tokens=3))

    [choice] = tree["choices"]
    tops = [top["logprob"] for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"]]
    assert choice["token_ids"] == [7, 7, 7]
    assert all(-9999.0 <= value <= 0.0 for value in tops)
    assert tops.count(-9999.0) == tree["rollplane"].get("floored_logprobs", 0) > 0


async def test_one_allowed_id_on_a_real_model_gives_floored_alternatives() -> None:
    async with chain(FRONTEND, embedded(tiny.shared_model("qwen3", layers=2))) as made:
        tree = await _raw(made.edge, ask(allowed_token_ids=[7], logprobs=5, max_tokens=3))

    tops = [t["logprob"] for entry in tree["choices"][0]["logprobs"]["content"] for t in entry["top_logprobs"]]
    assert len(tops) == 15
    assert tops.count(-9999.0) == tree["rollplane"]["floored_logprobs"] == 12


async def _raw(edge: Served, body: dict[str, Any]) -> dict[str, Any]:
    """The answer as a parser reads it that takes neither NaN nor Infinity."""
    async with edge.post(GENERATE, body) as answer:
        content = await answer.read()
    assert answer.status == 200, content
    assert not any(word in content for word in (b"NaN", b"Infinity"))
    tree: dict[str, Any] = strict_json(content)
    return tree


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_a_sampled_logprob_that_is_no_number_is_the_engines_error(hops: str, stream: bool) -> None:
    async with chain(hops, MockSettings(faults=(Fault(kind="nan_logprob", times=9),))) as made:
        body = {**ask(logprobs=1, max_tokens=4), "stream": stream}
        async with made.edge.post(GENERATE, body) as answer:
            content = await answer.read()

    assert b"engine_protocol_error" in content
    assert b"NaN" not in content
    assert answer.status == (200 if stream and content.startswith(b"data: ") else 502)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hops", HOPS)
async def test_no_logprob_is_lost_on_the_way(hops: str, n: int) -> None:
    sampling = {"n": n, "seed": 1, "logprobs": 2, "max_tokens": 12, "ignore_eos": True}
    async with chain(hops, MockSettings(vocab_tokens=512)) as made, Client(made.edge.url) as client:
        packed = await client.generate(PROMPT, sampling_params=sampling)
        async with client.stream(PROMPT, sampling_params=sampling) as stream:
            async for delta in stream:
                assert delta.logprobs is not None
                assert delta.logprobs.values.size == delta.token_ids.size
        tree = await _raw(made.edge, ask(**sampling))

    assert len(packed.choices) == n
    for whole, folded, plain in zip(packed.choices, stream.response.choices, tree["choices"], strict=True):
        assert whole.logprobs is not None
        assert folded.logprobs is not None
        assert whole.logprobs.alternatives is not None
        assert folded.logprobs.alternatives is not None
        assert whole.logprobs.values.size == whole.token_ids.size == 12
        assert (np.diff(whole.logprobs.alternatives.offsets) == 2).all()
        assert whole.token_ids.tolist() == folded.token_ids.tolist() == plain["token_ids"]
        content = plain["logprobs"]["content"]
        assert whole.logprobs.values.tolist() == folded.logprobs.values.tolist() == [e["logprob"] for e in content]
        tops = [top["logprob"] for entry in content for top in entry["top_logprobs"]]
        assert whole.logprobs.alternatives.values.tolist() == folded.logprobs.alternatives.values.tolist() == tops
