"""The ids that the rows of a batch may draw, packed when they are few.

When every row has a top-k, tens of ids are left of a vocabulary of thousands. Top-p, normalising, drawing, ranks and
masks then read the packed rows. Packed or not, a row's ids are in rising order, so that the same uniform draws the same
token either way.
"""

import numpy as np
import torch
from torch import Tensor

from rollplane.engines.embedded.sampler import NEG_INF, RowControls, cut, support_of, temper
from rollplane.protocol.arrays import Int32Array

_WORTH_PACKING = 4
"""Rows are packed when the longest is at most one in so many of the vocabulary."""


class Support:
    """Rows of processed logits, and which column is which id.

    Args:
        logits: [R, V] float32, edited by the requests' rules.
        controls: of the R rows.

    `logits` [R, W] after temperature, min-p, top-k and top-p, -inf outside each row's support. W is V, or less when
    the rows are packed: those with a top-k each, none greedy, and few enough ids.
    """

    def __init__(self, logits: Tensor, controls: RowControls) -> None:
        self._controls = controls
        self._vocab = logits.shape[1]
        self._ids: Tensor | None = None
        x = temper(logits, controls)
        if controls.every_top_k:
            x = self._pack(x)
        self.logits = cut(x, controls)

    def _pack(self, x: Tensor) -> Tensor:
        """The columns that a top-k keeps, [R, W]; shorter rows are padded with id 0 at -inf."""
        values, rows, vocab = x.numpy(), len(x), self._vocab
        widest = self._controls.widest_top_k
        largest = np.partition(values, vocab - widest, axis=1)[:, vocab - widest :]
        if self._controls.one_top_k:
            kth = largest.min(axis=1, keepdims=True)
        else:
            largest.sort(axis=1)
            kth = np.take_along_axis(largest, widest - self._controls.top_k.numpy()[:, None], axis=1)
        flat = np.flatnonzero(values >= kth)
        kept = values.reshape(-1)[flat]
        row, column = np.divmod(flat, vocab)
        counts = np.bincount(row, minlength=rows)
        width = int(counts.max())
        # NaN sorts as the largest and compares as nothing: the rows stay whole, so that it reaches the log-probabilities.
        if width * _WORTH_PACKING > vocab or np.isnan(largest.max()):
            return x
        if width * rows == len(flat):
            ids, packed = column, kept
        else:
            at = np.arange(len(flat)) + (np.arange(rows) * width - np.cumsum(counts) + counts)[row]
            ids, packed = np.zeros(rows * width, dtype=np.int64), np.full(rows * width, NEG_INF, dtype=np.float32)
            ids[at], packed[at] = column, kept
        self._ids = torch.from_numpy(ids).view(rows, width)
        return torch.from_numpy(packed).view(rows, width)

    def ids(self, columns: Tensor) -> Tensor:
        """The ids int64 [R, K] of columns [R, K] of `logits`."""
        return columns if self._ids is None else self._ids.gather(1, columns)

    def topk(self, logprobs: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities [R, width] of the likeliest ids; past a row's support, others at -inf.

        Args:
            logprobs: [R, W], in the columns of `logits`.
            width: at most the vocabulary.
        """
        if self._ids is None or width == 1 or width <= int((self.logits > NEG_INF).sum(-1).min()):
            values, columns = logprobs.topk(width, dim=-1)
            return self.ids(columns), values
        # Padding repeats id 0: that many alternatives are found only among all ids.
        values, ids = self.spread(logprobs).topk(width, dim=-1)
        return ids, values

    def spread(self, logprobs: Tensor) -> Tensor:
        """Columns of `logits` -> [R, V], -inf outside the supports."""
        if self._ids is None:
            return logprobs
        full = torch.full((len(logprobs), self._vocab), NEG_INF)
        # amax, because padding must not overwrite what id 0 has.
        return full.scatter_reduce_(1, self._ids, logprobs, "amax")

    def masks(self, sampled: Tensor) -> tuple[Int32Array, list[int]]:
        """The sampling masks as CSR: ids in rising order per row, and counts [R]; a greedy row has its `sampled` id."""
        if self._ids is None:
            ids, counts = support_of(self.logits, sampled, self._controls)
            return ids.numpy(), counts.tolist()
        kept = self.logits.numpy() > NEG_INF
        return self._ids.numpy()[kept].astype(np.int32), kept.sum(axis=1).tolist()
