"""Real vLLM on a CPU. Run with the Python of `scripts/make_vllm_env.sh`; one engine per module, one at a time."""

import os

# Read by vLLM when it is imported and by the processes it starts.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest

START_AND_TEST_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(START_AND_TEST_S))
