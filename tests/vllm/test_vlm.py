"""A real vision-language engine: features made by a renderer, raw images, and what a client may do to either."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from tests.models.tiny import IMAGE_PAD_ID, VIDEO_PAD_ID, VISION_END_ID, VISION_START_ID, make_lora, shared_model
from tests.vllm.own_server import own_server
from tests.vllm.support import running

from rollplane.engines.vllm import versions
from rollplane.engines.vllm.inprocess import VllmEngine
from rollplane.engines.vllm.media import placeholders_of
from rollplane.errors import InvalidRequest, RollplaneError
from rollplane.identity import identify
from rollplane.protocol.features import parse_features
from rollplane.protocol.rendered import RenderBody
from rollplane.protocol.request import ContentPart
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import answer, make_request

pytestmark = pytest.mark.asyncio(loop_scope="module")

Features = dict[str, Any]


def data_url(colour: str, size: tuple[int, int] = (56, 56)) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def video_url(colour: str, frames: int = 4) -> str:
    """Frames as vLLM takes them without a video codec."""
    found = []
    for _ in range(frames):
        buffer = io.BytesIO()
        Image.new("RGB", (56, 56), colour).save(buffer, format="JPEG")
        found.append(base64.b64encode(buffer.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(found)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    limits = ("--limit-mm-per-prompt", '{"image": 4, "video": 1}', "--allowed-media-domains", "127.0.0.1")
    adapters = ("--enable-lora", "--enable-tower-connector-lora", "--max-loras", "2", "--max-lora-rank", "8")
    async with running(shared_model("qwen-vl"), *limits, "--mm-processor-cache-gb", "0.1", *adapters) as started:
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
    for name in ("red", "blue"):
        found[f"{name} video"] = await render_video(engine, name)
    return found


async def render_video(engine: VllmEngine, colour: str) -> tuple[list[int], Features]:
    """The tiny model's chat template has no place for videos, so this asks vLLM's renderer below it."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item

    ids = [900, VISION_START_ID, VIDEO_PAD_ID, VISION_END_ID, 901]
    made = await versions.render_media(engine._engine, {"prompt_token_ids": ids}, [("video_url", video_url(colour))])
    kwargs = {"video": [encode_mm_kwargs_item(item) for item in made["mm_kwargs"]["video"]]}
    places = placeholders_of(made)
    return made["prompt_token_ids"], {"mm_hashes": made["mm_hashes"], "mm_placeholders": places, "kwargs_data": kwargs}


async def look(
    engine: VllmEngine, token_ids: list[int], features: Features, *, adapter: str | None = None, **sampling: Any
) -> GenerateResponse:
    """A greedy answer to a prompt with features, past the checks that a worker makes."""
    items = parse_features(features, prompt_tokens=len(token_ids))
    identify(items)
    asked = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0, **sampling}
    fields = {"features": items, "return_token_ids": True, "adapter": adapter}
    return await answer(engine, make_request(token_ids, fields=fields, **asked))


def values(response: GenerateResponse) -> list[float]:
    found = response.choices[0].logprobs
    assert found is not None
    return [round(float(x), 3) for x in found.values]


def edited(features: Features, **changes: Any) -> Features:
    return {**msgspec.json.decode(msgspec.json.encode(features)), **changes}


async def test_images_change_the_answer(engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]) -> None:
    """Videos too."""
    answers = {name: values(await look(engine, *made)) for name, made in rendered.items()}

    assert len({tuple(a) for a in answers.values()}) == len(rendered) == 5
    assert engine.info.capabilities.features == ["image", "video"]


