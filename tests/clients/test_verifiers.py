"""PyPI `verifiers`: its TrainClient drives a small environment over several turns, its EvalClient a chat."""

from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from tests.clients.conftest import MODEL


def agent_of(client: Any, **sampling: Any) -> Any:
    return vf.make_agent(
        vf.AgentConfig(
            harness={"id": "null"},
            runtime=vf.SubprocessConfig(),
            model=MODEL,
            client=client,
            sampling=vf.SamplingConfig(temperature=1.0, max_tokens=8, **sampling),
        )
    )


@pytest.fixture
def train_client(server: str, tool_tokenizer: Path) -> Any:
    return vf.TrainClientConfig(
        base_url=f"{server}/v1",
        api_key_var="ROLLPLANE_NO_SUCH_KEY",
        renderer=Qwen3RendererConfig(thinking_retention="all"),
        renderer_model_name=str(tool_tokenizer),
    )


async def test_turns_are_stitched_to_one_sequence_with_routes_and_masks(train_client: Any) -> None:
    agent = agent_of(train_client, extra_body={"cache_salt": "7", "top_k": 50})
    async with agent, agent.interaction(vf.Task(vf.TaskData(prompt="hello"))) as dialogue:
        await dialogue.turn()
        await dialogue.turn("second question")
        branch = dialogue.trace.branches[0]

    sampled = sum(branch.sampled_mask)
    tokens = len(branch.token_ids)
    assert sampled >= 2
    assert len(branch.logprobs) in (tokens, sampled)
    assert branch.routed_experts is not None
    assert len(branch.routed_experts) == tokens
    assert branch.sampling_mask is not None


async def test_an_evaluation_streams_a_chat(server: str) -> None:
    agent = agent_of(vf.EvalClientConfig(base_url=f"{server}/v1", api_key_var="ROLLPLANE_NO_SUCH_KEY"))
    async with agent:
        trace = await agent.run(vf.Task(vf.TaskData(prompt="hello")))

    assert trace.branches
    assert not trace.errors
