"""Block keys of the prompts seen lately: the samples of a group are hashed once. Pure."""

from typing import Final

import numpy as np
import xxhash

from rollplane.identity import block_keys
from rollplane.protocol.arrays import Int32Array

CAPACITY_KEYS: Final = 2**18
"""Keys of all prompts together; about 40 bytes each."""

_Prompt = tuple[bytes, int, str | None, str | None]


class KnownKeys:
    """A memo of `identity.block_keys`, least recently used first.

    Args:
        capacity_keys: most keys that are kept.
    """

    def __init__(self, *, capacity_keys: int = CAPACITY_KEYS) -> None:
        self.capacity_keys = capacity_keys
        self._prompts: dict[_Prompt, list[int]] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"<KnownKeys {self._count}/{self.capacity_keys} keys of {len(self._prompts)} prompts>"

    def of(self, tokens: Int32Array, *, block_tokens: int, salt: str | None, adapter: str | None) -> list[int]:
        """See `identity.block_keys`. The list is shared: nobody changes it."""
        tokens = np.ascontiguousarray(tokens)
        name = (xxhash.xxh3_128_digest(tokens), block_tokens, salt, adapter)  # type: ignore[arg-type]
        keys = self._prompts.pop(name, None)
        if keys is None:
            keys = block_keys(tokens, block_tokens=block_tokens, salt=salt, adapter=adapter)
            self._count += len(keys)
        self._prompts[name] = keys
        while self._count > self.capacity_keys:
            self._count -= len(self._prompts.pop(next(iter(self._prompts))))
        return keys
