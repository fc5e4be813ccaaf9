"""A real mixture-of-experts engine on a CPU, whose experts vLLM packs once and would serve unpacked after a reload."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.torch import load_file
from tests.e2e.server_support import serving
from tests.models.tiny import shared_model
from tests.vllm.reference import Reference
from tests.vllm.support import LastingEngine, ask, logprobs, prompt, running, settings_of, tokens

from rollplane.client.weights import WeightSender
from rollplane.errors import InvalidRequest
from rollplane.protocol.info import MoeShape
from rollplane.protocol.response import GenerateResponse
from rollplane.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "logprobs": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LastingEngine]:
    started = LastingEngine(settings_of(shared_model("qwen3-moe")))
    await started.start()
    yield started
    await started.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def fresh(engine: LastingEngine) -> GenerateResponse:
    """What the engine said of the weights it began with, before any update."""
    return await greedy(engine)


async def test_the_shape_of_its_routes_is_known_and_routes_are_refused_without_capture(engine: LastingEngine) -> None:
    assert engine.info.moe == MoeShape(layers=4, top_k=2, num_experts=8)
    with pytest.raises(InvalidRequest, match="without route capture"):
        await ask(engine, options={"routed_experts": True})


async def test_the_same_weights_again_change_nothing_and_others_are_transformers_own(
    engine: LastingEngine, fresh: GenerateResponse
) -> None:
    """Half a reload shows as other tokens under the same weights, and as other log-probabilities than a whole model's."""
    made = [fresh]
    for i, seed in enumerate((0, 1, 0)):
        staged = await engine.stage_weights(str(checkpoint(seed)))
        await engine.pause("keep")
        await engine.apply_weights(staged, version=f"step-{i}")
        await engine.resume()
        made.append(await greedy(engine))

    first, same, other, back = made
    assert tokens(first) == tokens(same) == tokens(back) != tokens(other)
    np.testing.assert_array_equal(logprobs(first), logprobs(back))
    np.testing.assert_array_equal(logprobs(first), logprobs(same))
    for seed, response in ((0, first), (1, other)):
        Reference(checkpoint(seed)).check(prompt(), response)


async def test_experts_by_broadcast_are_those_of_the_disk_and_of_an_engine_that_began_with_them(
    engine: LastingEngine, fresh: GenerateResponse
) -> None:
    staged = await engine.stage_weights(str(checkpoint(1)))
    await engine.pause("keep")
    await engine.apply_weights(staged, version="disk")
    await engine.resume()
    from_disk = await greedy(engine)
    made = []
    async with serving(Worker(engine)) as served, WeightSender([served.url], bucket_bytes=1 << 18) as sender:
        for seed in (1, 2, 0):
            [report] = (
                await sender.send(load_file(checkpoint(seed) / "model.safetensors"), version=f"v{seed}")
            ).values()
            assert report.applied
            made.append(await greedy(engine))

    one, two, none = made
    assert tokens(one) == tokens(from_disk)
    np.testing.assert_array_equal(logprobs(one), logprobs(from_disk))
    Reference(checkpoint(2)).check(prompt(), two)
    assert tokens(none) == tokens(fresh)
    np.testing.assert_array_equal(logprobs(none), logprobs(fresh))


@pytest.mark.full
async def test_updates_by_both_ways_equal_a_second_engine_that_began_with_the_weights(engine: LastingEngine) -> None:
    """To the bit, on prompts of several lengths."""
    async with running(checkpoint(2)) as other:
        wanted = [await ask(other, prompt(n, variant=n), **GREEDY) for n in (1, 7, 40, 200)]
    for way in ("disk", "broadcast"):
        async with serving(Worker(engine)) as served:
            if way == "disk":
                await served.service.worker.update_from_disk(str(checkpoint(2)), version="v2")  # type: ignore[union-attr]
            else:
                async with WeightSender([served.url]) as sender:
                    await sender.send(load_file(checkpoint(2) / "model.safetensors"), version="v2")
            found = [await ask(engine, prompt(n, variant=n), **GREEDY) for n in (1, 7, 40, 200)]
        for ours, theirs in zip(found, wanted, strict=True):
            assert tokens(ours) == tokens(theirs), way
            np.testing.assert_array_equal(logprobs(ours), logprobs(theirs))


def checkpoint(seed: int) -> Path:
    return shared_model("qwen3-moe", **({"seed": seed} if seed else {}))


async def greedy(engine: LastingEngine) -> GenerateResponse:
    return await ask(engine, prompt(), **GREEDY)
