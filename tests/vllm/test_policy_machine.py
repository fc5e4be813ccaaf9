"""`tests.policy_machine` over a real vLLM, with and without isolation of its cache by version.

Transformers' forward says what the answers should be: one version's weights, one adapter's factors merged into them.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.models.tiny import shared_model
from tests.policy_machine import ADAPTERS, CONTENTS, TIE_NATS, Kind, PolicyMachine, run_machine
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


class OverVllm(PolicyMachine):
    """Kept requests go on with their own older KV after an update."""

    exact_after_update = False


class OverVllmWithoutIsolation(PolicyMachine):
    """Kept requests compute their KV again after an update, so that every token is exactly its version's."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def loop() -> OnLoop:
    return OnLoop(asyncio.get_running_loop())


@pytest.fixture
def kind(lora_engine: LastingEngine, lora_paths: list[str], loop: OnLoop) -> VllmKind:
    loop.run(lora_engine.start())
    checkpoints = [str(shared_model("qwen3", **({"seed": i} if i else {}))) for i in range(CONTENTS)]
    found = VllmKind(checkpoints, lora_paths[:ADAPTERS])
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
        run_machine(type(machine.__name__, (machine,), {"loop": loop}), kind, examples=examples, steps=steps)
    finally:
        policy.isolate = was
        kind.make().first_version = "initial"
        loop.run(kind.engine.start())
