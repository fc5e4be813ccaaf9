"""vLLM 0.29 on a CPU, the last release that returns routed experts there, with a sparse block it can ask for them.

Run with the Python of `scripts/make_vllm_env.sh .venv-vllm-029 0.29.0`.
"""

import os
import sys
from pathlib import Path

import pytest

PLUGIN = str(Path(__file__).parent / "plugin")

# Read by vLLM when it is imported and by the processes it starts.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["PYTHONPATH"] = os.pathsep.join([PLUGIN, *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, PLUGIN)

START_AND_TEST_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm_029" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(START_AND_TEST_S))
