"""The ids that the rows of a batch may draw, packed when they are few.

After top-k or top-p a row has tens of ids left of a vocabulary of thousands. Everything behind the truncation
(normalising, drawing, ranks, masks) then reads the packed rows. Packed or not, a row's ids are in rising order, so that
the same uniform draws the same token either way.
"""

import numpy as np
import torch
from torch import Tensor

from rollplane.engines.embedded.sampler import NEG_INF, RowControls, support_of
from rollplane.protocol.arrays import Int32Array

_WORTH_PACKING = 4
"""Rows are packed when the widest support is at most one in so many of the vocabulary."""


class Support:
    """Rows of processed logits, and which column is which id.

    Args:
        processed: [R, V] float32, -inf outside each row's support.
        controls: of the R rows.

    `logits` [R, W]: the packed rows, padded with -inf; or `processed` itself, where a row is greedy or not truncated,
    a support is empty, or packing is not worth it.
    """

    def __init__(self, processed: Tensor, controls: RowControls) -> None:
        self.logits = processed
        self._processed = processed
        self._controls = controls
        self._ids: Tensor | None = None
        if controls.all_truncated and not controls.any_greedy:
            self._pack(processed)

    def _pack(self, processed: Tensor) -> None:
        values = processed.numpy()
        rows, vocab = values.shape
        # Not `> -inf`: a NaN is kept, and makes the whole row NaN, which is reported.
        flat = np.flatnonzero(values != NEG_INF)
        row, column = np.divmod(flat, vocab)
        self._counts = np.bincount(row, minlength=rows)
        self._smallest = int(self._counts.min())
        width = int(self._counts.max())
        if not self._smallest or width * _WORTH_PACKING > vocab:
            return
        first = np.cumsum(self._counts) - self._counts
        at = np.arange(len(flat)) + (np.arange(rows) * width - first)[row]
        logits = np.full(rows * width, NEG_INF, dtype=np.float32)
        logits[at] = values.reshape(-1)[flat]
        ids = np.zeros(rows * width, dtype=np.int64)
        ids[at] = column
        self._flat_ids: Int32Array = column.astype(np.int32)
        self.logits = torch.from_numpy(logits).view(rows, width)
        self._ids = torch.from_numpy(ids).view(rows, width)

    def ids(self, columns: Tensor) -> Tensor:
        """The ids int64 [R, K] of columns [R, K] of `logits`."""
        return columns if self._ids is None else self._ids.gather(1, columns)

    def topk(self, logprobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities [R, width] of the likeliest ids; past a row's support, others at -inf.

        Args:
            logprobs: [R, W], in the columns of `logits`.
            width: at most the vocabulary.
        """
        if self._ids is not None and width > self._smallest:
            values, ids = self.spread(logprobs).topk(width, dim=-1)
            return ids, values
        values, columns = logprobs.topk(width, dim=-1)
        return self.ids(columns), values

    def spread(self, logprobs: Tensor) -> Tensor:
        """Columns of `logits` -> [R, V], -inf outside the supports."""
        if self._ids is None:
            return logprobs
        # Padding repeats id 0: amax, because it must not overwrite what a real column 0 has.
        return torch.full_like(self._processed, NEG_INF).scatter_reduce_(1, self._ids, logprobs, "amax")

    def masks(self, sampled: Tensor) -> tuple[Int32Array, list[int]]:
        """The sampling masks as CSR: ids in rising order per row, and counts [R]; a greedy row has its `sampled` id."""
        if self._ids is not None:
            return self._flat_ids, self._counts.tolist()
        ids, counts = support_of(self._processed, sampled, self._controls)
        return ids.numpy(), counts.tolist()
