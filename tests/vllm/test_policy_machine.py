"""`tests.policy_machine` over a real vLLM, with and without isolation of its cache by version.

Transformers' forward says what the answers should be: one version's weights, one adapter's factors merged into them.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import pytest_asyncio
from hypothesis.stateful import rule
from safetensors.torch import load_file, save_file
from tests.bad_files import bad_adapters, bad_checkpoints
from tests.models.tiny import shared_model
from tests.policy_machine import (
    ADAPTERS,
    CONTENTS,
    NEVER,
    TIE_NATS,
    BroadcastMachine,
    Kind,
    run_machine,
)
from tests.vllm.reference import Reference
from tests.vllm.support import LastingEngine


@dataclass
class OnLoop:
    """Runs an example on the loop that the engine lives on."""

    loop: asyncio.AbstractEventLoop

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coro)


class VllmKind(Kind):
    """One engine for all examples: it takes twenty seconds to start, and begins again instead."""

    engine: LastingEngine

    def make(self) -> LastingEngine:
        vars(self.engine).pop("load_adapter", None)  # the last example's note of what it loaded
        self.engine.first_version = "w0"
        return self.engine

    async def differing(
        self, content: int, adapter: int | None, tokens: list[int], first: int, end: int, prompt: list[int]
    ) -> list[str]:
        key = content if adapter is None else CONTENTS + content * ADAPTERS + adapter
        if key not in self.references:
            path = None if adapter is None else self.adapters[adapter]
            self.references[key] = Reference(self.checkpoints[content], adapter=path)
        stop = len(prompt) + end
        rows = self.references[key].logprobs(prompt, tokens[len(prompt) : stop])[first:]
        gaps = rows.max(axis=1) - rows[np.arange(end - first), tokens[len(prompt) + first : stop]]
        return [
            f"output {first + i} is {tokens[len(prompt) + first + i]}, by {gap:.2g} nats too unlikely"
            for i, gap in enumerate(gaps)
            if gap > TIE_NATS
        ]


class OverVllm(BroadcastMachine):
    """Kept requests go on with their own older KV after an update."""

    exact_after_update = False

    @rule(content=st.integers(1, CONTENTS - 1))
    def update_that_breaks_half_way(self, content: int) -> None:
        """A checkpoint whose last file is swapped unseen after it was checked: vLLM has loaded part of it when it fails."""
        self.call(self._break_half_way(self.kind.checkpoints[content]))

    async def _break_half_way(self, checkpoint: str) -> None:
        path = Path(tempfile.mkdtemp())
        try:
            whole = load_file(Path(checkpoint) / "model.safetensors")
            keys = {name: tensor for name, tensor in whole.items() if "k_proj" in name}
            save_file({name: tensor for name, tensor in whole.items() if name not in keys}, path / "a.safetensors")
            save_file(keys, path / "b.safetensors")
            staged = await self.worker.stage_weights(str(path))
            file = path / "b.safetensors"
            found = file.stat()
            with file.open("r+b") as stream:
                stream.write(b"\xff" * 64)
            os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
            await self.worker.apply_staged(staged.digest, version=NEVER)
        finally:
            shutil.rmtree(path)


class OverVllmWithoutIsolation(OverVllm):
    """Kept requests compute their KV again after an update, so that every token is exactly its version's."""

    exact_after_update = True


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def loop() -> OnLoop:
    return OnLoop(asyncio.get_running_loop())


@pytest.fixture
def kind(lora_engine: LastingEngine, lora_paths: list[str], loop: OnLoop, tmp_path: Path) -> VllmKind:
    loop.run(lora_engine.start())
    checkpoints = [str(shared_model("qwen3", **({"seed": i} if i else {}))) for i in range(CONTENTS)]
    found = VllmKind(
        checkpoints,
        lora_paths[:ADAPTERS],
        bad_checkpoints=bad_checkpoints(tmp_path / "checkpoints", checkpoints[1]),
        bad_adapters=bad_adapters(tmp_path / "adapters", lora_paths[0]),
    )
    found.engine = lora_engine
    return found


@pytest.mark.parametrize("isolate", [True, False], ids=["isolated", "not isolated"])
def test_a_worker_over_vllm(kind: VllmKind, loop: OnLoop, isolate: bool) -> None:
    check(kind, loop, isolate=isolate, examples=4, steps=20)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isolate", [True, False], ids=["isolated", "not isolated"])
def test_a_worker_over_vllm_for_long(kind: VllmKind, loop: OnLoop, isolate: bool) -> None:
    check(kind, loop, isolate=isolate, examples=25, steps=30)


def check(kind: VllmKind, loop: OnLoop, *, isolate: bool, examples: int, steps: int) -> None:
    policy = kind.engine._policy
    assert policy is not None
    policy.isolate, was = isolate, policy.isolate
    machine = OverVllm if isolate else OverVllmWithoutIsolation
    try:
        run_machine(
            type(machine.__name__, (machine,), {"loop": loop}), kind, examples=examples, steps=steps, shrinks=False
        )
    finally:
        policy.isolate = was
        kind.make().first_version = "initial"
        loop.run(kind.engine.start())
