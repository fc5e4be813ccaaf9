"""vLLM's own weight transfer and sleep, passed on in order; what goes wrong leaves the old weights or nothing that steps."""

from typing import Any

import pytest
from tests.unit.engines.vllm.policies import policy_over

from rollplane.engines.vllm import versions
from rollplane.engines.vllm.native import NativeTransfer, Sleep
from rollplane.errors import Conflict, EngineDied, EngineFailed, InvalidRequest
from rollplane.protocol.admin import StagedWeights

GOOD = StagedWeights(
    path="/good", digest="d", tensors=1, bytes=4, handle={"stamps": [["model.safetensors", 4, 1, 1]], "skipped": []}
)


class FakeEngine:
    """Notes what it is asked; `fails` names a call that fails, `loads` whether files can be loaded."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = ""
        self.loads = True
        self.sleeping = False

    async def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments) if arguments else name)
        if name == self.fails:
            raise RuntimeError(f"{name} failed")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._note("pause", mode)

    async def resume_generation(self) -> None:
        await self._note("resume")

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        await self._note("reset")
        return True

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        await self._note("load", kwargs["path"])
        return [{"loaded": 1} if self.loads else {"broken": "gone"}]

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._note("init", request)

    async def start_weight_update(self) -> None:
        await self._note("start")

    async def update_weights(self, request: Any) -> None:
        await self._note("update", request)

    async def finish_weight_update(self) -> None:
        await self._note("finish")

    async def sleep(self, *, level: int) -> None:
        await self._note("sleep", level)
        self.sleeping = True

    async def wake_up(self, tags: list[str] | None) -> None:
        await self._note("wake", tags)
        self.sleeping = tags == ["weights"]

    async def is_sleeping(self) -> bool:
        return self.sleeping


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    for name in ("transfer_init", "transfer_part"):
        monkeypatch.setattr(versions, name, lambda info: info)
    return FakeEngine()


async def test_the_steps_are_passed_on_and_the_version_changes_last(engine: FakeEngine) -> None:
    policy = policy_over(engine, good=GOOD)
    native = NativeTransfer(engine, policy, backend="nccl")
    await native.init({"master_port": 1})
    await policy.pause("keep")
    await native.start()
    await native.update({"names": ["w"]})
    assert policy.version == "v0"
    with pytest.raises(Conflict, match="finish it before resuming"):
        await policy.resume()
    with pytest.raises(Conflict, match="is open"):
        await policy.apply(GOOD, version="v9")

    await native.finish("v1")
    await policy.resume()

    assert engine.calls == [
        ("init", {"master_port": 1}),
        ("pause", "keep"),
        "start",
        ("update", {"names": ["w"]}),
        "finish",
        "reset",
        "resume",
    ]
    assert policy.version == "v1"
    assert policy.good_path is None


@pytest.mark.parametrize("step", ["start", "update", "finish"])
async def test_a_step_that_fails_brings_the_old_weights_back(engine: FakeEngine, step: str) -> None:
    policy = policy_over(engine, good=GOOD)
    native = NativeTransfer(engine, policy, backend="nccl")
    await policy.pause("keep")
    engine.fails = step

    async def whole_update() -> None:
        await native.start()
        await native.update({})
        await native.finish("v1")

    with pytest.raises(EngineFailed, match=f"{step} failed.*the old weights were loaded again"):
        await whole_update()

    assert ("load", "/good") in engine.calls
    assert not policy.transfer_open
    await policy.resume()
    assert policy.version == "v0"
    assert not policy.paused


async def test_a_model_that_cannot_be_made_whole_again_does_not_step(engine: FakeEngine) -> None:
    policy = policy_over(engine, good=GOOD)
    native = NativeTransfer(engine, policy, backend="nccl")
    await policy.pause("keep")
    await native.start()
    engine.fails, engine.loads = "update", False

    with pytest.raises(EngineDied, match="nor did the old weights"):
        await native.update({})

    with pytest.raises(EngineDied, match="broken"):
        await policy.resume()
    assert policy.paused


async def test_steps_out_of_order_reach_nobody(engine: FakeEngine) -> None:
    policy = policy_over(engine, good=GOOD)
    native = NativeTransfer(engine, policy, backend="nccl")
    with pytest.raises(Conflict, match="only while the engine is paused"):
        await native.start()
    for early in (native.update({}), native.finish("v1")):
        with pytest.raises(Conflict, match="start one first"):
            await early
    await policy.pause("keep")
    await native.start()
    with pytest.raises(Conflict, match="is open already"):
        await native.start()

    assert engine.calls == [("pause", "keep"), "start"]


async def test_without_a_backend_every_step_says_what_works_instead(engine: FakeEngine) -> None:
    native = NativeTransfer(engine, policy_over(engine, good=GOOD), backend=None)
    for step in (native.init({}), native.start(), native.update({}), native.finish("v1")):
        with pytest.raises(InvalidRequest, match="init_weights_update_group"):
            await step

    assert engine.calls == []


async def test_asleep_until_all_memory_is_back(engine: FakeEngine) -> None:
    policy = policy_over(engine, good=GOOD)
    sleep = Sleep(engine, policy, offered=True)
    await sleep.sleep()
    await sleep.sleep()
    assert repr(sleep) == "<Sleep asleep>"
    await sleep.wake_up(["weights"])
    assert sleep.asleep
    assert policy.paused

    await sleep.wake_up(["kv_cache"])
    await sleep.wake_up()

    assert not sleep.asleep
    assert not policy.paused
    assert engine.calls == [
        ("pause", "abort"), ("sleep", 1), ("wake", ["weights"]), ("wake", ["kv_cache"]), "resume",
    ]  # fmt: skip


async def test_who_was_paused_before_sleeping_is_paused_after_it(engine: FakeEngine) -> None:
    policy = policy_over(engine, good=GOOD)
    await policy.pause("keep")
    sleep = Sleep(engine, policy, offered=True)
    await sleep.sleep()
    await sleep.wake_up()

    assert policy.paused
    assert engine.calls[-1] == ("pause", "keep")


async def test_what_sleep_cannot_do_is_refused_by_name(engine: FakeEngine) -> None:
    policy = policy_over(engine, good=GOOD)
    with pytest.raises(InvalidRequest, match="--enable-sleep-mode"):
        await Sleep(engine, policy, offered=False).sleep()
    sleep = Sleep(engine, policy, offered=True)
    for level in (0, 2):
        with pytest.raises(InvalidRequest, match=f"level must be 1, got {level}"):
            await sleep.sleep(level=level)
    with pytest.raises(InvalidRequest, match="tag 'cache' is not one of weights, kv_cache"):
        await sleep.wake_up(["cache"])

    assert engine.calls == []
