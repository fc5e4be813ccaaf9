"""vLLM's Rust server as it starts by itself: pixels of this model are normalised on the device, so it takes them raw."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from tests.models.tiny import shared_model
from tests.real import images, processes
from tests.real.images import PROMPT, ask, differ, numbers

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.errors import InvalidRequest

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]


@pytest.fixture(scope="module")
def in_process() -> dict[str, Any]:
    return images.answered_in_process("red")


@pytest.fixture(scope="module")
def server(in_process: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    images.rendered()
    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    with processes.vllm_rs(shared_model("qwen-vl"), log, arguments=images.SERVER_ARGUMENTS) as found:
        yield found


@pytest.fixture
async def engine(server: processes.Server) -> AsyncIterator[GrpcEngine]:
    engine = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, start_timeout_s=20))
    await engine.start()
    yield engine
    await engine.close()


async def test_vllm_in_process_gives_the_same_answer(engine: GrpcEngine, in_process: dict[str, Any]) -> None:
    raw = images.rendered()["red-uint8"]
    ids, values = numbers(await ask(engine, raw["token_ids"], features=raw["features"]))

    assert ids == in_process["token_ids"]
    np.testing.assert_allclose(values, in_process["logprobs"], atol=1e-3)


async def test_normalised_pixels_are_refused_naming_the_argument(engine: GrpcEngine) -> None:
    red = images.rendered()["red"]

    with pytest.raises(InvalidRequest, match=r"dtype float32.*--no-mm-device-do-normalize.*mm_device_do_normalize"):
        await ask(engine, red["token_ids"], features=red["features"])


async def test_a_raw_image_is_refused_because_it_would_be_normalised_twice(
    engine: GrpcEngine, server: processes.Server
) -> None:
    red = images.rendered()["red"]
    parts = [{"type": "image_url", "url": red["data_uri"]}]
    with pytest.raises(InvalidRequest, match="processes no raw image here"):
        await ask(engine, PROMPT, content_parts=parts)

    # What would come otherwise: not the image's answer.
    careless = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, mm_device_do_normalize=False))
    await careless.start()
    try:
        raw = images.rendered()["red-uint8"]
        wrong = await ask(careless, PROMPT, content_parts=parts)
        assert differ(wrong, await ask(engine, raw["token_ids"], features=raw["features"]))
    finally:
        await careless.close()