async def test_a_video_is_held_to_the_rules_of_images(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    token_ids, features = rendered["red video"]
    control = values(await look(engine, token_ids, features))
    [place] = features["mm_placeholders"]["video"]
    longer = [{"offset": place["offset"], "length": place["length"] - 1}]
    image = rendered["red"][1]["kwargs_data"]["image"]
    forged: list[tuple[str, Features]] = [
        ("placeholder takes", edited(features, mm_placeholders={"video": longer})),
        ("fields are", edited(features, kwargs_data={"video": image})),
        ("patches", edited(features, kwargs_data={"video": [_forge(features, grid=[1, 4, 4])]})),
        ("dtype uint8", edited(features, kwargs_data={"video": [_forge(features, pixels="uint8")]})),
        ("not finite", edited(features, kwargs_data={"video": [_forge(features, pixels="nan")]})),
        ("no kwargs_data", edited(features, kwargs_data={"video": [None]}, mm_metadata=None)),
    ]
    for word, made in forged:
        with pytest.raises(InvalidRequest, match=word):
            await look(engine, token_ids, made)

    lying = edited(features, mm_hashes=rendered["blue video"][1]["mm_hashes"])
    assert values(await look(engine, token_ids, lying)) == control


async def test_a_modality_that_the_model_has_not_is_refused(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    token_ids, features = rendered["red"]
    heard = {name: {"audio": by["image"]} for name, by in features.items() if by is not None}
    with pytest.raises(InvalidRequest, match="audio"):
        await look(engine, token_ids, heard)


async def test_the_shape_of_an_image_is_part_of_what_it_is(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    """The same bytes as 2 by 4 and as 4 by 2 patches per side; vLLM is given one hash for both."""
    token_ids, features = rendered["green"]
    tall = _forge(features, grid=[1, 8, 6])
    wide = _forge(features, grid=[1, 6, 8])
    found = [values(await look(engine, token_ids, edited(features, kwargs_data={"image": [k]}))) for k in (tall, wide)]

    assert found[0] != found[1]


async def test_what_we_render_is_what_vllms_own_route_renders(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    """And the engine is not taken to have seen it: the next test sends the same image raw."""
    for colour in ("red", "blue"):
        token_ids, features = rendered[colour]
        parts = [ContentPart(type="image_url", url=data_url(colour))]

        ours = await engine.render_media(RenderBody(token_ids=shortened(token_ids), content_parts=parts))

        assert ours.token_ids == token_ids
        assert ours.features["mm_hashes"] == features["mm_hashes"]
        assert ours.features["mm_placeholders"] == features["mm_placeholders"]
        assert ours.features["kwargs_data"] == features["kwargs_data"]


def shortened(token_ids: list[int]) -> list[int]:
    """One placeholder per image."""
    return [t for i, t in enumerate(token_ids) if t != IMAGE_PAD_ID or token_ids[i - 1] == VISION_START_ID]


async def test_features_and_raw_images_give_one_answer(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    """A double normalisation of pixels would show here."""
    token_ids, features = rendered["red"]
    short = shortened(token_ids)
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


async def test_an_allowed_host_is_fetched_and_sends_nobody_on(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]]
) -> None:
    picture = base64.b64decode(data_url("red").partition(",")[2])
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        asked.append(path)
        if path == "/red.png":
            head = f"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: {len(picture)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + picture)
        else:
            writer.write(b"HTTP/1.1 302 Found\r\nLocation: /red.png\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def fetch(path: str) -> GenerateResponse:
        parts = [ContentPart(type="image_url", url=f"http://127.0.0.1:{port}{path}")]
        sampling = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0}
        return await answer(engine, make_request(short, fields={"content_parts": parts}, **sampling))

    token_ids, features = rendered["red"]
    short = [t for i, t in enumerate(token_ids) if t != IMAGE_PAD_ID or token_ids[i - 1] == VISION_START_ID]
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert values(await fetch("/red.png")) == values(await look(engine, token_ids, features))
        with pytest.raises(InvalidRequest, match="content_parts"):
            await fetch("/elsewhere")

    assert asked == ["/red.png", "/elsewhere"]


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


async def test_a_reloaded_adapter_of_the_tower_reuses_no_encoder_output(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]], tmp_path: Path
) -> None:
    """Each generation has an engine-side name of its own, by which vLLM knows what the tower made. The prefix cache is
    dropped before each answer, so that only the encoder's cache could bring the old one's.
    """
    base = shared_model("qwen-vl")
    paths = [
        str(make_lora(tmp_path / str(i), base=base, seed=i, targets=("qkv", "proj", "down_proj"), strength=4.0))
        for i in range(2)
    ]
    plain = values(await look(engine, *rendered["red"]))
    seen = []
    for generation, path in enumerate((paths[0], paths[1], paths[0]), start=1):
        name = f"eye@{generation}"
        await engine.load_adapter(name, path)
        for _ in range(2):
            assert (await engine.flush_cache()).reset
            seen.append(values(await look(engine, *rendered["red"], adapter=name)))
        await engine.unload_adapter(name)

    assert seen[0] == seen[1] == seen[4] == seen[5]
    assert seen[2] == seen[3]
    assert len({tuple(each) for each in (plain, seen[0], seen[2])}) == 3
    assert values(await look(engine, *rendered["red"])) == plain


async def test_pickles_among_features_are_refused_and_run_nothing(
    engine: VllmEngine, rendered: dict[str, tuple[list[int], Features]], tmp_path: Path
) -> None:
    """In both of the extension types by which vLLM's own encoding carries them, and where a tensor's bytes belong."""
    touched = tmp_path / "touched"
    evil = f"cposix\nsystem\n(S'touch {touched}'\ntR.".encode()
    token_ids, features = rendered["red"]
    for made in (*(msgspec.msgpack.encode(msgspec.msgpack.Ext(code, evil)) for code in (1, 2, 3)), evil):
        forged = edited(features, kwargs_data={"image": [base64.b64encode(made).decode()]})
        with pytest.raises(InvalidRequest, match="kwargs_data"):
            await look(engine, token_ids, forged)
    item = msgspec.msgpack.decode(base64.b64decode(features["kwargs_data"]["image"][0]))
    assert isinstance(item, dict)
    for code in (1, 2):
        spoiled = {name: msgspec.msgpack.Ext(code, evil) for name in item}
        data = base64.b64encode(msgspec.msgpack.encode(spoiled)).decode()
        with pytest.raises(InvalidRequest):
            await look(engine, token_ids, edited(features, kwargs_data={"image": [data]}))
    assert not touched.exists()


def _forge(features: Features, *, pixels: str = "", grid: list[int] | None = None, drop: str = "") -> str:
    """The only item's kwargs with one thing changed, in vLLM's own encoding."""
    import torch
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item, encode_mm_kwargs_item

    [[given]] = features["kwargs_data"].values()
    item = decode_mm_kwargs_item(given)
    [values_of] = [name for name in item if name.startswith("pixel_values")]
    [grid_of] = [name for name in item if name.endswith("grid_thw")]
    if pixels == "uint8":
        item[values_of].data = item[values_of].data.to(torch.uint8)
    if pixels == "nan":
        item[values_of].data = torch.full_like(item[values_of].data, float("nan"))
    if grid is not None:
        item[grid_of].data = torch.from_numpy(np.array(grid))
    if drop:
        del item[drop]
    encoded: str = encode_mm_kwargs_item(item)
    return encoded
