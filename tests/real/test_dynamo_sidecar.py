"""NVIDIA Dynamo's own sidecar in front of our mock vLLM server, and what it sends beside what our engine sends."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from tests.models.qwen_features import image_fields, payload
from tests.models.tiny import shared_model
from tests.real import processes

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.mock_server import MockVllmServer
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.identity import media_identity
from rollplane.protocol.request import parse_request
from rollplane.testing import answer

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [300 + 7 * i for i in range(12)]
PAYLOAD = payload(**image_fields(grid=(1, 2, 2)))
FEATURES = {
    "mm_hashes": {"image": ["theirs"]},
    "mm_placeholders": {"image": [{"offset": 2, "length": 4, "is_embed": [True, True, False, True]}]},
    "kwargs_data": {"image": [base64.b64encode(PAYLOAD).decode()]},
}


@dataclass
class Rig:
    """The mock server, Dynamo's frontend (its sidecar is beside it) and our engine, all on the one mock."""

    mock: MockVllmServer
    frontend: processes.Server
    engine: GrpcEngine
    session: aiohttp.ClientSession

    async def dynamo(self, body: dict[str, Any]) -> tuple[int, Any]:
        url = f"{self.frontend.http_url}/inference/v1/generate"
        async with self.session.post(url, json={"model": "roll", **body}) as answered:
            return answered.status, await answered.json()

    async def both(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """The wire requests of one body through both, as dicts without the request's id."""
        self.mock.calls.clear()
        status, text = await self.dynamo(body)
        assert status == 200, text
        await answer(self.engine, parse_request(json.dumps(body).encode()))
        theirs, ours = (MessageToDict(call.request, preserving_proto_field_name=True) for call in self.mock.calls)
        del theirs["request_id"], ours["request_id"]
        return theirs, ours


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    root = tmp_path_factory.mktemp("dynamo")
    model = str(await asyncio.to_thread(shared_model, "qwen3"))
    mock = MockVllmServer(MockEngine(MockSettings(model="roll", vocab_tokens=1024)), model_id=model)
    await mock.start()
    engine = GrpcEngine(GrpcSettings(endpoint=f"127.0.0.1:{mock.port}"))
    await engine.start()
    with contextlib.ExitStack() as stack:
        stand_in = processes.Server(pid=0, http_port=9, log=root / "none", grpc_port=mock.port)

        def start() -> processes.Server:
            found = stack.enter_context(processes.dynamo_frontend(root / "kv", root / "frontend.log"))
            stack.enter_context(processes.dynamo_sidecar(root / "kv", root / "sidecar.log", engine=stand_in))
            return found

        frontend = await asyncio.to_thread(start)
        async with aiohttp.ClientSession() as session:
            await wait_for_model(session, frontend, root / "sidecar.log")
            yield Rig(mock, frontend, engine, session)
    await engine.close()
    await mock.stop()


async def wait_for_model(session: aiohttp.ClientSession, frontend: processes.Server, log: Path) -> None:
    """The frontend finds the sidecar's model a moment after both are up; it is asked until then."""
    try:
        async with asyncio.timeout(60):
            while True:
                async with session.get(f"{frontend.http_url}/v1/models") as answered:
                    if any(model["id"] == "roll" for model in (await answered.json())["data"]):
                        return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"the model did not appear, see {log}") from None


async def test_the_sidecar_is_satisfied_and_folds_what_the_mock_streams(rig: Rig) -> None:
    sampling = {"max_tokens": 9, "temperature": 0.8, "top_k": 7, "seed": 4, "logprobs": 1}
    status, theirs = await rig.dynamo({"token_ids": PROMPT, "sampling_params": sampling})
    ours = await answer(
        rig.engine, parse_request(json.dumps({"token_ids": PROMPT, "sampling_params": sampling}).encode())
    )

    assert status == 200, theirs
    assert theirs["choices"][0]["token_ids"] == ours.choices[0].token_ids.tolist()
    assert ours.choices[0].logprobs is not None
    np.testing.assert_allclose(
        [entry["logprob"] for entry in theirs["choices"][0]["logprobs"]["content"]], ours.choices[0].logprobs.values
    )
    assert [call.method for call in rig.mock.calls][-2:] == ["GenerateStream", "Generate"]


