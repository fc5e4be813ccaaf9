"""The worker over a scripted engine whose policy is a fake receiver."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.unit.rl.fakes import FakeHost, FakeReceiver
from tests.waiting import until

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import (
    Conflict,
    ContextOverflow,
    DeadlineExceeded,
    EngineProtocolError,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from rollplane.identity import media_identity
from rollplane.protocol.events import EndEvent, Event, ServedBy
from rollplane.protocol.features import MediaItem
from rollplane.protocol.info import Capabilities, LoraCapability
from rollplane.protocol.request import GenerateRequest
from rollplane.rl.base import Operation, PolicyAdmin
from rollplane.testing import ScriptedEngine, make_request, script_of, scripted_info
from rollplane.worker import Worker, WorkerSettings


class PolicyEngine(ScriptedEngine, FakeReceiver, FakeHost):
    """A scripted engine that is a weight receiver and an adapter host too."""

    def __init__(self, *scripts: Any, **options: Any) -> None:
        ScriptedEngine.__init__(self, *scripts, **options)
        FakeReceiver.__init__(self)
        self.loaded = {}


CAPABLE = msgspec.structs.replace(
    scripted_info().capabilities, lora=LoraCapability(max=2, rank=8), features=["image"], priority=True
)


async def started(*scripts: Any, **settings: Any) -> tuple[Worker, PolicyEngine]:
    engine = PolicyEngine(*scripts, info=scripted_info(capabilities=CAPABLE))
    worker = Worker(engine, settings=WorkerSettings(name="w0", **settings))
    await worker.start()
    return worker, engine


async def collect(worker: Worker, request: GenerateRequest) -> list[Event]:
    return [event async for event in worker.generate(request)]


def end_of(events: list[Event]) -> EndEvent:
    assert isinstance(events[-1], EndEvent)
    return events[-1]


def adapter(path: Path, fill: float = 1.0) -> str:
    path.mkdir(parents=True)
    tensors = {f"m.lora_{side}.weight": np.full((2, 2), fill, dtype=np.float32) for side in "AB"}
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    return str(path)


async def test_a_worker_is_a_policy_admin() -> None:
    worker, _ = await started()
    assert isinstance(worker, PolicyAdmin)


async def test_every_answer_names_the_worker_its_instance_and_the_attempt() -> None:
    worker, _ = await started()
    request = make_request(fields={"attempt": 3}, options={"echo_sampling": True}, top_k=0)
    served_by = end_of(await collect(worker, request)).served_by
    assert (served_by.worker, served_by.instance, served_by.attempt) == ("w0", worker.instance_id, 3)
    assert served_by.effective_sampling is not None
    assert served_by.effective_sampling["temperature"] == 1.0
    assert served_by.effective_sampling["max_tokens"] == 4096 - 3


async def test_truncation_without_a_mask_is_warned_about() -> None:
    worker, _ = await started()
    served_by = end_of(await collect(worker, make_request(top_p=0.8, logprobs=1))).served_by
    assert len(served_by.warnings) == 1
    assert "no sampling mask" in served_by.warnings[0]
    assert not end_of(await collect(worker, make_request(logprobs=1))).served_by.warnings


@pytest.mark.parametrize("version_field", ["policy_version", "min_policy_version"])
async def test_a_version_that_is_not_here_is_refused_with_what_is(version_field: str) -> None:
    worker, engine = await started()
    with pytest.raises(PreconditionFailed) as refused:
        await collect(worker, make_request(options={version_field: "v9"}))
    assert refused.value.details == {"policy_version": "v0"}
    assert engine.requests == []


async def test_bad_requests_are_refused_at_once_also_while_paused() -> None:
    worker, engine = await started()
    await worker.pause("keep")
    with pytest.raises(ContextOverflow, match="maximum context length"):
        await collect(worker, make_request([1] * 4096))
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        await collect(worker, make_request([32_000]))
    assert engine.requests == []


async def test_requests_are_held_while_paused_and_served_after_the_resume() -> None:
    worker, engine = await started()
    await worker.pause("keep")
    held = asyncio.create_task(collect(worker, make_request()))
    await until(lambda: worker.held_requests == 1)
    assert engine.requests == []
    assert (await worker.health()).waiting == 1
    await worker.resume()
    end_of(await held)
    assert worker.held_requests == 0


async def test_a_held_request_sees_the_version_that_is_current_when_it_runs() -> None:
    worker, engine = await started()
    await worker.pause("keep")
    held = asyncio.create_task(collect(worker, make_request(options={"policy_version": "v1"})))
    await until(lambda: worker.held_requests == 1)
    await worker.update_from_disk("/ckpt/1", version="v1")
    await worker.resume()
    end_of(await held)
    assert len(engine.requests) == 1


async def test_a_request_is_held_no_longer_than_the_limit() -> None:
    worker, _ = await started(hold_limit_s=0.01)
    await worker.pause("keep")
    with pytest.raises(Unavailable, match=r"held for at most 0\.01 s"):
        await collect(worker, make_request())


async def test_a_deadline_ends_a_running_request_and_its_work() -> None:
    worker, engine = await started([asyncio.Event()])
    with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.02 s"):
        await collect(worker, make_request(options={"deadline_s": 0.02}, request_id="late"))
    assert engine.closed_early == ["late"]
    assert worker.live_requests == 0


async def test_a_live_id_with_another_body_is_refused_and_the_first_is_untouched() -> None:
    gate = asyncio.Event()
    worker, engine = await started([gate, *script_of([7, 8])])
    first = asyncio.create_task(collect(worker, make_request(request_id="r", fields={"body_digest": "a"})))
    await until(lambda: engine.requests)
    with pytest.raises(Conflict, match="live with another body"):
        await collect(worker, make_request(request_id="r", fields={"body_digest": "b"}))
    gate.set()
    end_of(await first)


async def test_media_that_claim_another_identity_than_their_content_are_refused_before_execution() -> None:
    worker, engine = await started()
    item = MediaItem(modality="image", producer_hash="h", offset=0, length=2, kwargs=b"pixels")
    await collect(worker, make_request(fields={"features": [item]}))
    assert item.mm_hash == media_identity("image", b"pixels")
    forged = msgspec.structs.replace(item, kwargs=b"other pixels")
    with pytest.raises(InvalidRequest, match="claims the identity"):
        await collect(worker, make_request(fields={"features": [forged]}))
    assert len(engine.requests) == 1


async def test_an_unknown_model_is_not_found_and_an_adapter_is_leased_for_the_request(tmp_path: Path) -> None:
    gate = asyncio.Event()
    worker, engine = await started([gate, *script_of([7])])
    with pytest.raises(NotFound, match="'nobody'"):
        await collect(worker, make_request(fields={"model": "nobody"}))
    await worker.load_adapter("a", adapter(tmp_path / "1"))
    running = asyncio.create_task(collect(worker, make_request(fields={"model": "a"})))
    await until(lambda: engine.requests)
    assert engine.requests[0].adapter == "a@1"
    assert [record.leases for record in await worker.adapters()] == [1]
    gate.set()
    assert end_of(await running).served_by.adapter_generation == 1
    assert [record.leases for record in await worker.adapters()] == [0]


async def test_an_adapter_may_not_take_the_base_models_name(tmp_path: Path) -> None:
    worker, _ = await started()
    with pytest.raises(Conflict, match="base model"):
        await worker.load_adapter("scripted", adapter(tmp_path / "1"))


async def test_commands_of_an_older_epoch_are_refused() -> None:
    worker, _ = await started()
    await worker.update_from_disk("/ckpt/1", version="v1", operation=Operation(id="a", epoch=4))
    with pytest.raises(Conflict, match="epoch 3, this worker follows epoch 4"):
        await worker.update_from_disk("/ckpt/2", version="v2", operation=Operation(id="b", epoch=3))
    for late in (worker.pause(epoch=3), worker.resume(epoch=3), worker.set_policy_version("v0", epoch=3)):
        with pytest.raises(Conflict, match="epoch 3, this worker follows epoch 4"):
            await late
    assert (worker.version, worker.state) == ("v1", "ready")
    await worker.pause(epoch=5)
    assert (worker.state, worker.epoch) == ("paused", 5)
    await worker.resume()


async def test_an_engine_that_does_not_name_its_logprob_mode_breaks_the_contract() -> None:
    worker, _ = await started(script_of([7], served_by=ServedBy()))
    with pytest.raises(EngineProtocolError, match="which logprobs"):
        await collect(worker, make_request())


async def test_watchers_see_the_state_now_and_after_every_change() -> None:
    worker, _ = await started()
    states = worker.watch()
    first = await anext(states)
    assert (first.policy_version, first.health.state, first.paused) == ("v0", "ready", False)
    await worker.pause("keep")
    assert (await anext(states)).health.state == "paused"
    await worker.update_from_disk("/ckpt/1", version="v1")
    assert (await anext(states)).policy_version == "v1"
    await states.aclose()


async def test_closing_refuses_new_requests_and_lets_running_ones_finish() -> None:
    gate = asyncio.Event()
    worker, engine = await started([gate, *script_of([7])])
    running = asyncio.create_task(collect(worker, make_request()))
    await until(lambda: engine.requests)
    closing = asyncio.create_task(worker.close(grace_s=30.0))
    await until(lambda: worker.state == "draining")
    with pytest.raises(Unavailable, match="draining"):
        await collect(worker, make_request())
    gate.set()
    end_of(await running)
    await closing
    assert engine.closed


async def test_an_engine_without_a_policy_lists_no_policy_routes_and_refuses_them_by_name() -> None:
    worker = Worker(ScriptedEngine(info=scripted_info(capabilities=Capabilities(logprobs_mode="sampling"))))
    await worker.start()
    assert worker.routes() == ["abort_request", "get_weight_version", "get_world_size", "liveness_probe"]
    with pytest.raises(InvalidRequest, match="cannot be paused"):
        await worker.pause()
    with pytest.raises(InvalidRequest, match="without LoRA"):
        await worker.load_adapter("a", "/a")


async def test_updates_from_disk_are_listed_only_where_the_engine_takes_them() -> None:
    from_disk = {"stage_weights", "update_weights_from_disk", "apply_staged_weights"}
    worker, _ = await started()
    assert from_disk.isdisjoint(worker.routes())
    capable = msgspec.structs.replace(CAPABLE, weight_transfer=["disk"])
    worker = Worker(PolicyEngine(info=scripted_info(capabilities=capable)))
    await worker.start()
    assert from_disk <= set(worker.routes())


async def test_data_parallel_engines_take_no_weights_by_their_own_transfer() -> None:
    """A start on one replica of several would leave the others with the old weights."""
    mock = MockEngine(MockSettings(transfer_backend="mock"))
    several = msgspec.structs.replace(mock.info.capabilities, data_parallel_size=2)
    mock._info = msgspec.structs.replace(mock.info, capabilities=several)
    worker = Worker(mock)
    await worker.start()
    for step in (worker.init_weight_transfer({}), worker.start_weight_update(), worker.update_weights({})):
        with pytest.raises(InvalidRequest, match="data parallelism 2: run one worker per replica"):
            await step
    assert "start_weight_update" not in worker.routes()
    await worker.close()


async def test_the_repr_is_a_status_line() -> None:
    worker, _ = await started()
    assert repr(worker) == "<Worker w0 ready at 'v0', 0 live, 0 held>"
