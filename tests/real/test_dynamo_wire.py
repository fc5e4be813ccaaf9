"""What of a request through Dynamo's frontend reaches the engine behind our worker: a mock vLLM server that records it."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from tests.models.qwen_features import image_fields, payload
from tests.models.tiny import shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes

from rollplane import DynamoClient
from rollplane.engines.grpc.mock_server import MockVllmServer, RecordedCall
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import Cancelled, InvalidRequest
from rollplane.identity import media_identity

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [300 + 7 * i for i in range(12)]
RANKS = 2


@dataclass
class Rig:
    engine: MockEngine
    server: MockVllmServer
    frontend: processes.Server
    worker: processes.Server
    client: DynamoClient

    async def call(self, **options: Any) -> tuple[dict[str, Any], RecordedCall]:
        """The wire request of one rollout, as a dict, and the call that brought it."""
        self.server.calls.clear()
        await self.client.generate(PROMPT, model="roll", **options)
        (call,) = self.server.calls
        return MessageToDict(call.request, preserving_proto_field_name=True), call


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    root = tmp_path_factory.mktemp("dynamo-wire")
    model = str(await asyncio.to_thread(shared_model, "qwen3"))
    settings = MockSettings(model="roll", vocab_tokens=1024, step_s=0.02)
    engine = MockEngine(settings)
    server = MockVllmServer(engine, model_id=model, data_parallel_size=RANKS, multimodal=True)
    await server.start()
    options = ["--engine", "vllm-grpc", "--grpc-endpoint", f"127.0.0.1:{server.port}"]
    with contextlib.ExitStack() as stack:

        def start() -> tuple[processes.Server, processes.Server]:
            theirs = stack.enter_context(deployment.frontend(root / "kv", root / "frontend.log"))
            worker = stack.enter_context(deployment.worker(root / "kv", root / "w.log", engine=options, card="qwen3"))
            deployment.until(lambda: "roll" in deployment.models(theirs), theirs.log)
            return theirs, worker

        frontend, worker = await asyncio.to_thread(start)
        async with DynamoClient(frontend.http_url, timeout_s=60) as client:
            yield Rig(engine, server, frontend, worker, client)
        await asyncio.to_thread(stack.close)
    await server.stop()


async def test_sampling_parameters_arrive_as_they_were_sent(rig: Rig) -> None:
    """Dynamo's own projection has floats of 32 bits, one choice and no stop strings."""
    sampling = {"max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "seed": 2**40}
    wire, _ = await rig.call(sampling_params=sampling)

    assert wire["sampling"]["seed"] == str(2**40)
    assert wire["temperature"] == pytest.approx(0.7, abs=1e-7)
    assert wire["sampling"]["top_p"] == pytest.approx(0.9, abs=1e-7)
    assert wire["sampling"]["min_p"] == pytest.approx(0.05, abs=1e-8)


async def test_stop_strings_arrive_and_the_engines_refusal_comes_back_with_its_sentence(rig: Rig) -> None:
    rig.server.calls.clear()
    with pytest.raises(InvalidRequest, match="needs a tokenizer, which the mock engine runs without"):
        await rig.client.generate(PROMPT, model="roll", sampling_params={"stop": ["zz"]})

    (call,) = rig.server.calls
    assert list(call.request.stopping.stop_strings) == ["zz"]


@pytest.mark.parametrize("priority", [7, -3])
async def test_a_priority_arrives_with_its_sign(rig: Rig, priority: int) -> None:
    wire, _ = await rig.call(sampling_params={"max_tokens": 1}, priority=priority)

    assert wire["kv"].get("priority", wire.get("priority")) == priority


async def test_the_rank_that_the_router_chose_arrives(rig: Rig) -> None:
    ranks = set()
    for number in range(6):
        _, call = await rig.call(sampling_params={"max_tokens": 1}, cache_salt=f"s{number}")
        ranks.add(call.metadata.get("x-data-parallel-rank"))
    assert ranks <= {str(rank) for rank in range(RANKS)}, ranks
    assert ranks


async def test_an_image_arrives_under_the_identity_of_its_content(rig: Rig) -> None:
    content = payload(**image_fields(grid=(1, 2, 2)))
    features = {
        "mm_hashes": {"image": ["another's"]},
        "mm_placeholders": {"image": [{"offset": 2, "length": 4, "is_embed": [True, True, False, True]}]},
        "kwargs_data": {"image": [base64.b64encode(content).decode()]},
    }
    wire, _ = await rig.call(sampling_params={"max_tokens": 1}, features=features)

    (item,) = wire["media"]
    assert item["features"]["mm_hash"] == media_identity("image", content)


async def test_an_aborted_rollout_is_a_499_where_nothing_else_was_set(rig: Rig) -> None:
    sampling = {"max_tokens": 2000, "ignore_eos": True}
    asked = asyncio.create_task(
        rig.client.generate(PROMPT, model="roll", sampling_params=sampling, request_id="to-abort")
    )
    rig.server.called.clear()
    async with asyncio.timeout(20):
        await rig.server.called.wait()
    url = f"{rig.worker.http_url}/engine/abort_request"
    status, said = await asyncio.to_thread(deployment.post, url, {"request_id": "to-abort"})
    assert (status, said["aborted"]) == (200, 1)
    with pytest.raises(Cancelled):
        await asked


async def test_a_caller_who_hangs_up_ends_the_engines_work_within_a_few_steps(rig: Rig) -> None:
    """20 ms a step: the engine is asked for 3000 tokens, a minute's work."""
    rig.server.called.clear()
    body = {"model": "roll", "token_ids": PROMPT, "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(
            session.post(f"{rig.frontend.http_url}/inference/v1/generate", data=json.dumps(body),
                         headers={"Content-Type": "application/json"})
        )  # fmt: skip
        async with asyncio.timeout(20):
            await rig.server.called.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    for _ in range(1000):
        if not (await rig.engine.health()).running:
            return
        await asyncio.sleep(0.005)
    pytest.fail("the engine still runs a request whose caller is gone")
