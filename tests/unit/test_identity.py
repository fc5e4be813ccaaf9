"""Identities: written-out vectors, and the same hashes computed here by other means (hashlib, struct, XXH3 by hand)."""

import hashlib
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplane import identity
from rollplane.errors import InvalidRequest
from rollplane.identity import (
    CacheScope,
    adapter_digest,
    block_keys,
    engine_salt,
    identify,
    marker_value,
    media_identity,
    routing_marker,
    routing_pad,
    routing_tokens,
)
from rollplane.protocol.features import MediaItem

U64 = 2**64 - 1
# The first 128 bytes of XXH3's public default secret.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364"
)


def xxh3_by_hand(data: bytes, *, seed: int = 0) -> int:
    """XXH3-64 of 17 to 128 bytes, from its published specification."""

    def read(source: bytes, at: int) -> int:
        return int.from_bytes(source[at : at + 8], "little")

    def mix(at: int, secret: int) -> int:
        low = read(data, at) ^ ((read(SECRET, secret) + seed) & U64)
        high = read(data, at + 8) ^ ((read(SECRET, secret + 8) - seed) & U64)
        product = low * high
        return (product & U64) ^ (product >> 64)

    size = len(data)
    total = size * 0x9E3779B185EBCA87
    for i in range((size - 1) // 32, -1, -1):
        total += mix(16 * i, 32 * i) + mix(size - 16 * (i + 1), 32 * i + 16)
    total &= U64
    total ^= total >> 37
    total = total * 0x165667919E3779F9 & U64
    return total ^ (total >> 32)


def led(text: bytes) -> bytes:
    return struct.pack(">Q", len(text)) + text


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=17, max_size=128), st.integers(0, U64))
def test_the_hand_written_hash_is_xxh3(data: bytes, seed: int) -> None:
    assert xxh3_by_hand(data, seed=seed) == xxhash.xxh3_64_intdigest(data, seed=seed)


MEDIA = [
    ("image", b"\x80", "835d2213e413e78e540c88905d36dfa708aa0eb02e9d546026a832c6f5ac5825"),
    ("image", b"pixels", "b618f7fc24cb6f2de64bb2c9d8082501277fde8f48de167cad0731d30879764f"),
    ("audio", b"pixels", "f85360eabea3e4d5e71eb4ee725e3ddd8806c2b75916c44a7abb4b685ca42b88"),
    ("video", bytes(range(256)) * 100, "ff121551ac57efdee239a1bf0d44e83b064d80da303a6903ba7f037fab5a72a4"),
]


@pytest.mark.parametrize(("modality", "raw", "golden"), MEDIA)
def test_media_identity(modality: str, raw: bytes, golden: str) -> None:
    by_hand = hashlib.sha256(b"vllm.grpc.preprocessed-mm.v1" + led(modality.encode()) + led(raw)).hexdigest()
    assert media_identity(modality, raw) == by_hand == golden


MARKERS = [
    ("0" * 64, "64d7310a506075f9000000000000000000000000000000000000000000000000", 275_757_113),
    (
        "b618f7fc24cb6f2de64bb2c9d8082501277fde8f48de167cad0731d30879764f",
        "f3f62bf03fab2910000000000000000000000000000000000000000000000000",
        1_069_181_776,
    ),
]


@pytest.mark.parametrize(("mm_hash", "marker", "pad"), MARKERS)
def test_routing_marker_and_pad(mm_hash: str, marker: str, pad: int) -> None:
    value = xxh3_by_hand(b"grpc-mm:" + mm_hash.encode())
    assert marker_value(mm_hash) == value
    assert routing_marker(mm_hash) == f"{value:016x}" + "0" * 48 == marker
    assert routing_pad(mm_hash) == 1_000_000 + (value & 0x3FFFFFFF) == pad
    assert len(routing_marker(mm_hash)) == 64


def test_modality_and_payload_cannot_be_shifted_into_each_other() -> None:
    assert media_identity("image", b"xy") != media_identity("imagex", b"y")


SALTS = [
    ("s", "v1", "rp-bd5da9c392ec961233a53a751054ba65"),
    (None, "v1", "rp-6fcbfb807d33b187a9069b84eeef77f1"),
    ("ü", "step-2", "rp-e56b143119f90ef31943de7545d6cdf1"),
]


@pytest.mark.parametrize(("salt", "version", "golden"), SALTS)
def test_engine_salt_by_version(salt: str | None, version: str, golden: str) -> None:
    by_hand = hashlib.sha256(b"rollplane.salt.v1" + led(version.encode()) + led((salt or "").encode())).hexdigest()
    assert engine_salt(salt, scope=CacheScope(version).current) == "rp-" + by_hand[:32] == golden


SCOPES = [
    (["v3"], "", "v3", "rp-e888373a7f4b046380a30241804c1dd4"),
    (["v3", "v4", "v3"], "", "v3\x002", "rp-9c354f385895dfd48631ce4e910f17d4"),
    (["v3", "v3"], "", "v3\x002", "rp-9c354f385895dfd48631ce4e910f17d4"),
    (["v3"], "1f", "v3\x001\x001f", "rp-552bd011b195a505813ab085fc40a320"),
    (["v3", "v4", "v3"], "1f", "v3\x002\x001f", "rp-4aa3e6fd848bb9a9bf6bb81b3a0e95b2"),
]


