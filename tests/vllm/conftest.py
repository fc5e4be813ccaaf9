"""Real vLLM on a CPU. Run with the Python of `scripts/make_vllm_env.sh`; one engine per module, one at a time."""

import os

# Read by vLLM when it is imported and by the processes it starts.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.models.tiny import make_lora, shared_model
from tests.vllm.support import LastingEngine, settings_of

START_AND_TEST_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(START_AND_TEST_S))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def lora_engine() -> AsyncIterator[LastingEngine]:
    """One dense engine with LoRA for every module that changes its policy; start it first, or a worker over it."""
    arguments = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "8")
    # Without isolation by version salts reach vLLM, and its events, as they are; test_dense.py runs with it.
    engine = LastingEngine(settings_of(shared_model("qwen3"), *arguments, isolate_by_version=False))
    yield engine
    await engine.end()


@pytest.fixture(scope="session")
def lora_paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four adapters of that engine's model, with different contents."""
    root = tmp_path_factory.mktemp("adapters")
    return [str(make_lora(root / f"v{i}", base=shared_model("qwen3"), seed=i)) for i in range(4)]
