"""Weights from a trainer's memory into a real vLLM, over HTTP and a real gloo group; transformers says what they make."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from tests.e2e.server_support import Served, eventually, serving
from tests.e2e.test_broadcast import TRAINER
from tests.models.tiny import shared_model
from tests.vllm.reference import Reference
from tests.vllm.support import LastingEngine, ask, logprobs, prompt, tokens

from rollplane.client.admin import AdminClient
from rollplane.client.weights import WeightSender
from rollplane.errors import Conflict, DeadlineExceeded, EngineFailed, InvalidRequest
from rollplane.protocol.broadcast import TransferGroup
from rollplane.protocol.response import GenerateResponse
from rollplane.rl.broadcast import BroadcastControl
from rollplane.testing import make_request, watching
from rollplane.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}


@pytest_asyncio.fixture(loop_scope="session")
async def served(lora_engine: LastingEngine) -> AsyncIterator[Served]:
    """A worker at the first weights, served."""
    async with serving(Worker(lora_engine)) as found:
        yield found


def control_of(served: Served) -> BroadcastControl:
    worker = served.service.worker
    assert worker is not None
    assert worker.broadcast is not None
    return worker.broadcast


def other_weights() -> dict[str, torch.Tensor]:
    return load_file(shared_model("qwen3", seed=1) / "model.safetensors")


async def greedy(engine: LastingEngine) -> GenerateResponse:
    return await ask(engine, prompt(), **GREEDY)


async def test_three_steps_of_training_take_effect_one_by_one(served: Served, lora_engine: LastingEngine) -> None:
    trainer = Reference(shared_model("qwen3"))
    answers = [await greedy(lora_engine)]
    trainer.check(prompt(), answers[0])

    async with WeightSender([served.url], bucket_bytes=1 << 19) as sender:
        for step in (1, 2, 3):
            trainer.train(step)
            [report] = (await sender.send(trainer.tensors(), version=f"v{step}")).values()
            assert report.policy_version == f"v{step}"
            answers.append(await greedy(lora_engine))
            trainer.check(prompt(), answers[-1])

    assert [answer.choices[0].policy_versions for answer in answers[1:]] == [[(f"v{i}", 0)] for i in (1, 2, 3)]
    assert len({tuple(tokens(answer)) for answer in answers}) == 4


async def test_a_broadcast_has_the_digest_of_the_same_checkpoint_on_disk_and_gives_its_answers(
    served: Served, lora_engine: LastingEngine
) -> None:
    path = str(shared_model("qwen3", seed=1))
    async with AdminClient(served.url) as admin, WeightSender([served.url]) as sender:
        from_disk = await admin.update_policy(path, version="disk")
        before = await greedy(lora_engine)
        await lora_engine.begin_again()
        [sent] = (await sender.send(other_weights(), version="memory")).values()

    assert sent.digest == from_disk.digest
    after = await greedy(lora_engine)
    assert tokens(after) == tokens(before)


async def test_requests_run_while_weights_arrive_and_know_their_boundary(
    served: Served, lora_engine: LastingEngine
) -> None:
    async with WeightSender([served.url]) as sender:
        await sender.open()
        request = make_request(prompt(variant=3), max_tokens=1500, ignore_eos=True, seed=None, stream=True)
        async with watching(lora_engine, request) as (watch,):
            await watch.until_tokens(3)
            await sender.send(other_weights(), version="v1")
            spans = (await watch.answer()).choices[0].policy_versions

    assert [version for version, _ in spans] == ["initial", "v1"]
    assert 3 <= (spans[1][1] or 0) < 1500


async def test_what_is_not_the_models_is_refused_by_name_and_the_next_send_works(
    served: Served, lora_engine: LastingEngine
) -> None:
    before = tokens(await greedy(lora_engine))
    name = "model.layers.0.self_attn.k_proj.weight"
    whole = other_weights()
    spoiled = {
        rf"missing {name}": {key: value for key, value in whole.items() if key != name},
        rf"{name} has shape \[7\]": {**whole, name: torch.zeros(7)},
        rf"not finite are in {name}": {**whole, name: torch.full_like(whole[name], float("nan"))},
    }
    async with WeightSender([served.url], deadline_s=20.0) as sender, asyncio.timeout(30):
        for says, weights in spoiled.items():
            with pytest.raises(InvalidRequest, match=says):
                await sender.send(weights, version="never")
            assert tokens(await greedy(lora_engine)) == before
        await sender.send(whole, version="v1")

    assert tokens(await greedy(lora_engine)) != before


async def test_a_second_init_is_a_409_and_the_first_group_still_works(served: Served) -> None:
    async with WeightSender([served.url]) as sender, AdminClient(served.url) as admin:
        await sender.open()
        other = TransferGroup(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2)
        with pytest.raises(Conflict, match="destroy it first"):
            await admin.init_weights_group(other)
        await sender.send(other_weights(), version="v1")
        assert await admin.policy_version() == "v1"


async def test_a_trainer_that_never_comes_releases_the_engine_at_its_deadline(
    served: Served, lora_engine: LastingEngine
) -> None:
    group = TransferGroup(master_address="127.0.0.1", master_port=9, rank_offset=1, world_size=2)
    async with AdminClient(served.url) as admin, asyncio.timeout(10):
        with pytest.raises((DeadlineExceeded, EngineFailed)):
            await admin.init_weights_group(group, deadline_s=1.0)

    assert control_of(served).state == "absent"
    assert (await greedy(lora_engine)).choices[0].policy_versions == [("initial", 0)]


async def test_a_trainer_killed_in_mid_broadcast_leaves_the_old_weights_serving(
    served: Served, lora_engine: LastingEngine
) -> None:
    before = tokens(await greedy(lora_engine))
    control = control_of(served)

    async def receiving() -> bool:
        return control.state == "receiving"

    async def released() -> bool:
        return control.state == "absent"

    checkpoint = shared_model("qwen3", seed=1) / "model.safetensors"
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, served.url, str(checkpoint), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert trainer.stdout is not None
        assert await asyncio.wait_for(trainer.stdout.readline(), 60) == b"half\n"
        await eventually(receiving)
        assert tokens(await greedy(lora_engine)) == before
    finally:
        trainer.kill()
        await trainer.wait()
    await eventually(released)

    assert tokens(await greedy(lora_engine)) == before
    assert directories(lora_engine) == []
    async with WeightSender([served.url]) as sender:
        await sender.send(other_weights(), version="v1")
    assert tokens(await greedy(lora_engine)) != before


@pytest.mark.parametrize("names", ["all", "all but the keys"])
async def test_received_weights_come_back_when_the_next_ones_fail_half_way(
    served: Served, lora_engine: LastingEngine, tmp_path: Path, names: str
) -> None:
    """Its last file is swapped unseen, with the size, the time and the inode of the one that was checked.

    Where the keys are in that file, every layer's fused queries, keys and values are half loaded when it fails.
    """
    async with WeightSender([served.url]) as sender:
        await sender.send(other_weights(), version="v1")
    before = await greedy(lora_engine)
    assert len(directories(lora_engine)) == 1
    whole = load_file(shared_model("qwen3", seed=2) / "model.safetensors")
    last = {name: tensor for name, tensor in whole.items() if names == "all" or "k_proj" in name}
    if first := {name: tensor for name, tensor in whole.items() if name not in last}:
        save_file(first, tmp_path / "a.safetensors")
    save_file(last, tmp_path / "b.safetensors")
    staged = await lora_engine.stage_weights(str(tmp_path))
    file = tmp_path / "b.safetensors"
    found = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"\xff" * 64)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))

    await lora_engine.pause("keep")
    with pytest.raises(EngineFailed, match="the old weights were loaded again"):
        await lora_engine.apply_weights(staged, version="never")
    await lora_engine.resume()

    after = await greedy(lora_engine)
    assert tokens(after) == tokens(before)
    np.testing.assert_array_equal(logprobs(after), logprobs(before))
    assert lora_engine.policy_version == "v1"
    await lora_engine.begin_again()
    assert directories(lora_engine) == []


async def test_vllms_own_transfer_and_sleep_are_refused_where_they_would_do_nothing(lora_engine: LastingEngine) -> None:
    """Its CPU build says that it sleeps, and goes on holding all of its memory."""
    await lora_engine.start()
    with pytest.raises(InvalidRequest, match="without --weight-transfer-config"):
        await lora_engine.native.init({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1})
    with pytest.raises(InvalidRequest, match="--enable-sleep-mode"):
        await lora_engine.sleeping.sleep()

    assert (await greedy(lora_engine)).choices[0].finish_reason == "length"
    assert (await lora_engine.health()).state == "ready"


def directories(engine: LastingEngine) -> list[str]:
    """Where received weights lie now."""
    receiver = engine._receiver
    assert receiver is not None
    return [path for path in receiver.received.paths if Path(path).is_dir()]
