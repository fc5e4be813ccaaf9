"""Weights from a trainer's memory into workers over real sockets and a real gloo group."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e.server_support import Served, eventually, serving
from tests.models import tiny

from rollplane.client.admin import AdminClient
from rollplane.client.weights import WeightSender
from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.errors import Conflict, DeadlineExceeded, EngineFailed, InvalidRequest
from rollplane.protocol.broadcast import TransferGroup
from rollplane.worker import Worker

BASE = {"token_ids": [11, 12, 13, 14, 15], "sampling_params": {"temperature": 0, "max_tokens": 8, "ignore_eos": True}}


def model(seed: int) -> Path:
    return tiny.shared_model("qwen3", layers=2, seed=seed)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return load_file(model(seed) / "model.safetensors")


def embedded() -> Worker:
    settings = EmbeddedSettings(model=str(model(0)), policy_version="v0", threads=1, max_model_len=2048)
    return Worker(EmbeddedEngine(settings))


@contextlib.asynccontextmanager
async def workers(count: int) -> AsyncIterator[list[Served]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(embedded())) for _ in range(count)]


async def tokens(served: Served) -> tuple[list[int], Any]:
    choice = (await served.generate(BASE))["choices"][0]
    return choice["token_ids"], choice["policy_versions"]


async def fresh_tokens(seed: int) -> list[int]:
    worker = Worker(EmbeddedEngine(EmbeddedSettings(model=str(model(seed)), threads=1)))
    async with serving(worker) as served:
        return (await tokens(served))[0]


async def test_three_steps_reach_every_worker_exactly_and_each_takes_effect() -> None:
    async with workers(2) as served, WeightSender([s.url for s in served], bucket_bytes=1 << 19) as sender:
        made = [(await tokens(served[0]))[0]]
        for seed in (1, 2, 3):
            reports = await sender.send(tensors(seed), version=f"v{seed}")
            assert {report.policy_version for report in reports.values()} == {f"v{seed}"}
            assert len({report.digest for report in reports.values()}) == 1
            answers = [await tokens(s) for s in served]
            assert answers[0] == answers[1]
            assert answers[0][1] == [[f"v{seed}", 0]]
            made.append(answers[0][0])
        assert made[3] == await fresh_tokens(3)
        assert len({tuple(ids) for ids in made}) == 4


async def test_a_broadcast_has_the_digest_of_the_same_checkpoint_on_disk() -> None:
    async with workers(1) as served, AdminClient(served[0].url) as admin:
        staged = await admin.stage_weights(str(model(1)))
        async with WeightSender([served[0].url]) as sender:
            [report] = (await sender.send(tensors(1), version="v1")).values()
        assert report.digest == staged.digest


async def test_sending_the_same_again_is_no_work() -> None:
    async with workers(1) as served:
        for applied in (True, False):
            async with WeightSender([served[0].url]) as sender:
                [report] = (await sender.send(tensors(1), version="v1")).values()
            assert report.applied is applied


async def test_requests_run_on_while_weights_arrive_and_say_which_version_made_which_token() -> None:
    async with workers(1) as served, WeightSender([served[0].url]) as sender:
        await sender.open()
        body = {**BASE, "sampling_params": {"max_tokens": 1500, "ignore_eos": True, "seed": 1}}
        running = asyncio.create_task(served[0].generate(body))
        worker = served[0].service.worker
        assert worker is not None

        async def runs() -> bool:
            return (await worker.health()).running == 1

        await eventually(runs)
        await sender.send(tensors(1), version="v1")
        choice = (await running)["choices"][0]
        assert [version for version, _ in choice["policy_versions"]] == ["v0", "v1"]
        assert 0 < choice["policy_versions"][1][1] < 1500


async def test_tensors_that_are_not_the_models_change_no_worker_and_hang_nobody() -> None:
    async with workers(2) as served, WeightSender([s.url for s in served], deadline_s=20.0) as sender:
        before = await tokens(served[0])
        wrong = tensors(1)
        wrong["model.norm.weight"] = torch.zeros(7)
        async with asyncio.timeout(10):
            with pytest.raises(InvalidRequest, match=r"model\.norm\.weight has shape \[7\]"):
                await sender.send(wrong, version="v1")
        assert [await tokens(s) for s in served] == [before, before]
        await sender.send(tensors(1), version="v1")
        assert (await tokens(served[1]))[1] == [["v1", 0]]


async def test_one_worker_that_cannot_join_releases_the_others_well_before_the_deadline() -> None:
    async with workers(1) as served, serving(Worker(MockEngine())) as mock:
        async with WeightSender([served[0].url, mock.url], deadline_s=30.0) as sender, asyncio.timeout(10):
            with pytest.raises(InvalidRequest, match="receives no weights by broadcast"):
                await sender.open()
        worker = served[0].service.worker
        assert worker is not None
        assert worker.broadcast is not None
        assert worker.broadcast.state == "absent"


async def test_a_second_init_while_a_group_is_active_is_a_409_and_the_first_still_works() -> None:
    async with workers(1) as served, WeightSender([served[0].url]) as sender, AdminClient(served[0].url) as admin:
        await sender.open()
        other = TransferGroup(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2)
        with pytest.raises(Conflict, match="destroy it first"):
            await admin.init_weights_group(other)
        await sender.send(tensors(1), version="v1")


async def test_a_trainer_that_never_comes_releases_the_worker_at_its_deadline() -> None:
    async with workers(1) as served, AdminClient(served[0].url) as admin:
        group = TransferGroup(master_address="127.0.0.1", master_port=9, rank_offset=1, world_size=2)
        with pytest.raises((DeadlineExceeded, EngineFailed)):
            await admin.init_weights_group(group, deadline_s=1.0)
        assert (await admin.destroy_weights_group()).active is False
        assert (await tokens(served[0]))[1] == [["v0", 0]]


TRAINER = """
import asyncio, sys, time, torch
from safetensors.torch import load_file
from rollplane.client.weights import WeightSender, manifest_of
from rollplane.protocol.broadcast import buckets
torch.set_num_threads(1)

async def main(url, path):
    sender = WeightSender([url], bucket_bytes=1 << 16, deadline_s=30.0)
    await sender.open()
    tensors = load_file(path)
    manifest = manifest_of(tensors, bucket_bytes=1 << 16)
    client = sender._clients[url]
    asked = asyncio.create_task(client.stage_broadcast(manifest, deadline_s=30.0))
    first = torch.zeros(next(buckets(manifest)).bytes, dtype=torch.uint8)
    await asyncio.to_thread(sender._group._broadcast, first, ends=time.monotonic() + 30.0)
    print("half", flush=True)
    await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_trainer_killed_in_mid_broadcast_leaves_the_old_version_serving() -> None:
    async with workers(1) as served:
        before = await tokens(served[0])
        worker = served[0].service.worker
        assert worker is not None
        assert worker.broadcast is not None
        control = worker.broadcast

        async def receiving() -> bool:
            return control.state == "receiving"

        async def released() -> bool:
            return control.state == "absent"

        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TRAINER, served[0].url, str(model(1) / "model.safetensors"),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert trainer.stdout is not None
            assert await asyncio.wait_for(trainer.stdout.readline(), 90) == b"half\n"
            await eventually(receiving)
            assert await tokens(served[0]) == before
        finally:
            trainer.kill()
            await trainer.wait()

        await eventually(released)
        assert await tokens(served[0]) == before
        async with WeightSender([served[0].url]) as sender:
            await sender.send(tensors(1), version="v1")
        assert (await tokens(served[0]))[1] == [["v1", 0]]
