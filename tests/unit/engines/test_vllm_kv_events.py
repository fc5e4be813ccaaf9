"""vLLM's event batches, as its publisher encodes them, against the keys that a frontend computes."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.engines.kv_mirror import KvMirror
from rollplane.engines.vllm_kv_events import read_batch
from rollplane.errors import EngineProtocolError
from rollplane.identity import block_keys, media_identity, routing_marker, routing_tokens
from rollplane.protocol.features import MediaItem
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvBatch, KvEvent
from rollplane.router.prefix_index import PrefixIndex

PAD = 151_655


def encoded(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(tokens: list[int], **fields: Any) -> dict[str, Any]:
    count = len(tokens) // 4
    return {
        "type": "BlockStored",
        "block_hashes": list(range(2**63, 2**63 + count)),
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * count,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **fields,
    }


def matched(events: list[KvEvent], keys: list[int]) -> int:
    index = PrefixIndex(block_tokens=4)
    index.observe("w", instance="i", generation=0)
    index.apply("w", KvBatch(instance="i", generation=0, events=events))
    return index.match(keys).get("w", 0)


def test_text_salted_and_adapter_blocks_have_the_frontends_keys() -> None:
    tokens = list(range(12))
    array = np.array(tokens, dtype=np.int32)
    assert matched(read_batch(encoded(stored(tokens))), block_keys(array, block_tokens=4)) == 3
    salted = read_batch(encoded(stored(tokens, extra_keys=[["s1"], None, None])))
    assert matched(salted, block_keys(array, block_tokens=4, salt="s1")) == 3
    assert matched(salted, block_keys(array, block_tokens=4)) == 0
    adapted = read_batch(
        encoded(stored(tokens, lora_id=1, lora_name="a@1", extra_keys=[["a@1", "s1"], ["a@1"], ["a@1"]]))
    )
    assert matched(adapted, block_keys(array, block_tokens=4, salt="s1", adapter="a@1")) == 3
    unsalted = read_batch(encoded(stored(tokens, lora_id=1, lora_name="a@1", extra_keys=[["a@1"]] * 3)))
    assert matched(unsalted, block_keys(array, block_tokens=4, adapter="a@1")) == 3


@pytest.mark.parametrize("lora", [None, "a@1"])
@pytest.mark.parametrize("marker", [False, True])
def test_image_blocks_have_the_frontends_keys_wherever_the_image_lies(lora: str | None, marker: bool) -> None:
    """Two images that touch, over several blocks, with text before and behind."""
    tokens = [1, 2, 3, *[PAD] * 7, *[PAD] * 3, 4, 5, 6]
    items = []
    for offset, length, content in ((3, 7, b"cat"), (10, 3, b"dog")):
        item = MediaItem(modality="image", producer_hash="p", offset=offset, length=length, kwargs=content)
        item.mm_hash = media_identity("image", content)
        items.append(item)
    names = [routing_marker(str(item.mm_hash)) if marker else str(item.mm_hash) for item in items]
    if lora is not None and not marker:
        names = [f"{lora}:{name}" for name in names]
    cat, dog = names
    extra: list[list[Any]] = [[[cat, 3]], [[cat, -1]], [[cat, -5], [dog, 2]], [[dog, -2]]]
    if lora is not None:
        extra = [[lora, *keys] for keys in extra]
    events = read_batch(encoded(stored(tokens, lora_name=lora, extra_keys=extra)))
    routed = routing_tokens(np.array(tokens, dtype=np.int32), items)
    assert matched(events, block_keys(routed, block_tokens=4, adapter=lora)) == 4


def test_events_that_are_not_of_the_engines_own_full_attention_cache_are_left_out() -> None:
    tokens = list(range(8))
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}
    batch = encoded(
        stored(tokens, group_idx=1),
        stored(tokens, medium="CPU"),
        removed,
        {**removed, "group_idx": 1},
        {**removed, "medium": "CPU"},
        {"type": "AllBlocksCleared"},
    )
    assert read_batch(batch) == [BlocksRemoved(hashes=[7]), CacheCleared()]


def test_long_hashes_are_named_by_their_last_64_bits() -> None:
    long = bytes(range(32))
    events = read_batch(encoded(stored([1, 2, 3, 4], block_hashes=[long], parent_block_hash=long)))
    (event,) = events
    assert isinstance(event, BlocksStored)
    assert event.hashes == [int.from_bytes(long[-8:], "big")] == [event.parent]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\xc1", "cannot be read"),
        (msgspec.msgpack.encode({"events": []}), "cannot be read"),
        (encoded({"type": "Unheard"}), "cannot be read"),
        (encoded(stored([1, 2, 3, 4, 5])), "1 blocks of 4 tokens with 5 token ids"),
        (encoded(stored(list(range(8)), extra_keys=[None])), "2 blocks with the extra keys of 1"),
        (encoded(stored([1, 2, 3, 2**40])), "beyond 32 bits"),
    ],
)
def test_a_batch_that_is_wrong_is_an_error_that_says_how(payload: bytes, message: str) -> None:
    with pytest.raises(EngineProtocolError, match=message):
        read_batch(payload)


async def test_a_mirror_tells_a_late_follower_all_of_it_and_then_the_changes() -> None:
    mirror = KvMirror()
    tokens = list(range(12))
    mirror.take(read_batch(encoded(stored(tokens, extra_keys=[["s"], None, None]))))
    mirror.take([BlocksRemoved(hashes=[2**63 + 2])])
    feed = mirror.feed()
    first = await anext(feed)
    keys = block_keys(np.array(tokens, dtype=np.int32), block_tokens=4, salt="s")
    assert matched(first, keys) == 2
    mirror.clear()
    assert await anext(feed) == [CacheCleared()]
    assert (len(mirror), mirror.snapshot()) == (0, [])
    mirror.end()
    assert [batch async for batch in feed] == []
    assert [batch async for batch in mirror.feed()] == [[]]
    assert repr(mirror) == "<KvMirror 0 blocks, 0 followers>"


async def test_a_follower_that_is_far_behind_is_told_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplane.engines.kv_mirror.MAX_WAITING_BATCHES", 3)
    mirror = KvMirror()
    feed = mirror.feed()
    assert await anext(feed) == []
    for i in range(6):
        mirror.take(read_batch(encoded(stored([i] * 4, block_hashes=[i]))))
    seen = [await anext(feed) for _ in range(3)]
    assert seen[0][0] == CacheCleared()
    told = [event.hashes[0] for batch in seen for event in batch if isinstance(event, BlocksStored)]
    assert sorted(set(told)) == list(range(6))
