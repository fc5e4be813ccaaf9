"""A real mixture-of-experts engine on a CPU, whose experts vLLM packs once and would serve unpacked after a reload."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from tests.models.tiny import shared_model
from tests.vllm.support import ask, logprobs, running, tokens

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.errors import InvalidRequest
from rollplane.protocol.info import MoeShape

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    async with running(shared_model("qwen3-moe")) as started:
        yield started


async def test_the_shape_of_its_routes_is_known_and_routes_are_refused_without_capture(engine: VllmEngine) -> None:
    assert engine.info.moe == MoeShape(layers=4, top_k=2, num_experts=8)
    with pytest.raises(InvalidRequest, match="without route capture"):
        await ask(engine, options={"routed_experts": True})


async def test_the_same_weights_again_change_nothing_and_others_do(engine: VllmEngine) -> None:
    """Half a reload shows as other tokens under the same weights."""
    made = [await ask(engine, temperature=0.0, max_tokens=16, logprobs=0)]
    for i, seed in enumerate((0, 1, 0)):
        staged = await engine.stage_weights(str(shared_model("qwen3-moe", **({"seed": seed} if seed else {}))))
        await engine.pause("keep")
        await engine.apply_weights(staged, version=f"step-{i}")
        await engine.resume()
        made.append(await ask(engine, temperature=0.0, max_tokens=16, logprobs=0))

    first, same, other, back = made
    assert tokens(first) == tokens(same) == tokens(back) != tokens(other)
    np.testing.assert_allclose(logprobs(first), logprobs(back), atol=1e-5)
    np.testing.assert_allclose(logprobs(first), logprobs(same), atol=1e-5)
