"""Routed experts of a real vLLM behind Dynamo's frontend: the release that returns them on a CPU, with a sparse block that says them.

No release of vLLM returns sampling masks on a CPU (`docs/dynamo.md`); the embedded engine's go through `test_dynamo_engines.py`.
The environment: `scripts/make_vllm_env.sh .venv-vllm-029 0.29.0`, `scripts/add_dynamo_runtime.sh .venv-vllm-029`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.tiny import shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes
from transformers import AutoModelForCausalLM

from rollplane import Client, DynamoClient
from rollplane.client.options import GenerateOptions
from rollplane.errors import InvalidRequest

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

VLLM_029 = processes.ROOT / ".venv-vllm-029"
PLUGIN = processes.ROOT / "tests" / "vllm_029" / "plugin"
PROMPT = [300 + 7 * i for i in range(70)]  # two whole blocks and a part of one
LAYERS, TOP_K = 4, 2

REQUESTS: dict[str, GenerateOptions] = {
    "greedy": {"sampling_params": {"max_tokens": 8, "temperature": 0, "logprobs": 2}},
    "prompt": {"sampling_params": {"max_tokens": 4, "temperature": 0, "prompt_logprobs": 1}},
    "sampled": {"sampling_params": {"max_tokens": 8, "top_k": 5, "top_p": 0.9, "seed": 3, "logprobs": 1}},
    "start": {"sampling_params": {"max_tokens": 5, "seed": 2, "logprobs": 0, "routed_experts_prompt_start": 64}},
    "stop": {"sampling_params": {"max_tokens": 400, "seed": 3, "stop": ["e", "zz"], "logprobs": 0}},
}


@dataclass(frozen=True)
class Rig:
    theirs: processes.Server
    ours: processes.Server
    model: Path


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One worker with vLLM behind Dynamo's frontend and ours."""
    root = tmp_path_factory.mktemp("dynamo-routes")
    model = shared_model("qwen3-moe")
    with (
        deployment.frontend(root / "kv", root / "frontend.log") as theirs,
        deployment.vllm_worker(
            root / "kv",
            root / "v.log",
            model=model,
            arguments=["--enable-return-routed-experts"],
            environment={"PYTHONPATH": str(PLUGIN)},
            env=VLLM_029,
        ),
        deployment.own_frontend(root / "own.log", arguments=["--dynamo-rl-url", theirs.rl_url]) as ours,
    ):
        deployment.until(lambda: deployment.standing(ours) == [None], root / "own.log")
        deployment.until(lambda: "roll" in deployment.models(theirs), theirs.log)
        yield Rig(theirs, ours, model)


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_vllms_routes_are_the_same_behind_both_frontends(rig: Rig, name: str) -> None:
    """Cold and from the cache, whose tokens keep their routes; under a salt of each frontend's own, so that each is both."""
    options: GenerateOptions = {**REQUESTS[name], "request_id": name, "model": "roll"}
    async with DynamoClient(rig.theirs.http_url) as theirs, Client(rig.ours.http_url) as ours:
        through = [await theirs.generate(PROMPT, cache_salt=f"{name} a", **options) for _ in range(2)]
        direct = [await ours.generate(PROMPT, cache_salt=f"{name} b", **options) for _ in range(2)]

    start = 64 if name == "start" else 0
    for answer, other in zip(through, direct, strict=True):
        assert deployment.comparable(answer) == deployment.comparable(other)
        assert answer.usage.cached_tokens == other.usage.cached_tokens
        for choice in answer.choices:
            assert choice.routed_experts is not None
            assert choice.routed_experts.start == start
            made = len(PROMPT) + len(choice.token_ids) - 1
            assert choice.routed_experts.array.shape == (made - start, LAYERS, TOP_K)
    if name == "stop":
        assert (through[0].choices[0].finish_reason, through[0].choices[0].stop_reason) == ("stop", "e")
    if name != "prompt":  # those of a prompt are made, not found
        assert [answer.usage.cached_tokens for answer in through] == [0, 64]


async def test_they_are_those_of_transformers(rig: Rig) -> None:
    async with DynamoClient(rig.theirs.http_url) as client:
        answer = await client.generate(PROMPT, model="roll", sampling_params={"max_tokens": 6, "seed": 1})

    [choice] = answer.choices
    whole = [*PROMPT, *choice.token_ids.tolist()[:-1]]
    model = AutoModelForCausalLM.from_pretrained(rig.model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([whole]), output_router_logits=True).router_logits
    expected = torch.stack([layer.topk(TOP_K).indices for layer in logits], dim=1).numpy()
    assert np.unique(expected).size > 4  # a router that always says the same would hide a shift of rows
    assert choice.routed_experts is not None
    assert choice.routed_experts.array.tolist() == expected.tolist()


async def test_a_start_past_the_prompt_is_refused_and_the_engine_lives(rig: Rig) -> None:
    past = {"max_tokens": 2, "routed_experts_prompt_start": len(PROMPT)}
    async with DynamoClient(rig.theirs.http_url) as client:
        with pytest.raises(InvalidRequest, match="routed_experts_prompt_start"):
            await client.generate(PROMPT, model="roll", sampling_params=past)

        answer = await client.generate(PROMPT, model="roll", sampling_params={"max_tokens": 2})

    assert len(answer.choices[0].token_ids) == 2


async def test_masks_are_refused_by_name_where_vllm_has_none(rig: Rig) -> None:
    async with DynamoClient(rig.theirs.http_url) as client:
        with pytest.raises(InvalidRequest, match="sampling_mask"):
            await client.generate(
                PROMPT, model="roll", sampling_params={"max_tokens": 2, "top_k": 3}, sampling_mask=True
            )
