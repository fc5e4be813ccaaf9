"""Images on vLLM's own Rust server and a real vision engine on the CPU, started as trainers' renderers need it: pixels are
not normalised on the device. Preprocessed features, raw images, and both beside an adapter."""

import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.models.tiny import shared_model
from tests.real import images, processes
from tests.real.images import PROMPT, Rendered, ask, differ

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.errors import InvalidRequest
from rollplane.identity import media_identity

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def red() -> Rendered:
    return images.rendered()["red"]


@pytest.fixture(scope="module")
def blue() -> Rendered:
    return images.rendered()["blue"]


@pytest.fixture(scope="module")
def adapter() -> str:
    return str(shared_model("lora", base=str(shared_model("qwen-vl")), seed=3))


@pytest.fixture(scope="module")
def server(adapter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    images.rendered()
    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    arguments = [*images.SERVER_ARGUMENTS, "--no-mm-device-do-normalize"]
    arguments += ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "3"]
    environment = {
        "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(Path(adapter).parent),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    with processes.vllm_rs(shared_model("qwen-vl"), log, arguments=arguments, environment=environment) as found:
        yield found


@pytest.fixture
async def engine(server: processes.Server) -> AsyncIterator[GrpcEngine]:
    settings = GrpcSettings(endpoint=server.grpc_target, start_timeout_s=20, mm_device_do_normalize=False)
    engine = GrpcEngine(settings)
    await engine.start()
    yield engine
    await engine.close()


def features_of(rendered: Rendered, **changes: Any) -> dict[str, Any]:
    return {**rendered["features"], **changes}


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


async def test_an_image_is_known_by_its_content_not_by_the_hash_it_came_with(
    engine: GrpcEngine, red: Rendered, blue: Rendered
) -> None:
    of_red = await ask(engine, red["token_ids"], features=red["features"])
    of_blue = await ask(engine, red["token_ids"], features=blue["features"])
    forged = await ask(engine, red["token_ids"], features=features_of(blue, mm_hashes=red["features"]["mm_hashes"]))

    assert not differ(forged, of_blue)
    assert differ(forged, of_red)


async def test_placeholders_come_back_with_the_prompt(engine: GrpcEngine, red: Rendered) -> None:
    found = await ask(engine, red["token_ids"], features=red["features"], return_token_ids=True)

    assert found.prompt_token_ids is not None
    assert found.prompt_token_ids.tolist() == red["token_ids"]
    assert found.mm_placeholders == red["features"]["mm_placeholders"]


async def test_a_payload_that_is_none_is_refused_and_the_server_lives(engine: GrpcEngine, red: Rendered) -> None:
    junk = base64.b64encode(msgspec.msgpack.encode({"pixel_values": 7})).decode()
    with pytest.raises(InvalidRequest, match="MultiModalKwargsItem"):
        await ask(engine, red["token_ids"], features=features_of(red, kwargs_data={"image": [junk]}))

    await ask(engine, red["token_ids"], features=red["features"])


async def test_a_placeholder_of_another_length_than_the_grids_is_refused(engine: GrpcEngine, red: Rendered) -> None:
    (place,) = red["features"]["mm_placeholders"]["image"]
    short = {"image": [{"offset": place["offset"], "length": place["length"] - 2}]}

    with pytest.raises(InvalidRequest, match=r"takes 2 embeddings, the grid \[1, 4, 4\] makes 4"):
        await ask(engine, red["token_ids"], features=features_of(red, mm_placeholders=short))


async def test_pixels_that_the_server_would_not_normalise_are_refused(engine: GrpcEngine) -> None:
    raw = images.rendered()["red-uint8"]

    with pytest.raises(InvalidRequest, match=r"pixel_values has dtype uint8.*--mm-device-do-normalize"):
        await ask(engine, raw["token_ids"], features=raw["features"])


async def test_identities_differ_where_content_differs(red: Rendered, blue: Rendered) -> None:
    payloads = [base64.b64decode(each["features"]["kwargs_data"]["image"][0]) for each in (red, blue)]

    assert len({media_identity("image", payload) for payload in payloads}) == 2


async def test_a_raw_image_is_what_its_features_are(engine: GrpcEngine, red: Rendered, blue: Rendered) -> None:
    def part(image: Rendered) -> list[dict[str, Any]]:
        return [{"type": "image_url", "url": image["data_uri"], "uuid": f"raw-{image['data_uri'][-40:]}"}]

    of_red = await ask(engine, PROMPT, content_parts=part(red))
    of_blue = await ask(engine, PROMPT, content_parts=part(blue))

    assert of_red.usage.prompt_tokens == len(red["token_ids"])
    assert not differ(of_red, await ask(engine, red["token_ids"], features=red["features"]))
    assert not differ(of_blue, await ask(engine, blue["token_ids"], features=blue["features"]))
    assert differ(of_red, of_blue)


async def test_a_raw_image_from_elsewhere_needs_an_allowed_host(engine: GrpcEngine) -> None:
    with pytest.raises(InvalidRequest, match="media_hosts"):
        await ask(engine, PROMPT, content_parts=[{"type": "image_url", "url": "http://127.0.0.1:9/x.png"}])


async def test_an_adapter_sees_the_image_and_keeps_its_view_of_it_to_itself(
    engine: GrpcEngine, red: Rendered, blue: Rendered, adapter: str
) -> None:
    ids = red["token_ids"]
    before = await ask(engine, ids, features=red["features"])
    await engine.load_adapter("vl@1", adapter)
    try:
        of_red, of_blue = [await ask(engine, ids, features=each["features"], adapter="vl@1") for each in (red, blue)]
    finally:
        await engine.unload_adapter("vl@1")

    assert differ(of_red, of_blue)
    assert differ(of_red, before)
    assert not differ(before, await ask(engine, ids, features=red["features"]))
