"""The preflight over vLLM's own parser: nothing is started, and its arguments are held to what it takes."""

import pytest
from tests.models.tiny import shared_model

from rollplane.cli.check import findings
from rollplane.config import load_settings


@pytest.mark.parametrize(
    ("arguments", "state", "says"),
    [
        (["--enforce-eager", "--max-num-batched-tokens", "512"], "ok", "arguments of its own"),
        (["--no-such-argument", "1"], "fail", "no-such-argument"),
        (["--max-num-batched-tokens", "many"], "fail", "max-num-batched-tokens"),
    ],
)
def test_vllms_arguments_are_read_before_it_starts(arguments: list[str], state: str, says: str) -> None:
    flags = {"server.port": 0, "worker.engine": "vllm", "worker.model": str(shared_model("qwen3"))}
    found = {
        each.name: each for each in findings(load_settings(env={}, flags={**flags, "worker.engine_args": arguments}))
    }

    assert found["engine"].state == "ok", found["engine"].says
    assert found["engine flags"].state == state, found["engine flags"].says
    assert says in found["engine flags"].says