@pytest.mark.parametrize(("names", "life", "scope", "golden"), SCOPES)
def test_each_use_of_a_version_name_is_a_scope_of_its_own(names: list[str], life: str, scope: str, golden: str) -> None:
    first, *later = names
    found = CacheScope(first, life=life)
    for name in later:
        found.renew(name)
    by_hand = hashlib.sha256(b"rollplane.salt.v1" + led(scope.encode()) + led(b"")).hexdigest()

    assert found.current == scope
    assert engine_salt(None, scope=found.current) == "rp-" + by_hand[:32] == golden


def test_workers_that_saw_a_name_as_often_agree_whatever_else_they_saw() -> None:
    old, new = CacheScope("v0"), CacheScope("v9")
    for name in ("v1", "v2", "v1", "v3"):
        old.renew(name)
    new.renew("v3")

    assert old.current == new.current == "v3"


def test_a_name_that_was_let_go_never_gets_a_scope_again_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MAX_SCOPES", 3)
    scope, seen = CacheScope("a"), []
    for name in "aabcdabcdeaabbccddeea":
        scope.renew(name)
        seen.append(scope.current)

    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("salt", [None, "s"])
def test_without_isolation_the_salt_is_the_callers(salt: str | None) -> None:
    assert engine_salt(salt, scope=None) == salt


def test_adapter_digest_is_of_names_and_bytes_in_name_order() -> None:
    files = [("b.bin", b"2"), ("a.json", b"{}")]
    by_hand = hashlib.sha256(
        b"rollplane.adapter.v1" + led(b"a.json") + led(b"{}") + led(b"b.bin") + led(b"2")
    ).hexdigest()
    assert (
        adapter_digest(files)
        == adapter_digest(files[::-1])
        == by_hand
        == "da8aba4ddb4d235ed8872f1dd19aa1bdd393c3b91e30f07f5ef38aaad9e8238a"
    )
    assert adapter_digest([("a", b"bc")]) != adapter_digest([("ab", b"c")])


KEYS = [(None, None, ["8330b1e9a28a13cf", "16d59783b038bf5f"]), ("s", "a@2", ["50ecde0e06ccff73", "62db9ffafdf8818a"])]


@pytest.mark.parametrize(("salt", "adapter", "golden"), KEYS)
def test_block_keys_are_chained_from_the_scope(salt: str | None, adapter: str | None, golden: list[str]) -> None:
    tokens = np.arange(100, 119, dtype=np.int32)
    key = xxh3_by_hand(b"rollplane.block.v1" + led((salt or "").encode()) + led((adapter or "").encode()))
    by_hand = []
    for at in (0, 8):
        key = xxh3_by_hand(struct.pack("<8i", *range(100 + at, 108 + at)), seed=key)
        by_hand.append(key)
    found = block_keys(tokens, block_tokens=8, salt=salt, adapter=adapter)
    assert found == by_hand
    assert [f"{key:016x}" for key in found] == golden


def test_a_partial_block_has_no_key_and_a_prefix_has_the_same_keys() -> None:
    tokens = np.arange(50, dtype=np.int32)
    whole = block_keys(tokens, block_tokens=16)
    assert len(whole) == 3
    assert block_keys(tokens[:33], block_tokens=16) == whole[:2]
    assert block_keys(tokens[:15], block_tokens=16) == block_keys(tokens[:0], block_tokens=16) == []
    assert block_keys(tokens[::-1][::-1], block_tokens=16) == whole


def test_salt_and_adapter_enter_every_key_and_are_not_exchangeable() -> None:
    tokens = np.arange(32, dtype=np.int32)
    chains = [
        block_keys(tokens, block_tokens=16, salt=s, adapter=a) for s in (None, "x", "y") for a in (None, "x", "y")
    ]
    assert len({key for chain in chains for key in chain}) == 18


def item(**fields: object) -> MediaItem:
    base = {"modality": "image", "producer_hash": "p", "offset": 1, "length": 3, "kwargs": b"pixels"}
    return MediaItem(**(base | fields))  # type: ignore[arg-type]


def test_the_worker_recomputes_and_refuses_another_identity() -> None:
    items = [item(), item(kwargs=None)]
    identify(items)
    assert [i.mm_hash for i in items] == ["b618f7fc24cb6f2de64bb2c9d8082501277fde8f48de167cad0731d30879764f", None]
    identify(items)
    items[0].kwargs = b"others"
    with pytest.raises(InvalidRequest, match=r"item 0 .image. claims the identity"):
        identify(items)
    identify(None)


def test_embed_positions_count_as_the_routing_pad() -> None:
    tokens = np.arange(6, dtype=np.int32)
    one, two = item(), item(is_embed=np.array([True, False, True]))
    identify([one, two])
    pad = routing_pad("b618f7fc24cb6f2de64bb2c9d8082501277fde8f48de167cad0731d30879764f")
    assert routing_tokens(tokens, [one]).tolist() == [0, pad, pad, pad, 4, 5]
    assert routing_tokens(tokens, [two]).tolist() == [0, pad, 2, pad, 4, 5]
    assert tokens.tolist() == list(range(6))
    assert routing_tokens(tokens, []) is tokens
    assert routing_tokens(tokens, [one]).dtype == np.int32
