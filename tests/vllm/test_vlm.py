"""A real vision-language engine: features made by a renderer, raw images, and what a client may do to either."""

import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from tests.models.tiny import IMAGE_PAD_ID, VISION_END_ID, VISION_START_ID, shared_model
from tests.vllm.own_server import own_server
from tests.vllm.support import running

from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.errors import InvalidRequest, RollplaneError
from rollplane.identity import identify
from rollplane.protocol.features import parse_features
from rollplane.protocol.request import ContentPart
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import answer, make_request

pytestmark = pytest.mark.asyncio(loop_scope="module")

Features = dict[str, Any]


def data_url(colour: str, size: tuple[int, int] = (56, 56)) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    limits = ("--limit-mm-per-prompt", '{"image": 4, "video": 0}')
    async with running(shared_model("qwen-vl"), *limits, "--mm-processor-cache-gb", "0.1") as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rendered(engine: VllmEngine) -> dict[str, tuple[list[int], Features]]:
    """Token ids and features by colour, as vLLM's own renderer makes them."""
    found = {}
    async with own_server(engine) as client:
        for name, size in (("red", (56, 56)), ("blue", (56, 56)), ("green", (112, 84))):
            content = [{"type": "image_url", "image_url": {"url": data_url(name, size)}}]
            body = {"model": "policy", "messages": [{"role": "user", "content": content}]}
            made = (await client.post("/v1/chat/completions/render", json=body)).json()
            found[name] = (made["token_ids"], made["features"])
    return found


async def look(engine: VllmEngine, token_ids: list[int], features: Features, **sampling: Any) -> GenerateResponse:
    """A greedy answer to a prompt with features, past the checks that a worker makes."""
    items = parse_features(features, prompt_tokens=len(token_ids))
    identify(items)
    asked = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0, **sampling}
    return await answer(engine, make_request(token_ids, fields={"features": items, "return_token_ids": True}, **asked))


def values(response: GenerateResponse) -> list[float]:
    found = response.choices[0].logprobs
    assert found is not None
    return [round(float(x), 3) for x in found.values]


def edited(features: Features, **changes: Any) -> Features:
    return {**msgspec.json.decode(msgspec.json.encode(features)), **changes}


async def test_images_change_the_answer(engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]) -> None:
    answers = {name: values(await look(engine, *made)) for name, made in rendered.items()}

    assert len({tuple(a) for a in answers.values()}) == 3
    assert engine.info.capabilities.features == ["image"]


