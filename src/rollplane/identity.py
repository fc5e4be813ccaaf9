"""Domain-separated identities: media content, routing markers, cache scope, adapters, block keys.

One definition per identity, used alike by frontend and worker. The media identity and its routing marker are the ones
NVIDIA Dynamo 1.6.1's frontend computes, so that both systems route the same content alike.
"""

import functools
import hashlib
import struct
from collections.abc import Iterable
from typing import Final

import numpy as np
import xxhash

from rollplane.errors import InvalidRequest
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.features import MediaItem

MEDIA_DOMAIN: Final = b"vllm.grpc.preprocessed-mm.v1"
MARKER_DOMAIN: Final = "grpc-mm:"
ROUTING_PAD_BASE: Final = 1_000_000
ROUTING_PAD_MASK: Final = 2**30 - 1
SALT_DOMAIN: Final = b"rollplane.salt.v1"
ADAPTER_DOMAIN: Final = b"rollplane.adapter.v1"
BLOCK_DOMAIN: Final = b"rollplane.block.v1"
MAX_SCOPES: Final = 65_536
"""Version names whose uses are counted; the longest unused are let go first."""


def media_identity(modality: str, raw: bytes) -> str:
    """The content identity of one processed medium, 64 hex digits.

    sha256 over the domain, then modality and payload each led by its length as an unsigned 64-bit big-endian integer,
    so that no two (modality, payload) pairs share an input.
    """
    name = modality.encode()
    digest = hashlib.sha256(MEDIA_DOMAIN)
    digest.update(struct.pack(">Q", len(name)) + name + struct.pack(">Q", len(raw)))
    digest.update(raw)
    return digest.hexdigest()


def routing_marker(mm_hash: str) -> str:
    """The routing marker of a content identity: 16 hex digits of xxh3-64 and 48 zeros."""
    return f"{marker_value(mm_hash):016x}" + "0" * 48


def marker_value(mm_hash: str) -> int:
    """xxh3-64 of the domain-separated content identity."""
    return xxhash.xxh3_64_intdigest((MARKER_DOMAIN + mm_hash).encode())


def routing_pad(mm_hash: str) -> int:
    """The token id that a medium's embed positions count as in block keys."""
    return ROUTING_PAD_BASE + (marker_value(mm_hash) & ROUTING_PAD_MASK)


def identify(items: list[MediaItem] | None) -> None:
    """Compute the content identity of every item that carries its payload, in place.

    Raises:
        InvalidRequest: an item already claims another identity than its content has.
    """
    for i, item in enumerate(items or ()):
        if item.kwargs is None:
            continue
        found = media_identity(item.modality, item.kwargs)
        if item.mm_hash is not None and item.mm_hash != found:
            raise InvalidRequest(
                f"features item {i} ({item.modality}) claims the identity {item.mm_hash[:16]}..., its content has "
                f"{found[:16]}...",
                param="features",
            )
        item.mm_hash = found


def routing_tokens(token_ids: Int32Array, items: Iterable[MediaItem]) -> Int32Array:
    """The tokens that block keys are computed from: media embed positions replaced by their routing pads.

    Returns the same array where there are no media.
    """
    out: Int32Array | None = None
    for item in items:
        if item.mm_hash is None:
            continue
        if out is None:
            out = token_ids.copy()
        span = out[item.offset : item.offset + item.length]
        pad = routing_pad(item.mm_hash)
        if item.is_embed is None:
            span[:] = pad
        else:
            span[item.is_embed] = pad
    return token_ids if out is None else out


class CacheScope:
    """What cached KV belongs to: one name for each time that weights, or a label, became current.

    A version name may come back with other weights (a roll-back, a second run), and a kept request still holds blocks of
    its first use: so the first use is scoped by the name itself, later ones by the name and a number. Workers that saw a name
    as often agree, whatever else they saw, and a router computes their block keys once.

    Args:
        version: the version in place.
        life: made up anew by whoever takes over an engine whose earlier versions it does not know; "" elsewhere.
    """

    def __init__(self, version: str, *, life: str = "") -> None:
        self._uses: dict[str, int] = {version: 1}
        self._forgotten = 0
        self._life = life
        self._current = version

    def __repr__(self) -> str:
        return f"<CacheScope {self.current!r}>"

    @property
    def current(self) -> str:
        """The scope of what is computed now, for `engine_salt`. NUL is in no version name."""
        uses = self._uses[self._current]
        if self._life:
            return f"{self._current}\0{uses}\0{self._life}"
        return self._current if uses == 1 else f"{self._current}\0{uses}"

    def renew(self, version: str) -> None:
        """Weights were put in place under this name, or the name was given to those in place."""
        # A name that was let go was used at most `_forgotten` times, so it never gets a number again that it had.
        self._uses[version] = self._uses.pop(version, self._forgotten) + 1
        self._current = version
        while len(self._uses) > MAX_SCOPES:
            self._forgotten = max(self._forgotten, self._uses.pop(next(iter(self._uses))))


@functools.lru_cache(maxsize=1024)
def engine_salt(client_salt: str | None, *, scope: str | None) -> str | None:
    """The salt an engine gets: the client's, within a `CacheScope` where the server isolates versions.

    Frontend and worker both use this, so predicted and actual block keys agree. None: no salt at all.
    """
    if scope is None:
        return client_salt
    digest = hashlib.sha256(SALT_DOMAIN)
    for part in (scope, client_salt or ""):
        data = part.encode()
        digest.update(struct.pack(">Q", len(data)) + data)
    return "rp-" + digest.hexdigest()[:32]


def adapter_digest(files: Iterable[tuple[str, bytes]]) -> str:
    """The content identity of an adapter: sha256 over (name, bytes) in name order, 64 hex digits."""
    digest = hashlib.sha256(ADAPTER_DOMAIN)
    for name, data in sorted(files):
        encoded = name.encode()
        digest.update(struct.pack(">Q", len(encoded)) + encoded + struct.pack(">Q", len(data)))
        digest.update(data)
    return digest.hexdigest()


def block_keys(
    tokens: Int32Array, *, block_tokens: int, salt: str | None = None, adapter: str | None = None
) -> list[int]:
    """The chained 64-bit keys of a prompt's full blocks.

    Args:
        tokens: int32 [prompt], media positions already replaced (`routing_tokens`).
        block_tokens: tokens per block; a last partial block has no key.
        salt: the engine-side salt; it enters with the first block and so every later one.
        adapter: engine-side adapter name; likewise.

    Each key is xxh3-64 of the block's tokens (little-endian int32) seeded with the key before it; the chain starts from
    `scope_key`.
    """
    return chained_keys(tokens, block_tokens=block_tokens, parent=scope_key(salt=salt, adapter=adapter))


def scope_key(*, salt: str | None, adapter: str | None) -> int:
    """What a chain of block keys starts from: a hash of the domain, salt and adapter."""
    scope = xxhash.xxh3_64(BLOCK_DOMAIN)
    for part in (salt or "", adapter or ""):
        data = part.encode()
        scope.update(struct.pack(">Q", len(data)) + data)
    return scope.intdigest()


def chained_keys(tokens: Int32Array, *, block_tokens: int, parent: int) -> list[int]:
    """The keys of full blocks that follow a block with the key `parent` (or a `scope_key`); see `block_keys`."""
    whole = tokens.size - tokens.size % block_tokens
    blocks = np.ascontiguousarray(tokens[:whole], dtype="<i4").view(f"V{block_tokens * 4}")
    key, digest = parent, xxhash.xxh3_64_intdigest
    return [key := digest(block, key) for block in blocks.tolist()]
