import numpy as np

from rollplane.dynamo.kv_translation import KvTranslation, Removed, Scope, Stored
from rollplane.identity import block_keys
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, CacheCleared

TOKENS = np.arange(12, dtype=np.int32)
NOW = {("rp-now", None): Scope("v7", None), (None, "ad1@2"): Scope(None, "ad1"), (None, None): Scope(None, None)}


def translation() -> tuple[KvTranslation, dict[tuple[str | None, str | None], Scope]]:
    scopes = dict(NOW)
    return KvTranslation(lambda salt, adapter: scopes.get((salt, adapter)), block_tokens=4), scopes


def stored(
    hashes: list[int],
    *,
    parent: int | None = None,
    first: int = 0,
    salt: str | None = None,
    adapter: str | None = None,
    block_tokens: int = 4,
) -> BlocksStored:
    tokens = TOKENS[first * 4 : (first + len(hashes)) * 4]
    return BlocksStored(
        hashes=hashes, parent=parent, token_ids=tokens, block_tokens=block_tokens, salt=salt, adapter=adapter
    )


def keys(scope: Scope) -> list[int]:
    names = block_keys(TOKENS, block_tokens=4, salt=scope.salt, adapter=scope.adapter)
    return [name & (2**63 - 1) for name in names]


def test_a_chain_is_told_under_the_callers_salt_and_the_adapters_public_name() -> None:
    told, _ = translation()
    for engine_side, scope in NOW.items():
        (news,) = told.take([stored([11, 12, 13], salt=engine_side[0], adapter=engine_side[1])])
        assert news == Stored(token_ids=TOKENS.tolist(), block_tokens=4, names=keys(scope), parent=None, scope=scope)
        told.take([CacheCleared()])


def test_a_chain_goes_on_from_the_parent_that_was_told() -> None:
    told, _ = translation()
    told.take([stored([11])])
    (news,) = told.take([stored([12, 13], parent=11, first=1)])

    assert isinstance(news, Stored)
    assert (news.parent, news.names) == (keys(Scope(None, None))[0], keys(Scope(None, None))[1:])


def test_a_chain_that_nobody_could_hit_is_not_told_nor_is_what_follows_it() -> None:
    told, _ = translation()

    assert told.take([stored([11], salt="rp-old"), stored([12], parent=11, first=1, salt="rp-old")]) == []
    assert told.take([stored([13], parent=99, first=2)]) == []
    assert told.take([stored([14], block_tokens=2)]) == []
    assert told.untold == 4


def test_removed_blocks_are_taken_back_once_no_engine_block_holds_the_name() -> None:
    told, _ = translation()
    told.take([stored([11, 12]), stored([21])])

    assert told.take([BlocksRemoved(hashes=[11])]) == []
    assert told.take([BlocksRemoved(hashes=[21, 12, 12])]) == [Removed(names=keys(Scope(None, None))[:2])]
    assert repr(told) == "<KvTranslation 0 blocks told, 0 untold>"


def test_the_same_blocks_said_again_are_counted_once() -> None:
    told, _ = translation()
    told.take([stored([11]), stored([11])])

    assert told.take([BlocksRemoved(hashes=[11])]) == [Removed(names=keys(Scope(None, None))[:1])]


def test_a_cleared_cache_is_taken_back_whole() -> None:
    told, _ = translation()
    told.take([stored([11, 12, 13])])

    assert told.take([CacheCleared()]) == [Removed(names=keys(Scope(None, None)))]
    assert told.clear() == []


def test_a_new_version_takes_back_the_old_ones_blocks_only() -> None:
    told, scopes = translation()
    told.take([stored([11], salt="rp-now"), stored([21], adapter="ad1@2")])
    del scopes["rp-now", None]

    assert told.rescope() == [Removed(names=keys(Scope("v7", None))[:1])]
    assert told.rescope() == []


def test_names_fit_dynamos_signed_numbers() -> None:
    told, _ = translation()
    for seed in range(64):
        tokens = np.full(4, seed, dtype=np.int32)
        (news,) = told.take([BlocksStored(hashes=[seed], parent=None, token_ids=tokens, block_tokens=4)])
        assert isinstance(news, Stored)
        assert 0 <= news.names[0] < 2**63
