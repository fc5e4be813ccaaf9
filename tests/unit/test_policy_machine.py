"""`tests.policy_machine` over the mock engine, which may fail at every call, and over a small real model."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import rule
from safetensors.numpy import save_file
from tests.models import tiny
from tests.policy_machine import ADAPTERS, CONTENTS, EmbeddedKind, Kind, PolicyMachine, run_machine

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import Fault, MockSettings


def write_adapter(path: Path, i: int) -> str:
    path.mkdir()
    tensors = {
        "base_model.model.w.lora_A.weight": np.full((2, 4), i, np.float32),
        "base_model.model.w.lora_B.weight": np.zeros((4, 2), np.float32),
    }
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    return str(path)


def write_checkpoint(path: Path, i: int) -> str:
    path.mkdir()
    (path / "mock_weights.json").write_text(json.dumps({"seed": i}))
    return str(path)


class MockKind(Kind):
    """Steps take time, so that everything can fall between two tokens; three adapters fit."""

    def make(self) -> MockEngine:
        return MockEngine(
            MockSettings(weights="w0", policy_version="w0", step_s=0.001, max_adapters=3, max_num_seqs=4, apply_s=0.002)
        )

    async def reference(self, content: int) -> MockEngine:
        engine = MockEngine(MockSettings(weights="w0"))
        await engine.start()
        if content:
            await engine.pause("keep")
            await engine.apply_weights(await engine.stage_weights(self.checkpoints[content]), version=f"w{content}")
            await engine.resume()
        return engine


class OverMock(PolicyMachine):
    """The mock engine, which may fail at every call of the policy's life."""

    @rule(operation=st.sampled_from(["apply_weights", "load_adapter", "unload_adapter", "pause", "stage_weights"]))
    def fault(self, operation: Any) -> None:
        self.engine.add_fault(Fault(kind="fail", operation=operation, at=self.engine.calls(operation) + 1))


class OverEmbedded(PolicyMachine):
    """The embedded engine."""

    exact_after_update = False


@pytest.mark.timeout(240)
def test_a_worker_over_the_mock_engine() -> None:
    root = Path(tempfile.mkdtemp())
    try:
        checkpoints = [write_checkpoint(root / f"w{i}", i) for i in range(CONTENTS)]
        kind = MockKind(checkpoints, [write_adapter(root / f"l{i}", i) for i in range(ADAPTERS)])
        run_machine(OverMock, kind, examples=20, steps=25)
    finally:
        shutil.rmtree(root)


@pytest.mark.timeout(240)
def test_a_worker_over_a_real_model(tmp_path: Path) -> None:
    checkpoints = [str(tiny.shared_model("qwen3", layers=2, seed=i)) for i in range(CONTENTS)]
    adapters = [str(tiny.make_lora(tmp_path / f"l{i}", base=checkpoints[0], seed=i)) for i in range(ADAPTERS)]
    run_machine(OverEmbedded, EmbeddedKind(checkpoints, adapters), examples=5, steps=20)
