"""Images on vLLM's own Rust server and a real vision engine on the CPU: preprocessed features, and raw."""

import base64
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.models.tiny import IMAGE_PAD_ID, VISION_END_ID, VISION_START_ID, shared_model
from tests.real import processes

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.errors import InvalidRequest
from rollplane.identity import media_identity
from rollplane.protocol.request import parse_request
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import answer

pytestmark = pytest.mark.timeout(300)

PROMPT = [300, 301, VISION_START_ID, IMAGE_PAD_ID, VISION_END_ID, 302, 303]
SAMPLING = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
Rendered = dict[str, Any]


RED, BLUE = "255,0,0", "0,0,255"


def in_vllm(script: str, colour: str, *more: str) -> dict[str, Any]:
    """What a script beside this file prints for one 56 x 56 image of one colour, run in vLLM's environment."""
    python = processes.VLLM_ENV / "bin" / "python"
    path = processes.ROOT / "tests" / "real" / script
    ids = ",".join(str(each) for each in PROMPT)
    command = [str(python), str(path), str(shared_model("qwen-vl")), "56", "56", colour, ids, *more]
    done = subprocess.run(
        command, env=os.environ | processes.VLLM_SETTINGS, capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def render(colour: str) -> Rendered:
    """What a renderer sends for one image."""
    return in_vllm("render_image.py", colour)


@pytest.fixture(scope="module")
def red() -> Rendered:
    return render(RED)


@pytest.fixture(scope="module")
def blue() -> Rendered:
    return render(BLUE)


@pytest.fixture(scope="module")
def red_in_process() -> dict[str, Any]:
    """vLLM's own answer to the red image, from an engine that is gone before the server starts."""
    return in_vllm("answer_image.py", RED, str(SAMPLING["max_tokens"]))


@pytest.fixture(scope="module")
def server(
    red: Rendered, blue: Rendered, red_in_process: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[processes.Server]:
    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    arguments = ["--dtype", "float32", "--limit-mm-per-prompt", '{"image":4,"video":0}']
    with processes.vllm_rs(shared_model("qwen-vl"), log, arguments=arguments) as found:
        yield found


@pytest.fixture
async def engine(server: processes.Server) -> AsyncIterator[GrpcEngine]:
    engine = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, start_timeout_s=20))
    await engine.start()
    yield engine
    await engine.close()


async def ask(engine: GrpcEngine, token_ids: list[int], **fields: Any) -> GenerateResponse:
    body = {"token_ids": token_ids, "sampling_params": SAMPLING, **fields}
    return await answer(engine, parse_request(json.dumps(body).encode()))


def numbers(response: GenerateResponse) -> tuple[list[int], np.ndarray[Any, Any]]:
    choice = response.choices[0]
    assert choice.logprobs is not None
    return choice.token_ids.tolist(), choice.logprobs.values


def differ(first: GenerateResponse, second: GenerateResponse) -> bool:
    return numbers(first)[0] != numbers(second)[0] or not np.allclose(numbers(first)[1], numbers(second)[1], atol=1e-3)


async def test_the_server_says_that_it_takes_images(engine: GrpcEngine) -> None:
    assert "image" in engine.info.capabilities.features
    assert "image" in engine.info.capabilities.raw_media
    assert "audio" not in engine.info.capabilities.features


async def test_features_reach_the_model(engine: GrpcEngine, red: Rendered, blue: Rendered) -> None:
    ids = red["token_ids"]
    plain, of_red, of_blue = [
        await ask(engine, ids, **fields)
        for fields in ({}, {"features": red["features"]}, {"features": blue["features"]})
    ]

    assert differ(of_red, of_blue)
    assert differ(of_red, plain)
    assert not differ(of_red, await ask(engine, ids, features=red["features"]))


async def test_vllm_in_process_gives_the_same_answer(
    engine: GrpcEngine, red: Rendered, red_in_process: dict[str, Any]
) -> None:
    ids, values = numbers(await ask(engine, red["token_ids"], features=red["features"]))

    assert ids == red_in_process["token_ids"]
    np.testing.assert_allclose(values, red_in_process["logprobs"], atol=1e-3)


async def test_an_image_is_known_by_its_content_not_by_the_hash_it_came_with(
    engine: GrpcEngine, red: Rendered, blue: Rendered
) -> None:
    of_red = await ask(engine, red["token_ids"], features=red["features"])
    of_blue = await ask(engine, red["token_ids"], features=blue["features"])
    forged = await ask(
        engine, red["token_ids"], features=blue["features"] | {"mm_hashes": red["features"]["mm_hashes"]}
    )

    assert not differ(forged, of_blue)
    assert differ(forged, of_red)


async def test_placeholders_come_back_with_the_prompt(engine: GrpcEngine, red: Rendered) -> None:
    found = await ask(engine, red["token_ids"], features=red["features"], return_token_ids=True)

    assert found.prompt_token_ids is not None
    assert found.prompt_token_ids.tolist() == red["token_ids"]
    assert found.mm_placeholders == red["features"]["mm_placeholders"]


async def test_a_payload_that_is_none_is_refused_and_the_server_lives(engine: GrpcEngine, red: Rendered) -> None:
    junk = base64.b64encode(msgspec.msgpack.encode({"pixel_values": 7})).decode()
    with pytest.raises(InvalidRequest):
        await ask(engine, red["token_ids"], features=red["features"] | {"kwargs_data": {"image": [junk]}})

    await ask(engine, red["token_ids"], features=red["features"])


async def test_identities_differ_where_content_differs(red: Rendered, blue: Rendered) -> None:
    payloads = [base64.b64decode(each["features"]["kwargs_data"]["image"][0]) for each in (red, blue)]

    assert len({media_identity("image", payload) for payload in payloads}) == 2


async def test_a_raw_image_is_processed_by_the_engine(engine: GrpcEngine, red: Rendered, blue: Rendered) -> None:
    def part(image: Rendered) -> list[dict[str, Any]]:
        return [{"type": "image_url", "url": image["data_uri"], "uuid": f"raw-{image['data_uri'][-40:]}"}]

    of_red = await ask(engine, PROMPT, content_parts=part(red))
    of_blue = await ask(engine, PROMPT, content_parts=part(blue))

    assert of_red.usage.prompt_tokens == len(red["token_ids"])
    assert differ(of_red, of_blue)
    assert differ(of_red, await ask(engine, PROMPT))


async def test_a_raw_image_from_elsewhere_needs_an_allowed_host(engine: GrpcEngine) -> None:
    with pytest.raises(InvalidRequest, match="media_hosts"):
        await ask(engine, PROMPT, content_parts=[{"type": "image_url", "url": "http://127.0.0.1:9/x.png"}])
