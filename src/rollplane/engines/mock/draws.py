"""Sampled tokens with everything known about each, as arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollplane.engines.mock.controls import Controls
from rollplane.protocol.arrays import Float32Array, Int32Array
from rollplane.protocol.artifacts import LOGPROB_FLOOR, Alternatives, SamplingMask, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class Draws:
    """T sampled tokens.

    `ids`, `ranks` int32 [T]; `values` float32 [T]; `alternative_ids` int32 and `alternative_values` float32 [T, k], None
    for k = 0; `mask_ids` int32 [sum of `mask_counts`], `mask_counts` int32 [T], None unless masks are wanted.
    """

    ids: Int32Array
    values: Float32Array
    ranks: Int32Array
    alternative_ids: Int32Array | None = None
    alternative_values: Float32Array | None = None
    mask_ids: Int32Array | None = None
    mask_counts: Int32Array | None = None

    def __len__(self) -> int:
        return int(self.ids.size)

    def __repr__(self) -> str:
        return f"<Draws of {len(self)} tokens>"

    def cut(self, begin: int, end: int) -> "Draws":
        """Tokens [begin, end), over the same memory."""
        if begin == 0 and end >= len(self):
            return self
        mask_ids = mask_counts = None
        if self.mask_ids is not None and self.mask_counts is not None:
            mask_counts = self.mask_counts[begin:end]
            skip = int(self.mask_counts[:begin].sum())
            mask_ids = self.mask_ids[skip : skip + int(mask_counts.sum())]
        return Draws(
            ids=self.ids[begin:end],
            values=self.values[begin:end],
            ranks=self.ranks[begin:end],
            alternative_ids=None if self.alternative_ids is None else self.alternative_ids[begin:end],
            alternative_values=None if self.alternative_values is None else self.alternative_values[begin:end],
            mask_ids=mask_ids,
            mask_counts=mask_counts,
        )

    @classmethod
    def joined(cls, parts: "list[Draws]", by: Controls) -> "Draws":
        """The parts one after another; with no part, an empty one of the right kind."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.empty(by)
        return cls(**{name: _concat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__})

    @classmethod
    def empty(cls, by: Controls) -> "Draws":
        """No tokens."""
        none = np.empty(0, dtype=np.int32)
        return cls(
            ids=none,
            values=np.empty(0, dtype=np.float32),
            ranks=none,
            alternative_ids=np.empty((0, by.alternatives), np.int32) if by.alternatives else None,
            alternative_values=np.empty((0, by.alternatives), np.float32) if by.alternatives else None,
            mask_ids=none if by.mask else None,
            mask_counts=none if by.mask else None,
        )

    @classmethod
    def broken(cls, by: Controls) -> "Draws":
        """One token of no distribution: its log-probability is not a number."""
        return cls(
            ids=np.zeros(1, dtype=np.int32),
            values=np.full(1, np.nan, dtype=np.float32),
            ranks=np.ones(1, dtype=np.int32),
            alternative_ids=np.zeros((1, by.alternatives), np.int32) if by.alternatives else None,
            alternative_values=np.full((1, by.alternatives), LOGPROB_FLOOR, np.float32) if by.alternatives else None,
            mask_ids=np.zeros(1, dtype=np.int32) if by.mask else None,
            mask_counts=np.ones(1, dtype=np.int32) if by.mask else None,
        )

    def logprobs(self) -> TokenLogprobs:
        """The log-probabilities as they cross the wire."""
        top = None
        if self.alternative_ids is not None and self.alternative_values is not None:
            rows, width = self.alternative_ids.shape
            top = Alternatives(
                ids=self.alternative_ids.reshape(-1),
                values=np.ascontiguousarray(self.alternative_values).reshape(-1),
                ranks=np.tile(np.arange(1, width + 1, dtype=np.int32), rows),
                offsets=np.arange(0, (rows + 1) * width, width, dtype=np.int32),
            )
        return TokenLogprobs(values=self.values, ranks=self.ranks, alternatives=top)

    def mask(self) -> SamplingMask | None:
        """The sampling mask as it crosses the wire."""
        if self.mask_ids is None or self.mask_counts is None:
            return None
        offsets = np.zeros(len(self) + 1, dtype=np.int32)
        np.cumsum(self.mask_counts, out=offsets[1:])
        return SamplingMask(ids=self.mask_ids, offsets=offsets)

    def floored(self) -> int:
        """How many alternatives were not finite."""
        if self.alternative_values is None:
            return 0
        return int(np.count_nonzero(self.alternative_values == np.float32(LOGPROB_FLOOR)))


def _concat(parts: list[Any]) -> Any:
    return None if parts[0] is None else np.concatenate(parts)
