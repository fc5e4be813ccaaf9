"""The samples of a group are hashed once, to the same keys as ever, in bounded memory."""

import numpy as np
import pytest

from rollplane.identity import block_keys
from rollplane.protocol.arrays import Int32Array
from rollplane.router.known_keys import KnownKeys


def prompt(seed: int, tokens: int = 64) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 1000, tokens, dtype=np.int32)


@pytest.mark.parametrize("scope", [{}, {"salt": "s"}, {"adapter": "a@1"}, {"salt": "s", "adapter": "a@1"}])
def test_the_keys_are_those_of_the_prompt_in_its_scope(scope: dict[str, str]) -> None:
    known = KnownKeys()
    asked = {"salt": None, "adapter": None, **scope}
    for seed in (0, 1, 0):
        for tokens in (prompt(seed), prompt(seed)[:48], prompt(seed)[::2]):
            assert known.of(tokens, block_tokens=16, **asked) == block_keys(tokens, block_tokens=16, **asked)
    assert known.of(prompt(0), block_tokens=8, **asked) == block_keys(prompt(0), block_tokens=8, **asked)


def test_a_sibling_gets_the_same_list() -> None:
    known = KnownKeys()
    first = known.of(prompt(0), block_tokens=16, salt=None, adapter=None)
    assert known.of(prompt(0), block_tokens=16, salt=None, adapter=None) is first
    assert known.of(prompt(0), block_tokens=16, salt="other", adapter=None) is not first


def test_the_longest_unused_go_when_there_are_too_many() -> None:
    known = KnownKeys(capacity_keys=8)
    kept = known.of(prompt(0), block_tokens=16, salt=None, adapter=None)
    gone = known.of(prompt(1), block_tokens=16, salt=None, adapter=None)
    assert known.of(prompt(0), block_tokens=16, salt=None, adapter=None) is kept
    known.of(prompt(2), block_tokens=16, salt=None, adapter=None)
    assert known.of(prompt(0), block_tokens=16, salt=None, adapter=None) is kept
    assert known.of(prompt(1), block_tokens=16, salt=None, adapter=None) is not gone
    known.of(prompt(3, 1024), block_tokens=16, salt=None, adapter=None)
    assert repr(known) == "<KnownKeys 0/8 keys of 0 prompts>"
