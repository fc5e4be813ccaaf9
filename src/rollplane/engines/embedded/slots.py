"""Slots: everything kept per running sequence, in arrays indexed [slot, token position].

Decoding sequences are always slots 0..B-1, so a decode step reads a view of the first B slots: nothing is gathered and
nothing is padded. Whoever leaves is replaced by the last one (`move`). Arrays grow by doubling as longer sequences
come; unused memory is zeroed, because a masked key still multiplies a value by zero and zero times NaN is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollplane.engines.embedded.model import ModelShape

_FIRST_TOKENS = 128
_FIRST_SLOTS = 8


class SlotTable:
    """The arrays of all slots.

    Args:
        shape: the model's sizes.
        max_slots: sequences that may run at once.
        dtype: of keys and values.

    Arrays, S slots by C token positions: `kv` [layers, 2, S, kv heads, C, head dim]; `tokens` int64 [S, C], prompt
    then completion; `lengths` int64 [S], tokens held; `routes` int16 [S, C, moe layers, top_k], row i filled when token
    i is forwarded; `logprobs` float32 [S, C] and `ranks` int32 [S, C] of the token at that position; `alt_ids`,
    `alt_ranks` int32 and `alt_values` float32 [S, C, A], its alternatives.
    """

    def __init__(self, shape: ModelShape, *, max_slots: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.max_slots = max_slots
        self.rows = torch.arange(max_slots)
        s = self.slots = min(max_slots, _FIRST_SLOTS)
        c = self.capacity_tokens = min(shape.context_tokens, _FIRST_TOKENS)
        self.kv = torch.zeros(shape.layers, 2, s, shape.kv_heads, c, shape.head_dim, dtype=dtype)
        self.tokens = torch.zeros(s, c, dtype=torch.int64)
        self.lengths = torch.zeros(s, dtype=torch.int64)
        self.routes = torch.zeros(s, c, shape.moe_layers, shape.experts_per_token, dtype=torch.int16)
        self.logprobs = torch.zeros(s, c)
        self.ranks = torch.zeros(s, c, dtype=torch.int32)
        self.alt_ids = torch.zeros(s, c, 0, dtype=torch.int32)
        self.alt_ranks = torch.zeros(s, c, 0, dtype=torch.int32)
        self.alt_values = torch.zeros(s, c, 0)

    def __repr__(self) -> str:
        return f"<SlotTable {self.slots}/{self.max_slots} slots x {self.capacity_tokens} tokens>"

    def reserve(self, *, slots: int, tokens: int) -> None:
        """Room for `slots` slots of `tokens` positions; what is held stays where it is."""
        if slots <= self.slots and tokens <= self.capacity_tokens:
            return
        s, c = self.slots, self.capacity_tokens
        if slots > s:
            s = min(self.max_slots, max(2 * s, slots))
        if tokens > c:
            c = min(self.shape.context_tokens, max(2 * c, tokens))
        self.kv = _grown(self.kv, {2: s, 4: c})
        self.lengths = _grown(self.lengths, {0: s})
        for name in ("tokens", "routes", "logprobs", "ranks", "alt_ids", "alt_ranks", "alt_values"):
            setattr(self, name, _grown(getattr(self, name), {0: s, 1: c}))
        self.slots, self.capacity_tokens = s, c

    def reserve_alternatives(self, width: int) -> None:
        """Room for `width` alternatives per position."""
        if width > self.alt_ids.shape[2]:
            for name in ("alt_ids", "alt_ranks", "alt_values"):
                setattr(self, name, _grown(getattr(self, name), {2: width}))

    def begin(self, slot: int, prompt: Tensor) -> None:
        """Put a prompt's token ids [P] into a slot; nothing of it is computed yet."""
        self.tokens[slot, : len(prompt)] = prompt
        self.lengths[slot] = len(prompt)

    def move(self, source: int, target: int) -> None:
        """Copy all that slot `source` holds over slot `target`: a leave's hole is filled, or a prompt is shared."""
        n = int(self.lengths[source])
        self.lengths[target] = n
        self.kv[:, :, target, :, :n] = self.kv[:, :, source, :, :n]
        for array in (self.tokens, self.routes, self.logprobs, self.ranks):
            array[target, :n] = array[source, :n]
        if self.alt_ids.shape[2]:
            for array in (self.alt_ids, self.alt_ranks, self.alt_values):
                array[target, :n] = array[source, :n]


@dataclass(frozen=True)
class ChunkRows:
    """The rows of a decode step's forward that are tokens of one prompt.

    Args:
        rows: which rows.
        slot: where the prompt is.
        mask: float [tokens, keys], added to their scores of the slot's first keys.
    """

    rows: slice
    slot: int
    mask: Tensor