async def test_features_and_raw_images_give_one_answer(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    """A double normalisation of pixels would show here."""
    token_ids, features = rendered["red"]
    short = [t for i, t in enumerate(token_ids) if t != IMAGE_PAD_ID or token_ids[i - 1] == VISION_START_ID]
    assert short.count(IMAGE_PAD_ID) == 1
    parts = [ContentPart(type="image_url", url=data_url("red"))]
    fields = {"content_parts": parts, "return_token_ids": True}

    raw = await answer(engine, make_request(short, fields=fields, max_tokens=6, temperature=0.0, logprobs=0))

    assert values(raw) == values(await look(engine, token_ids, features))
    assert raw.prompt_token_ids is not None
    assert raw.prompt_token_ids.tolist() == token_ids
    place = features["mm_placeholders"]["image"][0]
    assert raw.mm_placeholders == {"image": [{"offset": place["offset"], "length": place["length"]}]}


async def test_another_images_hash_does_not_bring_its_features(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    """vLLM's encoder cache goes by the hash it is given."""
    red, blue = rendered["red"], rendered["blue"]
    honest = [values(await look(engine, *red)), values(await look(engine, *blue))]

    forged = await look(engine, blue[0], edited(blue[1], mm_hashes=red[1]["mm_hashes"]))

    assert values(forged) == honest[1] != honest[0]


async def test_what_a_client_edits_is_refused(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    """Each beside an honest request whose answer does not change."""
    token_ids, features = rendered["red"]
    bigger = rendered["green"][1]
    control = values(await look(engine, token_ids, features))
    offset = features["mm_placeholders"]["image"][0]["offset"]
    forged: list[tuple[str, Features]] = [
        ("placeholder takes 2", edited(features, mm_placeholders={"image": [{"offset": offset, "length": 2}]})),
        ("ends past the prompt", edited(features, mm_placeholders={"image": [{"offset": 500, "length": 4}]})),
        ("placeholder takes 4", edited(features, kwargs_data=bigger["kwargs_data"])),
        ("MultiModalKwargsItem", edited(features, kwargs_data={"image": [base64.b64encode(b"\x80").decode()]})),
        ("msgpack", edited(features, kwargs_data={"image": [base64.b64encode(b"garbage").decode()]})),
        ("no kwargs_data", edited(features, kwargs_data={"image": [None]}, mm_metadata=None)),
        ("dtype uint8", edited(features, kwargs_data={"image": [_forge(features, pixels="uint8")]})),
        ("patches", edited(features, kwargs_data={"image": [_forge(features, grid=[1, 8, 8])]})),
        ("three sizes", edited(features, kwargs_data={"image": [_forge(features, grid=[1, -4, -4])]})),
        ("fields are", edited(features, kwargs_data={"image": [_forge(features, drop="image_grid_thw")]})),
        ("not finite", edited(features, kwargs_data={"image": [_forge(features, pixels="nan")]})),
    ]
    for word, made in forged:
        with pytest.raises(RollplaneError, match=word) as refusal:
            await look(engine, token_ids, made)
        assert isinstance(refusal.value, InvalidRequest), word

    assert values(await look(engine, token_ids, features)) == control


async def test_an_edited_grid_in_the_metadata_changes_nothing(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    """Identity covers the kwargs; metadata that contradict them must not reach the model."""
    token_ids, features = rendered["red"]
    control = values(await look(engine, token_ids, features))

    with_lies = edited(features, mm_metadata=rendered["green"][1]["mm_metadata"])

    assert values(await look(engine, token_ids, with_lies)) == control


@pytest.mark.parametrize(
    "url",
    ["http://169.254.169.254/latest", "file:///etc/passwd", "http://[::ffff:127.0.0.1]/x", "ftp://host/x", "x" * 50],
)
async def test_only_allowed_hosts_are_fetched(engine: VllmEngine, url: str) -> None:
    parts = [ContentPart(type="image_url", url=url)]
    with pytest.raises(InvalidRequest, match="content_parts"):
        await answer(
            engine, make_request([VISION_START_ID, IMAGE_PAD_ID, VISION_END_ID], fields={"content_parts": parts})
        )


async def test_an_image_that_does_not_decode_is_refused(engine: VllmEngine) -> None:
    parts = [ContentPart(type="image_url", url="data:image/png;base64,AAAA")]
    with pytest.raises(InvalidRequest, match="content_parts"):
        await answer(
            engine, make_request([VISION_START_ID, IMAGE_PAD_ID, VISION_END_ID], fields={"content_parts": parts})
        )


async def test_a_uuid_is_no_identity(engine: VllmEngine) -> None:
    """Two images under one uuid are two images."""
    ids = [900, VISION_START_ID, IMAGE_PAD_ID, VISION_END_ID, 901]
    found = []
    for colour in ("red", "blue"):
        parts = [ContentPart(type="image_url", url=data_url(colour), uuid="same")]
        asked = make_request(ids, fields={"content_parts": parts}, max_tokens=6, temperature=0.0, logprobs=0)
        found.append(values(await answer(engine, asked)))

    assert found[0] != found[1]


async def test_an_update_forgets_what_the_old_tower_saw(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    """There and back again is the same, and between them is not."""
    before = values(await look(engine, *rendered["red"]))
    seen = []
    for seed in (1, 0):
        options = {"seed": seed} if seed else {}
        staged = await engine.stage_weights(str(shared_model("qwen-vl", **options)))
        await engine.pause("keep")
        await engine.apply_weights(staged, version=f"tower-{seed}")
        await engine.resume()
        seen.append(values(await look(engine, *rendered["red"])))

    assert seen[0] != before
    assert seen[1] == before


def _forge(features: Features, *, pixels: str = "", grid: list[int] | None = None, drop: str = "") -> str:
    """The red image's kwargs with one thing changed, in vLLM's own encoding."""
    import torch
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item, encode_mm_kwargs_item

    item = decode_mm_kwargs_item(features["kwargs_data"]["image"][0])
    if pixels == "uint8":
        item["pixel_values"].data = item["pixel_values"].data.to(torch.uint8)
    if pixels == "nan":
        item["pixel_values"].data = torch.full_like(item["pixel_values"].data, float("nan"))
    if grid is not None:
        item["image_grid_thw"].data = torch.from_numpy(np.array(grid))
    if drop:
        del item[drop]
    encoded: str = encode_mm_kwargs_item(item)
    return encoded
