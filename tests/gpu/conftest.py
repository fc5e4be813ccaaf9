"""What a CPU cannot show. By hand: `python -m pytest -n 0 -m gpu tests/gpu` with the CUDA build of vLLM installed."""

import os

import pytest

# Read by vLLM when it is imported and by the processes it starts.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


START_AND_TEST_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(START_AND_TEST_S))
