"""The prefix index against written-out keys, against the mock engine's own cache, and at its bounds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplane.engines.mock.prefix_cache import PrefixCache
from rollplane.errors import Conflict, EngineProtocolError, InvalidRequest
from rollplane.identity import block_keys
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvBatch, KvEvent
from rollplane.router.prefix_index import SWEPT_PER_CALL, PrefixIndex
from rollplane.testing.clock import FakeClock


def tokens(count: int, *, start: int = 0) -> Int32Array:
    return np.arange(start, start + count, dtype=np.int32)


def keys(prompt: Int32Array, *, salt: str | None = None, adapter: str | None = None) -> list[int]:
    return block_keys(prompt, block_tokens=4, salt=salt, adapter=adapter)


def stored(prompt: Int32Array, *, first: int = 1, parent: int | None = None, **scope: Any) -> BlocksStored:
    count = prompt.size // 4
    return BlocksStored(
        hashes=list(range(first, first + count)), parent=parent, token_ids=prompt, block_tokens=4, **scope
    )


def index_of(*workers: str, **options: Any) -> PrefixIndex:
    index = PrefixIndex(block_tokens=4, **options)
    for worker in workers:
        index.observe(worker, instance=f"{worker}-1", generation=0)
    return index


def batch(worker: str, *events: KvEvent, generation: int = 0, instance: str | None = None) -> KvBatch:
    return KvBatch(instance=instance or f"{worker}-1", generation=generation, events=list(events))


# Written out; made once with struct and xxhash alone.
GOLDEN: list[tuple[dict[str, str], list[int]]] = [
    ({}, [14546691560773321303, 16857555018735308807]),
    ({"salt": "s"}, [3922811318093092054, 15105102288038121974]),
    ({"adapter": "a@1"}, [4211567487160200435, 3697731878611003896]),
    ({"salt": "s", "adapter": "a@1"}, [10206740037646961323, 1693822807987151826]),
]


@pytest.mark.parametrize(("scope", "golden"), GOLDEN)
def test_keys_are_chained_from_tokens_salt_and_adapter_and_not_from_the_engines_hashes(
    scope: dict[str, str], golden: list[int]
) -> None:
    index = index_of("a")
    index.apply("a", batch("a", stored(tokens(8), **scope)))
    assert keys(tokens(8), **scope) == golden
    assert index.match(golden) == {"a": 2}
    other = {} if scope else {"salt": "s"}
    assert index.match(keys(tokens(8), **other)) == {}


def test_a_later_event_goes_on_from_its_parent() -> None:
    index = index_of("a")
    index.apply("a", batch("a", stored(tokens(8), salt="s")))
    # As vLLM does it: only a prompt's first block carries the salt.
    index.apply("a", batch("a", stored(tokens(4, start=8), first=3, parent=2)))
    assert index.match(keys(tokens(12), salt="s")) == {"a": 3}


def test_a_block_whose_parent_is_unknown_is_left_out_and_counted() -> None:
    index = index_of("a")
    index.apply("a", batch("a", stored(tokens(8), parent=77)))
    assert index.match(keys(tokens(8))) == {}
    assert index.sizes.orphans == 2


def test_each_worker_has_as_many_leading_blocks_as_it_said() -> None:
    index = index_of("a", "b", "c")
    index.apply("a", batch("a", stored(tokens(16))))
    index.apply("b", batch("b", stored(tokens(8))))
    assert index.match(keys(tokens(20))) == {"a": 4, "b": 2}
    index.apply("a", batch("a", BlocksRemoved(hashes=[3, 999])))
    assert index.match(keys(tokens(20))) == {"a": 2, "b": 2}
    index.apply("b", batch("b", CacheCleared()))
    assert index.match(keys(tokens(20))) == {"a": 2}


def test_another_block_size_is_refused_with_both_sizes_and_the_worker_and_nothing_of_it_is_kept() -> None:
    index = index_of("a", "b")
    index.apply("a", batch("a", stored(tokens(8))))
    other = BlocksStored(hashes=[1], parent=None, token_ids=tokens(8), block_tokens=8)
    with pytest.raises(InvalidRequest, match="worker b caches blocks of 8 tokens, this index has blocks of 4"):
        index.apply("b", batch("b", stored(tokens(8)), other))
    assert index.match(keys(tokens(8))) == {"a": 2}


def test_an_event_that_contradicts_itself_is_an_error_with_the_numbers() -> None:
    event = BlocksStored(hashes=[1, 2], parent=None, token_ids=tokens(4), block_tokens=4)
    with pytest.raises(EngineProtocolError, match="2 blocks of 4 tokens with 4 token ids"):
        index_of("a").apply("a", batch("a", event))


def test_a_newer_generation_or_another_process_drops_what_was_known_and_older_events_stay_out() -> None:
    index = index_of("a")
    index.apply("a", batch("a", stored(tokens(8))))
    index.observe("a", instance="a-1", generation=1)
    assert index.match(keys(tokens(8))) == {}
    index.apply("a", batch("a", stored(tokens(8)), generation=0))
    assert (index.match(keys(tokens(8))), index.sizes.stale) == ({}, 1)
    index.apply("a", batch("a", stored(tokens(8)), generation=2))
    assert index.match(keys(tokens(8))) == {"a": 2}
    index.observe("a", instance="a-1", generation=1)  # a state that is older than the events
    assert index.match(keys(tokens(8))) == {"a": 2}
    index.observe("a", instance="a-2", generation=0)
    assert index.match(keys(tokens(8))) == {}
    with pytest.raises(Conflict, match="process a-1"):
        index.apply("a", batch("a", stored(tokens(8)), generation=9))


def test_what_was_routed_counts_before_the_event_and_is_settled_by_it() -> None:
    index = index_of("a", "b")
    prompt = keys(tokens(16))
    index.predict("a", prompt)
    assert index.match(prompt) == {"a": 4}
    assert index.pending_tokens() == {"a": 16}
    index.apply("a", batch("a", stored(tokens(8))))
    assert index.pending_tokens()["a"] == 8
    index.apply("a", batch("a", stored(tokens(8, start=8), first=3, parent=2)))
    assert (index.pending_tokens(), index.sizes.predicted) == ({}, 0)
    index.apply("a", batch("a", BlocksRemoved(hashes=[4])))
    assert index.match(prompt) == {"a": 3}


def test_a_prediction_that_does_not_come_true_expires_and_a_repeated_one_lives_on() -> None:
    clock = FakeClock()
    index = index_of("a", predicted_s=10.0, clock=clock)
    once, again = keys(tokens(8)), keys(tokens(8, start=100))
    index.predict("a", once)
    index.predict("a", again)
    for _ in range(2):
        clock._now += 10.0
        depth = index.match(again)["a"]
        index.predict("a", again, depth=depth)
    assert index.match(once) == {}
    assert index.match(again) == {"a": 2}
    assert index.pending_tokens() == {"a": 8}
    clock._now += 20.0
    assert index.match(again) == {}
    assert index.pending_tokens() == {}


def test_a_dropped_workers_predictions_go_with_it_and_never_come_back_with_its_bit() -> None:
    clock = FakeClock()
    index = index_of("a", predicted_s=10.0, clock=clock)
    prompt = keys(tokens(8))
    for _ in range(100):
        index.predict("a", prompt)
        index.drop_worker("a")
        assert index.match(prompt) == {}
        clock._now += 4.0
        index.observe("b", instance="b-1", generation=0)
        assert index.match(prompt) == {}
        index.remove_worker("b")
    assert index._next_bit < 30


def test_forgetting_a_worker_costs_nothing_at_once_and_is_swept_up_by_later_calls() -> None:
    index = index_of("a", "b")
    many = tokens(4 * 3 * SWEPT_PER_CALL)
    index.apply("a", batch("a", stored(many)))
    index.drop_worker("a")
    assert index.sizes.forgotten == 3 * SWEPT_PER_CALL
    for _ in range(3):
        index.match(keys(tokens(4)))
    assert (index.sizes.forgotten, index.sizes.blocks, len(index._reported)) == (0, 0, 0)


def test_memory_is_bounded_and_the_oldest_of_the_fullest_worker_go_first() -> None:
    index = index_of("a", "b", capacity_blocks=128)
    index.apply("b", batch("b", stored(tokens(16))))
    for i in range(50):
        index.apply("a", batch("a", stored(tokens(32, start=100 * i), first=1 + 8 * i)))
        assert index.sizes.blocks <= 128
    assert index.match(keys(tokens(16)))["b"] == 4
    assert index.match(keys(tokens(32, start=0))) == {"b": 4}
    assert index.match(keys(tokens(32, start=4900))) == {"a": 8}
    assert index.sizes.evicted >= 50 * 8 - 128
    for i in range(50):
        index.predict("b", keys(tokens(32, start=10_000 + 100 * i)))
    assert index.sizes.predicted <= 2 * (128 // 4 + 8)


def test_a_worker_without_events_is_taken_to_have_what_it_computed() -> None:
    index = index_of("a")
    prompt = keys(tokens(16))
    index.predict("a", prompt)
    index.assume("a", prompt)
    assert (index.match(prompt), index.pending_tokens(), index.sizes.predicted) == ({"a": 4}, {}, 0)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["store", "hold", "release", "flush", "preempt"]),
        st.integers(0, 3),
        st.integers(1, 40),
        st.sampled_from([None, "s"]),
        st.sampled_from([None, "lora@1"]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(CALLS)
def test_the_index_agrees_with_the_engines_cache_after_any_history(calls: list[tuple[Any, ...]]) -> None:
    cache = PrefixCache(block_tokens=4, capacity_blocks=12)
    index = index_of("a")
    prompts = [np.concatenate([tokens(12), tokens(28, start=100 * i)]) for i in range(4)]
    held: list[list[int]] = []
    asked: list[list[int]] = []
    for call, which, size, salt, adapter in calls:
        prompt = prompts[which][:size]
        chain = keys(prompt, salt=salt, adapter=adapter)
        asked.append(chain)
        if call == "store":
            cache.store(chain, prompt, salt=salt, adapter=adapter)
        elif call == "hold":
            held.append(cache.hold(chain))
        elif call == "release" and held:
            cache.release(held.pop())
        elif call in ("flush", "preempt"):
            cache.clear(held_too=call == "preempt")
        index.apply("a", batch("a", *cache.take_events()))
        assert index.blocks_of("a") == len(cache)
    for chain in asked:
        assert index.match(chain).get("a", 0) == next(
            (i for i, key in enumerate(chain) if key not in cache._blocks), len(chain)
        )
    late = index_of("a")
    late.apply("a", batch("a", *cache.snapshot()))
    assert late.sizes.orphans == 0 or late.blocks_of("a") < len(cache)
    for chain in asked:
        assert late.match(chain) == index.match(chain)
