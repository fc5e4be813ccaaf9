"""`tests.policy_machine` over the mock engine, which may fail at every call, and over a small real model.

The mock sleeps too, and takes weights by a transfer of its own, from trainers that may not come back.
"""

import asyncio
import contextlib
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
from tests.bad_files import bad_adapters, bad_checkpoints
from tests.models import tiny
from tests.policy_machine import (
    ADAPTERS,
    CONTENTS,
    BroadcastMachine,
    EmbeddedKind,
    Kind,
    PolicyMachine,
    run_machine,
)

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import DeadlineExceeded
from rollplane.rl.base import Operation


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
            MockSettings(
                weights="w0",
                policy_version="w0",
                step_s=0.001,
                max_adapters=3,
                max_num_seqs=4,
                apply_s=0.002,
                transfer_backend="mock",
                sleep_mode=True,
            )
        )

    async def reference(self, content: int) -> MockEngine:
        engine = MockEngine(MockSettings(weights="w0", transfer_backend="mock"))
        await engine.start()
        if content >= CONTENTS:
            await engine.pause("keep")
            await engine.native.start()
            await engine.native.update(part(content))
            await engine.native.finish(f"w{content}")
            await engine.resume()
        elif content:
            await engine.pause("keep")
            await engine.apply_weights(await engine.stage_weights(self.checkpoints[content]), version=f"w{content}")
            await engine.resume()
        return engine


def part(content: int) -> dict[str, Any]:
    """The one part of weights that come by the engine's own transfer."""
    return {"names": ["w"], "content": content}


FAULTS = (
    "apply_weights",
    "load_adapter",
    "unload_adapter",
    "pause",
    "stage_weights",
    "transfer_init",
    "transfer_start",
    "transfer_update",
    "transfer_finish",
    "sleep",
    "wake_up",
)


class Native(PolicyMachine):
    """An engine with a transfer and a sleep of its own."""

    sleeps = True

    @rule(content=st.integers(CONTENTS, CONTENTS + 2), pause_turns=st.integers(0, 3), comes_back=st.booleans())
    def native_update(self, content: int, pause_turns: int, comes_back: bool) -> None:
        async def trainer() -> None:
            await self.worker.init_weight_transfer({})
            deadline_s = 60.0 if comes_back else 0.01
            with contextlib.suppress(DeadlineExceeded):  # it may have to wait for its turn
                await self.worker.start_weight_update(operation=Operation(deadline_s=deadline_s))
            if comes_back:
                for _ in range(pause_turns):
                    await asyncio.sleep(0.001)
                await self.worker.update_weights(part(content))
                await self.worker.finish_weight_update(f"w{content}")

        self.call(trainer())

    @rule(mode=st.sampled_from(["abort", "wait"]))
    def sleep(self, mode: Any) -> None:
        self.call(self.worker.sleep(mode=mode))

    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"]]))
    def wake_up(self, tags: Any) -> None:
        self.call(self.worker.wake_up(tags))


class OverMock(Native):
    """The mock engine, which may fail at every call of the policy's life."""

    @rule(operation=st.sampled_from(FAULTS))
    def fault(self, operation: Any) -> None:
        self.engine.add_fault(Fault(kind="fail", operation=operation, at=self.engine.calls(operation) + 1))


class OverEmbedded(BroadcastMachine):
    """The embedded engine."""

    exact_after_update = False


class OverEmbeddedThatClears(OverEmbedded):
    """Kept requests compute their KV again after an update, so that every token is exactly its version's."""

    exact_after_update = True
    always_clear = True


@pytest.mark.timeout(240)
def test_a_worker_over_the_mock_engine() -> None:
    root = Path(tempfile.mkdtemp())
    try:
        kind = MockKind(
            [write_checkpoint(root / f"w{i}", i) for i in range(CONTENTS)],
            [write_adapter(root / f"l{i}", i) for i in range(ADAPTERS)],
            bad_checkpoints=[str(root / "nowhere"), str(root)],
        )
        # The mock has no modules that an adapter could fail to fit.
        made = bad_adapters(root / "bad", kind.adapters[0])
        kind.bad_adapters = [path for path in made if Path(path).name not in ("width", "module")]
        run_machine(OverMock, kind, examples=20, steps=25)
    finally:
        shutil.rmtree(root)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("machine", [OverEmbedded, OverEmbeddedThatClears])
def test_a_worker_over_a_real_model(machine: type[PolicyMachine], tmp_path: Path) -> None:
    checkpoints = [str(tiny.shared_model("qwen3", layers=2, seed=i)) for i in range(CONTENTS)]
    adapters = [str(tiny.make_lora(tmp_path / f"l{i}", base=checkpoints[0], seed=i)) for i in range(ADAPTERS)]
    kind = EmbeddedKind(
        checkpoints,
        adapters,
        bad_checkpoints=bad_checkpoints(tmp_path / "bad", checkpoints[1]),
        bad_adapters=bad_adapters(tmp_path / "bad-adapters", adapters[0]),
    )
    run_machine(machine, kind, examples=4, steps=20)