async def test_the_same_request_differs_only_where_we_say_why(rig: Rig) -> None:
    theirs, ours = await rig.both(
        {
            "token_ids": PROMPT,
            "sampling_params": {
                "max_tokens": 5,
                "min_tokens": 2,
                "temperature": 0.75,
                "top_k": 9,
                "top_p": 0.5,
                "min_p": 0.125,
                "seed": 3,
                "stop_token_ids": [9, 10],
                "ignore_eos": True,
                "logprobs": 2,
                "skip_special_tokens": False,
            },
            "cache_salt": "v7",
            "priority": 3,
        }
    )

    # The model: theirs is the served name; the server has one base model, so ours leaves it out.
    assert theirs.pop("model") == "roll"
    # Salts: Dynamo separates its own from others'; our worker scopes a salt by policy version before it comes here.
    assert (theirs["kv"].pop("cache_salt"), ours["kv"].pop("cache_salt")) == ("dynamo-cache-salt:v7", "v7")
    # Text: nobody reads it on a route of token ids, and making it costs the server a detokenisation.
    assert (theirs["response"].pop("output_text"), ours["response"].pop("output_text")) == (True, False)
    # A repetition penalty of 0 is the server's default, which a generation config may set; ours says neutral.
    assert (theirs["decoding"], ours["decoding"]) == ({}, {"repetition_penalty": 1.0})
    del theirs["decoding"], ours["decoding"]
    assert theirs == ours


async def test_what_was_left_out_is_the_servers_default_for_them_and_neutral_for_us(rig: Rig) -> None:
    theirs, ours = await rig.both({"token_ids": PROMPT, "sampling_params": {}})

    assert (theirs["temperature"], ours["temperature"]) == (1.0, 1.0)
    assert theirs["sampling"] == {"num_sequences": 1}
    assert ours["sampling"] == {"num_sequences": 1, "top_k": 4_294_967_295, "top_p": 1.0}
    assert theirs["stopping"] == {}  # runs to the end of the context too, by the server's reckoning
    assert ours["stopping"] == {"max_new_tokens": 4096 - len(PROMPT)}


async def test_features_are_the_same_but_for_the_form_of_the_identity(rig: Rig) -> None:
    theirs, ours = await rig.both({"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "features": FEATURES})
    digest = media_identity("image", PAYLOAD)
    (their_item,), (our_item,) = theirs["media"], ours["media"]

    # One content hash; Dynamo writes its domain in front of it.
    for name in ("identifier", "mm_hash"):
        assert their_item["features"].pop(name) == f"grpc-mm:{digest}"
        assert our_item["features"].pop(name) == digest
    assert their_item == our_item
    assert base64.b64decode(our_item["features"]["kwargs"]) == PAYLOAD


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": -1}, {"n": 2, "seed": 1}, {"stop_token_ids": [3], "return_token_ids": True, "top_k": 0}],
    ids=["no-top-k", "two-choices", "prime-rl"],
)
async def test_what_their_sidecar_refuses_and_ours_serves(rig: Rig, sampling: dict[str, Any]) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3, **sampling}}
    status, _ = await rig.dynamo(body)

    assert status == 400
    found = await answer(rig.engine, parse_request(json.dumps(body).encode()))
    assert len(found.choices) == sampling.get("n", 1)


async def test_prompt_logprobs_are_asked_for_alike(rig: Rig) -> None:
    theirs, ours = await rig.both({"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}})

    for each in (theirs, ours):
        del each["response"]["output_text"]
    assert theirs["response"] == ours["response"]
