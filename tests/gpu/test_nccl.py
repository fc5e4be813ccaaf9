"""Weights over NCCL from the memory of one GPU to a worker on another one. Needs two: NCCL takes no device twice."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.commands import ready_line, running
from tests.models.tiny import shared_model

from rollplane.client.client import Client
from rollplane.client.weights import WeightSender

GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    assert torch.cuda.device_count() >= 2, "this test needs two CUDA devices"
    words = ["worker", "--engine", "embedded", "--model", str(shared_model("qwen3")), "--port", "0"]
    options = ["--engine-option", "device=cuda"]
    with running(*words, *options, log=tmp_path / "log", env={"CUDA_VISIBLE_DEVICES": "1"}) as process:
        yield process, ready_line(process, tmp_path / "log")["url"]


async def test_weights_arrive_and_take_effect(worker: tuple[subprocess.Popen[str], str]) -> None:
    _, url = worker
    made = []
    async with Client(url) as client, WeightSender([url], backend="nccl") as sender:
        made.append((await client.generate(PROMPT, sampling_params=GREEDY)).choices[0].token_ids.tolist())
        for version, options in (("other", {"seed": 1}), ("back", {})):
            file = shared_model("qwen3", **options) / "model.safetensors"
            weights = {name: tensor.cuda(0) for name, tensor in load_file(file).items()}
            reports = await sender.send(weights, version=version)
            assert {report.policy_version for report in reports.values()} == {version}
            made.append((await client.generate(PROMPT, sampling_params=GREEDY)).choices[0].token_ids.tolist())

    assert made[1] != made[0]
    assert made[2] == made[0]
