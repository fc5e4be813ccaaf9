"""Preprocessed features: whole envelopes in prompt order, or a refusal; never a silent fall-back to text."""

import base64
import copy
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplane.errors import InvalidRequest, PayloadTooLarge
from rollplane.protocol.features import MediaItem, check_items, features_envelope, parse_features

PAYLOAD = msgspec.msgpack.encode({"pixel_values": {"data": b"\x01\x02"}})


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def envelope() -> dict[str, Any]:
    return {
        "mm_hashes": {"image": ["a", "b"], "audio": ["c"]},
        "mm_placeholders": {
            "image": [{"offset": 6, "length": 2}, {"offset": 0, "length": 3, "is_embed": [True, False, True]}],
            "audio": [{"offset": 3, "length": 1}],
        },
        "kwargs_data": {"image": [b64(PAYLOAD), b64(PAYLOAD)], "audio": [b64(PAYLOAD)]},
    }


def refused(obj: Any, *, prompt_tokens: int = 8) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_features(obj, prompt_tokens=prompt_tokens)
    assert str(caught.value.param).startswith("features")
    return caught.value


def test_items_come_in_prompt_order_over_all_modalities() -> None:
    items = parse_features(envelope(), prompt_tokens=8)
    assert [(i.modality, i.producer_hash, i.offset, i.length) for i in items] == [
        ("image", "b", 0, 3),
        ("audio", "c", 3, 1),
        ("image", "a", 6, 2),
    ]
    assert items[0].is_embed is not None
    assert items[0].is_embed.tolist() == [True, False, True]
    assert all(i.kwargs == PAYLOAD and i.mm_hash is None for i in items)


def test_the_producers_hash_is_not_the_identity() -> None:
    assert all(item.mm_hash is None for item in parse_features(envelope(), prompt_tokens=8))


def changed(path: str, value: Any) -> dict[str, Any]:
    tree: Any = envelope()
    *parents, last = path.split(".")
    holder = tree
    for name in parents:
        holder = holder[int(name) if isinstance(holder, list) else name]
    key: Any = int(last) if isinstance(holder, list) else last
    if value is KeyError:
        del holder[key]
    else:
        holder[key] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mm_hashes", {}),
        ("mm_hashes", KeyError),
        ("mm_hashes.image", ["a"]),
        ("mm_hashes.image", []),
        ("mm_hashes.image.0", ""),
        ("mm_hashes.image.0", 5),
        ("mm_hashes.text", ["x"]),
        ("mm_hashes.audio", KeyError),
        ("mm_placeholders", KeyError),
        ("mm_placeholders.audio", KeyError),
        ("mm_placeholders.video", []),
        ("mm_placeholders.image.0.offset", -1),
        ("mm_placeholders.image.0.offset", 7),
        ("mm_placeholders.image.0.offset", 2),
        ("mm_placeholders.image.0.offset", 1.0),
        ("mm_placeholders.image.0.offset", 2**70),
        ("mm_placeholders.image.0.length", 0),
        ("mm_placeholders.image.0.length", 3),
        ("mm_placeholders.image.0.length", True),
        ("mm_placeholders.image.0.more", 1),
        ("mm_placeholders.image.1.is_embed", [True, True]),
        ("mm_placeholders.image.1.is_embed", [False, False, False]),
        ("mm_placeholders.image.1.is_embed", [1, 0, 1]),
        ("kwargs_data.image", [b64(PAYLOAD)]),
        ("kwargs_data.audio", KeyError),
        ("kwargs_data.image.0", ""),
        ("kwargs_data.image.0", "!!!"),
        ("kwargs_data.image.0", b64(PAYLOAD).rstrip("=") + "A"),
        ("kwargs_data.image.0", b64(PAYLOAD) + "\n"),
        ("kwargs_data.image.0", "\u00e9\u00e9\u00e9\u00e9"),
        ("kwargs_data.image.0", b64(b"no msgpack")),
        ("kwargs_data.image.0", b64(PAYLOAD + b"\x01")),
        ("kwargs_data.image.0", b64(PAYLOAD[:-1])),
        ("kwargs_data.image.0", b64(msgspec.msgpack.encode([1, 2]))),
        ("kwargs_data.image.0", b64(b"\x81\xa1a" + b"\x91" * 50_000)),
        ("mm_metadata", {"image": ["", ""], "audio": [None]}),
        ("mm_metadata", {"image": [None, None]}),
        ("more", 1),
    ],
)
def test_an_incomplete_or_contradictory_envelope_is_refused(path: str, value: Any) -> None:
    refused(changed(path, value))


def test_a_null_payload_means_the_engines_cache() -> None:
    items = parse_features(changed("kwargs_data.image.0", None), prompt_tokens=8)
    assert [item.kwargs is None for item in items] == [False, False, True]
    assert all(item.kwargs is None for item in parse_features(changed("kwargs_data", KeyError), prompt_tokens=8))


def test_ranges_end_with_the_prompt() -> None:
    parse_features(envelope(), prompt_tokens=8)
    assert "ends past the prompt of 7 tokens" in refused(envelope(), prompt_tokens=7).message


def test_the_decoded_payloads_are_bounded_together() -> None:
    total = 3 * len(PAYLOAD)
    parse_features(envelope(), prompt_tokens=8, max_bytes=total)
    with pytest.raises(PayloadTooLarge, match=f"limit of {total - 1} bytes"):
        parse_features(envelope(), prompt_tokens=8, max_bytes=total - 1)


@st.composite
def media(draw: Any) -> list[MediaItem]:
    """Items that do not overlap, in prompt order."""
    items, at = [], 0
    for _ in range(draw(st.integers(1, 5))):
        at += draw(st.integers(0, 2))
        length = draw(st.integers(1, 4))
        flags = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length).filter(any))
        items.append(
            MediaItem(
                modality=draw(st.sampled_from(["image", "video", "audio"])),
                producer_hash=draw(st.text(min_size=1, max_size=4)),
                offset=at,
                length=length,
                is_embed=None if flags is None else np.array(flags),
                kwargs=msgspec.msgpack.encode({"a": draw(st.binary(max_size=8))}),
                metadata=draw(st.none() | st.binary(min_size=1, max_size=4)),
            )
        )
        at += length
    return items


@settings(max_examples=100, deadline=None)
@given(media())
def test_an_envelope_reads_back(items: list[MediaItem]) -> None:
    end = items[-1].offset + items[-1].length
    tree = msgspec.json.decode(msgspec.json.encode(features_envelope(items)))
    found = parse_features(tree, prompt_tokens=end)
    check_items(found, prompt_tokens=end)
    assert [repr(item) for item in found] == [repr(item) for item in items]


@pytest.mark.parametrize(
    "changes",
    [
        {"modality": "text"},
        {"offset": -1},
        {"length": 0},
        {"offset": 8},
        {"length": 2**62},
        {"is_embed": np.array([True])},
        {"is_embed": np.array([[True, True]])},
        {"offset": 3},
    ],
)
def test_items_from_another_process_are_held_to_the_same_rules(changes: dict[str, Any]) -> None:
    items = parse_features(envelope(), prompt_tokens=8)
    check_items(items, prompt_tokens=8)
    broken = copy.copy(items[2])
    for name, value in changes.items():
        setattr(broken, name, value)
    with pytest.raises(InvalidRequest):
        check_items([*items[:2], broken], prompt_tokens=8)


def test_no_items_is_no_media_and_must_say_so() -> None:
    with pytest.raises(InvalidRequest):
        check_items([], prompt_tokens=8)
