"""The decoder of features under a fuzzer: whatever comes, whole items that the model takes, or our refusal of them."""

import base64
import copy
import os
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.models.qwen_features import element, image_fields, payload, tensor

from rollplane.engines.grpc.media import MediaModel, check_features
from rollplane.errors import CallerError, InvalidRequest
from rollplane.identity import identify, media_identity
from rollplane.protocol.features import MediaItem, check_items, features_envelope, parse_features

PROMPT_TOKENS = 16
MAX_BYTES = 1 << 18
MODELS = (
    MediaModel(merge=2, patch_numbers=1176, normalises=False),
    MediaModel(merge=2, patch_numbers=1176, normalises=True),
    MediaModel(),
)
EXAMPLES = int(os.environ.get("ROLLPLANE_FUZZ_EXAMPLES", "150"))
"""Per test; a long run sets more."""

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=True) | st.sampled_from([0, -1, 1, 4, 2**31, 2**63])
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.binary(max_size=16)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def envelope() -> dict[str, Any]:
    image = b64(payload(**image_fields()))
    return {
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 4}, {"offset": 8, "length": 4, "is_embed": [True] * 4}]},
        "kwargs_data": {"image": [image, image]},
    }


def check_refusal(refusal: CallerError) -> None:
    assert 400 <= refusal.status < 500
    assert str(refusal.param).startswith("features")
    assert msgspec.json.encode(refusal.message)  # no lone surrogates: it goes into an answer


def read(tree: Any) -> list[MediaItem] | None:
    """The items, held to what the decoder promises of them; None where it refused. Anything else raised is the bug."""
    try:
        items = parse_features(tree, prompt_tokens=PROMPT_TOKENS, max_bytes=MAX_BYTES)
    except CallerError as refusal:
        check_refusal(refusal)
        return None
    check_items(items, prompt_tokens=PROMPT_TOKENS)
    identify(items)
    for each in items:
        if each.kwargs is not None:
            assert each.mm_hash == media_identity(each.modality, each.kwargs)
    again = parse_features(features_envelope(items), prompt_tokens=PROMPT_TOKENS, max_bytes=MAX_BYTES)
    assert [repr(each) for each in again] == [repr(msgspec.structs.replace(each, mm_hash=None)) for each in items]
    for model in MODELS:
        held_to(model, items)
    return items


def held_to(model: MediaModel, items: list[MediaItem]) -> None:
    try:
        check_features(items, model)
    except InvalidRequest as refusal:
        check_refusal(refusal)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every node but the root."""
    nodes = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, inner in nodes for found in ((*path, key), *places(inner, (*path, key)))]


def damaged(data: st.DataObject, tree: Any, values: st.SearchStrategy[Any]) -> Any:
    """A copy with one to three nodes replaced, dropped or repeated."""
    tree = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        paths = places(tree)
        if not paths:
            break
        *parents, last = data.draw(st.sampled_from(paths))
        holder = tree
        for key in parents:
            holder = holder[key]
        match data.draw(st.sampled_from(["replace", "drop", "repeat"])):
            case "replace":
                holder[last] = data.draw(values)
            case "drop":
                del holder[last]
            case _ if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[last]))
            case _:
                holder[data.draw(st.text(max_size=5))] = copy.deepcopy(holder[last])
    return tree


def test_the_envelope_that_gets_damaged_below_is_whole() -> None:
    items = read(envelope())

    assert items is not None
    check_features(items, MODELS[0])


@fuzzed
@given(trees)
def test_anything_in_place_of_an_envelope_is_refused(tree: Any) -> None:
    assert read(tree) is None


@fuzzed
@given(st.data())
def test_a_damaged_envelope_is_whole_or_refused(data: st.DataObject) -> None:
    read(damaged(data, envelope(), trees))


@fuzzed
@given(st.binary(min_size=1, max_size=200))
def test_bytes_in_place_of_a_payload_are_a_map_or_refused(raw: bytes) -> None:
    tree = envelope()
    tree["kwargs_data"]["image"][0] = b64(raw)
    read(tree)


@fuzzed
@given(st.data())
def test_a_payload_with_flipped_or_missing_bytes_is_read_or_refused(data: st.DataObject) -> None:
    raw = bytearray(payload(**image_fields(grid=(1, 2, 2))))
    header = 160  # names, dtypes and shapes; most of the rest is pixels
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, header) | st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.just(len(raw)) | st.integers(1, len(raw)))
    tree = envelope()
    tree["kwargs_data"]["image"][1] = b64(bytes(raw[:cut]))
    read(tree)


dtypes = st.sampled_from(["float32", "uint8", "int64", "bfloat16", "bool", "complex64", "", "float32\ud800"[:7]])
extensions = st.builds(msgspec.msgpack.Ext, st.integers(-128, 127) | st.just(3), st.binary(max_size=64))
elements = trees | extensions | st.lists(dtypes | st.lists(numbers, max_size=4) | extensions, max_size=4)


@fuzzed
@given(st.data())
def test_a_payload_with_any_part_replaced_is_read_or_refused(data: st.DataObject) -> None:
    fields = image_fields(grid=(1, 2, 2))
    fields["rate"] = element(0.5)
    fields["pieces"] = element([tensor(np.ones(2, np.float16)), tensor(np.ones(0, np.int32))])
    tree = envelope()
    try:
        tree["kwargs_data"]["image"][0] = b64(msgspec.msgpack.encode(damaged(data, fields, elements)))
    except (OverflowError, UnicodeEncodeError):  # the fuzzer drew what msgpack has no form for
        return
    read(tree)


def test_nesting_of_any_depth_is_read_or_refused() -> None:
    """Decoding and reading recurse; neither may run out of stack on what the other still took."""
    for depth in [*range(1, 12), *range(12, 1200, 7)]:
        inner = msgspec.msgpack.encode(["float32", [0], msgspec.msgpack.Ext(3, b"")])
        data = b"\x91" * depth + inner
        raw = b"\x81\xa1x\x82\xa4data" + data + b"\xa5field\x92\xa7batched\x80"
        tree = envelope()
        tree["kwargs_data"]["image"][0] = b64(raw)
        read(tree)