class DecodeCache:
    """The cache of one decode step: R rows of one token each, the next of every slot 0..B-1, then chunks of prompts.

    Args:
        table: the slots.
        positions: int64 [B], of the next tokens.
        chunks: (slot, start, end) of the prompts' tokens, none of them in the slots 0..B-1.

    `slots` and `positions` int64 [R] are the rows'; `chunks` says what each prompt's rows may attend to.
    """

    is_compileable = False

    def __init__(self, table: SlotTable, positions: Tensor, chunks: Sequence[tuple[int, int, int]] = ()) -> None:
        self._kv = table.kv
        self._batch = len(positions)
        self.keys = int(positions.max()) + 1
        self.slots, self.positions = table.rows[: self._batch], positions
        self.chunks: list[ChunkRows] = []
        if chunks:
            sizes = torch.tensor([end - start for _, start, end in chunks])
            of_chunks = torch.tensor([slot for slot, _, _ in chunks]).repeat_interleave(sizes)
            self.slots = torch.cat((self.slots, of_chunks))
            self.positions = torch.cat((positions, *(torch.arange(start, end) for _, start, end in chunks)))
        row = self._batch
        for slot, start, end in chunks:
            rows = slice(row, row := row + end - start)
            later = torch.arange(end)[None] > self.positions[rows, None]
            self.chunks.append(ChunkRows(rows, slot, torch.zeros(later.shape).masked_fill_(later, float("-inf"))))
        layers, sides, slots, heads, capacity, dim = table.kv.shape
        self._flat = table.kv.view(layers, sides, slots * heads * capacity, dim)
        first = (self.slots[:, None] * heads + torch.arange(heads)) * capacity
        self._at = (first + self.positions[:, None]).view(-1)

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep [R, heads, 1, dim]; return [B, heads, keys, dim], a view, which is for the first B rows."""
        keys, values = self._flat[layer].unbind()
        dim = k.shape[-1]
        keys.index_copy_(0, self._at, k.reshape(-1, dim))
        values.index_copy_(0, self._at, v.reshape(-1, dim))
        visible_keys, visible_values = self._kv[layer, :, : self._batch, :, : self.keys].unbind()
        return visible_keys, visible_values

    def of_chunk(self, chunk: ChunkRows, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, keys, dim] for a prompt's rows, once `update` has kept their own; views."""
        keys, values = self._kv[layer, :, chunk.slot, :, : chunk.mask.shape[1]].unbind()
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        """0: the caller gives positions and mask."""
        return 0

    def get_mask_sizes(self, query: int, *args: Any) -> tuple[int, int]:
        """Unused with a ready mask."""
        return query, 0


class PrefillCache:
    """The cache of one prefill step over `slots` [R], right-aligned chunks of up to T tokens.

    Args:
        table: the slots.
        slots: int64 [R].
        valid: bool [R, T], False where a shorter chunk is padded on the left.
        positions: int64 [R, T], each token's place in its sequence.
        history: some row has keys from an earlier chunk; without, attention stays inside the chunk.
    """

    is_compileable = False

    def __init__(self, table: SlotTable, *, slots: Tensor, valid: Tensor, positions: Tensor, history: bool) -> None:
        self._kv = table.kv
        self._slots = slots
        self._valid = None if bool(valid.all()) else valid.view(-1).nonzero()[:, 0]
        self._slot = slots[:, None].expand_as(valid)[valid]
        self._position = positions[valid]
        self._history = history
        self.keys = int(positions.max()) + 1

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep the valid tokens of [R, heads, T, dim]; return what the rows may attend to."""
        keys, values = self._kv[layer, 0], self._kv[layer, 1]
        for kept, new in ((keys, k), (values, v)):
            tokens = new.transpose(1, 2).flatten(0, 1)
            kept[self._slot, :, self._position] = tokens if self._valid is None else tokens.index_select(0, self._valid)
        if not self._history:
            return k, v
        return keys[self._slots, :, : self.keys], values[self._slots, :, : self.keys]

    def get_seq_length(self, *args: Any) -> int:
        """0: the caller gives positions and mask."""
        return 0

    def get_mask_sizes(self, query: int, *args: Any) -> tuple[int, int]:
        """Unused with a ready mask."""
        return query, 0


def _grown(array: Tensor, sizes: dict[int, int]) -> Tensor:
    """A zeroed copy of `array` with larger dimensions; the old content at the front of each."""
    shape = list(array.shape)
    for dimension, size in sizes.items():
        shape[dimension] = size
    grown = torch.zeros(shape, dtype=array.dtype)
    grown[tuple(slice(n) for n in array.shape)] = array
    return grown
