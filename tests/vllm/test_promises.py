"""A real vLLM engine with LoRA keeps the promises of `rollplane.engines.base`, and survives what kills one."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.models.tiny import make_lora, shared_model
from tests.vllm.support import running

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.testing import CHECKS, Check, Subject, run_check

pytestmark = pytest.mark.asyncio(loop_scope="module")

LACKS = {
    "masks_are_the_support",  # need vLLM's model runner V2, which needs Triton
    "routes_begin_where_asked",
    "prompts_are_scored_alike",  # two prompts scored in one step end vLLM's CPU engine when LoRA is on
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    arguments = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "8")
    # Without isolation by version salts reach vLLM, and its events, as they are; test_dense.py runs with it.
    async with running(shared_model("qwen3"), *arguments, isolate_by_version=False) as started:
        yield started


@pytest.fixture(scope="module")
def subject(engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    base = shared_model("qwen3")
    root = tmp_path_factory.mktemp("adapters")
    adapters = [str(make_lora(root / f"adapter-{i}", base=base, seed=i)) for i in range(2)]
    weights = [str(shared_model("qwen3", seed=seed)) for seed in (1, 2)]
    return Subject(engine=engine, weights=weights, adapters=adapters)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_promise(subject: Subject, check: Check) -> None:
    why = await run_check(check, subject)

    assert (why is not None) == (check.__name__ in LACKS), why
