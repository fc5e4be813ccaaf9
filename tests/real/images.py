"""Images for real vision engines: what a renderer sends for them, vLLM's own answer, and how answers are compared."""

import functools
import json
import os
import subprocess
from typing import Any

import numpy as np
from tests.models.tiny import IMAGE_PAD_ID, VISION_END_ID, VISION_START_ID, shared_model
from tests.real import processes

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.protocol.request import parse_request
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import answer

PROMPT = [300, 301, VISION_START_ID, IMAGE_PAD_ID, VISION_END_ID, 302, 303]
SAMPLING = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
COLOURS = {"red": "255,0,0", "blue": "0,0,255"}
SERVER_ARGUMENTS = ["--dtype", "float32", "--limit-mm-per-prompt", '{"image":4,"video":0}']
Rendered = dict[str, Any]


def in_vllm(script: str, *words: str) -> dict[str, Any]:
    """What a script beside this file prints, run in vLLM's environment."""
    python = processes.VLLM_ENV / "bin" / "python"
    command = [str(python), str(processes.ROOT / "tests" / "real" / script), str(shared_model("qwen-vl")), *words]
    done = subprocess.run(
        command, env=os.environ | processes.VLLM_SETTINGS, capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


@functools.cache
def rendered() -> dict[str, Rendered]:
    """A 56 x 56 image of each colour, and the same as `NAME-uint8`, see `render_image.py`."""
    ids = ",".join(str(each) for each in PROMPT)
    return in_vllm("render_image.py", "56", "56", ids, *[f"{name}={colour}" for name, colour in COLOURS.items()])


def answered_in_process(colour: str) -> dict[str, Any]:
    """vLLM's own answer to one image, from an engine that is gone when this returns."""
    ids = ",".join(str(each) for each in PROMPT)
    return in_vllm("answer_image.py", "56", "56", COLOURS[colour], ids, str(SAMPLING["max_tokens"]))


async def ask(engine: GrpcEngine, token_ids: list[int], **fields: Any) -> GenerateResponse:
    """A greedy answer to a body."""
    adapter = fields.pop("adapter", None)
    request = parse_request(json.dumps({"token_ids": token_ids, "sampling_params": SAMPLING, **fields}).encode())
    request.adapter = adapter
    return await answer(engine, request)


def numbers(response: GenerateResponse) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Token ids and logprobs of the one choice."""
    choice = response.choices[0]
    assert choice.logprobs is not None
    return choice.token_ids.tolist(), choice.logprobs.values


def differ(first: GenerateResponse, second: GenerateResponse) -> bool:
    """Whether two answers are of different inputs."""
    return numbers(first)[0] != numbers(second)[0] or not np.allclose(numbers(first)[1], numbers(second)[1], atol=1e-3)
