"""One set of weights, two ways to it: our vLLM engine in process and the sidecar before vLLM's Rust server."""

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from tests.models.tiny import shared_model
from tests.real import processes

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.protocol.request import parse_request
from rollplane.testing import answer

pytestmark = pytest.mark.timeout(300)

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True},
    {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True},
    {"temperature": 1.0, "seed": 8, "max_tokens": 64},
    {"temperature": 1.0, "seed": 9, "max_tokens": 24, "logit_bias": {"40": 2.5}, "stop_token_ids": [40]},
]
BODIES = [
    json.dumps(
        {"token_ids": [300 + 7 * i + j for j in range(12 + 9 * i)], "sampling_params": {**params, "logprobs": 0}}
    )
    for i, params in enumerate(SAMPLING)
]


@pytest.fixture(scope="module")
def in_process() -> list[dict[str, Any]]:
    """The answers of an engine that is gone when this returns."""
    python = processes.VLLM_ENV / "bin" / "python"
    script = processes.ROOT / "tests" / "real" / "answer_text.py"
    done = subprocess.run(
        [str(python), str(script), str(shared_model("qwen3")), *BODIES],
        env=os.environ | processes.VLLM_SETTINGS,
        cwd=processes.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    return found


@pytest.fixture(scope="module")
def server(in_process: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    # Of the sampling distribution, as our engine in process starts vLLM; the default is of the raw logits.
    arguments = ["--dtype", "float32", "--max-num-batched-tokens", "4096", "--logprobs-mode", "processed_logprobs"]
    with processes.vllm_rs(shared_model("qwen3"), log, arguments=arguments) as found:
        yield found


@pytest.fixture
async def engine(server: processes.Server) -> AsyncIterator[GrpcEngine]:
    engine = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, start_timeout_s=20))
    await engine.start()
    yield engine
    await engine.close()


async def test_tokens_and_logprobs_are_the_same_for_prompt_and_seed(
    engine: GrpcEngine, in_process: list[dict[str, Any]]
) -> None:
    for body, wanted in zip(BODIES, in_process, strict=True):
        choice = (await answer(engine, parse_request(body.encode()))).choices[0]
        assert choice.logprobs is not None
        assert choice.token_ids.tolist() == wanted["token_ids"], body
        assert choice.finish_reason == wanted["finish_reason"]
        np.testing.assert_allclose(choice.logprobs.values, wanted["logprobs"], atol=1e-4)
    assert len({tuple(wanted["token_ids"]) for wanted in in_process}) == len(BODIES)
