"""vLLM's own weight transfer on a real vLLM, over HTTP: its trainers' calls, with a backend that a plugin adds for the CPU.

Its built-in backends need a device; what is passed on, and what happens when it goes wrong, is the same.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from tests.e2e.server_support import Served, serving
from tests.e2e.test_server_admin import call
from tests.models.tiny import shared_model
from tests.vllm.support import ask, logprobs, prompt, running, tokens

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import make_request, watching
from rollplane.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLUGIN = str(Path(__file__).parent / "transfer_plugin")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0}
IDS = prompt(200, variant=7)


class Trainer:
    """Rank 0 of a gloo group, in a thread: it holds the weights of another seed."""

    def __init__(self) -> None:
        self.tensors = list(load_file(shared_model("qwen3", seed=1) / "model.safetensors").items())
        self.group: Any = None

    async def join(self, served: Served) -> tuple[int, Any]:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        mine = asyncio.to_thread(
            stateless_init_torch_distributed_process_group,
            host="127.0.0.1", port=port, rank=0, world_size=2, backend="gloo",
        )  # fmt: skip
        self.group, reply = await asyncio.gather(
            mine, call(served, "/init_weight_transfer_engine", {"init_info": info})
        )
        return reply

    async def send(self, served: Served, tensors: list[tuple[str, torch.Tensor]]) -> tuple[int, Any]:
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }

        def broadcast() -> None:
            for _, tensor in tensors:
                self.group.broadcast(tensor.contiguous(), 0).wait()

        _, reply = await asyncio.gather(
            asyncio.to_thread(broadcast), call(served, "/update_weights", {"update_info": info})
        )
        return reply


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    sys.path.insert(0, PLUGIN)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([PLUGIN, *filter(None, [before])])
    try:
        config = ("--weight-transfer-config", '{"backend": "test_gloo"}')
        async with running(shared_model("qwen3"), *config) as started:
            yield started
    finally:
        sys.path.remove(PLUGIN)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest_asyncio.fixture(loop_scope="module")
async def served(engine: VllmEngine) -> AsyncIterator[Served]:
    """A worker at the first weights, over an engine that outlives it."""

    class Lasting(Worker):
        async def start(self) -> None:
            start, engine.start = engine.start, _nothing  # type: ignore[method-assign]
            try:
                await super().start()
            finally:
                engine.start = start  # type: ignore[method-assign]

        async def close(self, *, grace_s: float = 0.0) -> None:
            if self.native is not None:
                await self.native.close()

    await engine.pause("abort", clear_cache=True)
    await engine.apply_weights(await engine.stage_weights(engine.settings.model), version="initial")
    await engine.resume()
    async with serving(Lasting(engine)) as found:
        yield found


async def _nothing() -> None: ...


async def greedy(engine: VllmEngine) -> GenerateResponse:
    return await ask(engine, IDS, **GREEDY)


def same(a: GenerateResponse, b: GenerateResponse) -> None:
    assert tokens(a) == tokens(b)
    np.testing.assert_allclose(logprobs(a), logprobs(b), atol=1e-4)


async def done(served: Served, path: str, body: Any = None) -> Any:
    status, answer = await call(served, path, body)
    assert status == 200, (path, answer)
    return answer


async def test_weights_of_vllms_own_transfer_are_those_of_the_same_checkpoint(
    served: Served, engine: VllmEngine
) -> None:
    """Two updates under way of one kept request; nothing cached before serves a request after."""
    before = await greedy(engine)
    staged = await engine.stage_weights(str(shared_model("qwen3", seed=1)))
    for reference in (staged, await engine.stage_weights(engine.settings.model)):
        await engine.pause("wait", clear_cache=True)
        await engine.apply_weights(reference, version="initial")
        await engine.resume()
        if reference is staged:
            wanted = await greedy(engine)
    same(before, await greedy(engine))
    assert tokens(wanted) != tokens(before)
    assert (await greedy(engine)).usage.cached_tokens

    trainer = Trainer()
    assert (await trainer.join(served))[0] == 200
    half = len(trainer.tensors) // 2
    kept = make_request(IDS, max_tokens=1500, ignore_eos=True, stream=True)
    worker = served.service.worker
    assert worker is not None
    async with watching(worker, kept) as (watch,):
        await watch.until_tokens(3)
        await done(served, "/start_weight_update", {})
        for part in (trainer.tensors[:half], trainer.tensors[half:]):
            assert (await trainer.send(served, part))[0] == 200
        finished = await done(served, "/finish_weight_update", {"weight_version": "native-1"})
        got = await greedy(engine)
        await worker.abort(kept.request_id)
        spans = (await watch.answer()).choices[0].policy_versions

    assert (finished["parts"], finished["policy_version"], worker.state) == (2, "native-1", "ready")
    assert got.usage.cached_tokens == 0
    same(got, wanted)
    assert [name for name, _ in spans] == ["initial", "native-1"]


@pytest.mark.parametrize("when", ["a part that is none", "a trainer that does not come back"])
async def test_what_goes_wrong_half_way_brings_the_old_weights_back(
    served: Served, engine: VllmEngine, when: str
) -> None:
    """The backend leaves a model that would end the engine at its next step."""
    before = await greedy(engine)
    trainer = Trainer()
    await trainer.join(served)
    await done(served, "/start_weight_update", {"deadline_s": 600 if "part" in when else 5})
    assert (await trainer.send(served, trainer.tensors[:5]))[0] == 200
    if "part" in when:
        status, answer = await call(served, "/update_weights", {"update_info": {"tensors": ["w"]}})
        assert (status, "the old weights were loaded again" in answer["error"]["message"]) == (502, True), answer
    worker = served.service.worker
    assert worker is not None
    [held] = [response async for response in answers(worker)]

    same(before, held)
    assert (worker.state, worker.version, engine.policy_version) == ("ready", "initial", "initial")
    assert (await call(served, "/finish_weight_update", {}))[0] == 409


async def answers(worker: Worker) -> AsyncIterator[GenerateResponse]:
    """One answer of the worker, which holds it while an update is open."""
    async with watching(worker, make_request(IDS, **GREEDY)) as (watch,):
        yield await watch.answer()


async def test_its_sleep_is_refused_where_it_would_free_nothing_and_its_transfer_is_published(served: Served) -> None:
    status, answer = await call(served, "/sleep?level=1")
    assert (status, "nothing would be freed" in answer["error"]["message"]) == (400, True)
    (record,) = (await call(served, "/v1/rl/workers", method="GET"))[1]["workers"]
    assert (record["capabilities"]["native_transfer"], record["capabilities"]["sleep"]) == ("test_gloo", False)
    assert {"start_weight_update", "finish_weight_update"} <= set(record["routes"])
    assert "sleep" not in record["routes"]
