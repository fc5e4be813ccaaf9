"""A real vLLM engine with LoRA keeps the promises of `rollplane.engines.base`, and survives what kills one."""

import pytest
import pytest_asyncio
from tests.contract.native_cases import NO_NATIVE
from tests.models.tiny import shared_model
from tests.vllm.support import LastingEngine

from rollplane.testing import CHECKS, Check, Subject, run_check

pytestmark = pytest.mark.asyncio(loop_scope="session")

LACKS = {
    "masks_are_the_support",  # need vLLM's model runner V2, which needs Triton
    "routes_begin_where_asked",
    *NO_NATIVE,
    "prompts_are_scored_alike",  # two prompts scored in one step end vLLM's CPU engine when LoRA is on
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def subject(lora_engine: LastingEngine, lora_paths: list[str]) -> Subject:
    await lora_engine.start()
    weights = [str(shared_model("qwen3", seed=seed)) for seed in (1, 2)]
    return Subject(engine=lora_engine, weights=weights, adapters=lora_paths[:2])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_promise(subject: Subject, check: Check) -> None:
    why = await run_check(check, subject)

    assert (why is not None) == (check.__name__ in LACKS), why
