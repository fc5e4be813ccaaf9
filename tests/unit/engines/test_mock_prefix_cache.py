import numpy as np
import pytest

from rollplane.engines.mock.prefix_cache import PrefixCache
from rollplane.identity import block_keys
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, CacheCleared


def chain(*blocks: int, size: int = 4) -> np.ndarray:
    return np.repeat(np.array(blocks, dtype=np.int32), size)


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(block_tokens=4, capacity_blocks=4)


def store(cache: PrefixCache, tokens: np.ndarray) -> list[int]:
    keys = block_keys(tokens, block_tokens=4)
    cache.store(keys, tokens, salt=None, adapter=None)
    return keys


def test_a_stored_prefix_is_hit_up_to_where_it_differs(cache: PrefixCache) -> None:
    store(cache, chain(1, 2, 3))

    assert cache.hit(block_keys(chain(1, 2, 9), block_tokens=4)) == 2
    assert cache.hit(block_keys(chain(9, 2, 3), block_tokens=4)) == 0


def test_only_new_blocks_are_told_and_hang_on_the_known_ones(cache: PrefixCache) -> None:
    first = store(cache, chain(1, 2))
    cache.take_events()
    second = store(cache, chain(1, 2, 3))

    (event,) = cache.take_events()
    assert isinstance(event, BlocksStored)
    assert (event.hashes, event.parent) == (second[2:], first[1])
    assert event.token_ids.tolist() == [3, 3, 3, 3]


def test_the_least_recently_used_goes_first_and_ends_before_beginnings(cache: PrefixCache) -> None:
    old = store(cache, chain(1, 2))
    new = store(cache, chain(5, 6))
    cache.take_events()
    store(cache, chain(7))

    removed = [e for e in cache.take_events() if isinstance(e, BlocksRemoved)]
    assert [e.hashes for e in removed] == [[old[1]]]
    assert cache.hit(old) == 1
    assert cache.hit(new) == 2


def test_held_blocks_stay_even_over_capacity(cache: PrefixCache) -> None:
    keys = store(cache, chain(1, 2))
    held = cache.hold(keys)
    store(cache, chain(5, 6, 7, 8))

    assert cache.hit(keys) == 2
    cache.release(held)
    assert len(cache) == 4


def test_clearing_spares_what_is_held_unless_told_otherwise(cache: PrefixCache) -> None:
    held = cache.hold(store(cache, chain(1)))
    store(cache, chain(5, 6))
    cache.take_events()

    assert cache.clear(held_too=False) == (2, 1)
    assert isinstance(cache.take_events()[0], BlocksRemoved)
    assert cache.clear(held_too=True) == (1, 0)
    assert cache.take_events() == [CacheCleared()]
    cache.release(held)
    assert repr(cache) == "<PrefixCache 0/4 blocks of 4>"


def test_a_snapshot_names_parents_before_children(cache: PrefixCache) -> None:
    store(cache, chain(1, 2))
    store(cache, chain(1, 3))
    cache.hit(block_keys(chain(1, 2), block_tokens=4))

    known: set[int | None] = {None}
    for event in cache.snapshot():
        assert isinstance(event, BlocksStored)
        assert event.parent in known
        known.update(event.hashes)
    assert len(known) == 4
