"""Sampling as pure functions on rows of logits [B, V] float32.

Order of operations, as vLLM's: allowed ids, ids banned until `min_tokens`, logit bias, penalties; then temperature,
min-p, top-k, top-p. Supports are built from value thresholds, never from sorted indices: equal logits (common in
bfloat16) are kept or dropped together, so a row's support is a function of that row alone.

Log-probabilities are those of the distribution that was sampled: the log-softmax of the processed row (mode
`sampling`). A greedy row has a support of one id, whose log-probability would always be 0; it reports instead the
log-softmax at temperature 1 after bias and penalties and without truncation (mode `greedy`).

One uniform per token goes through the inverse of the cumulative distribution: the draw depends on the row and on the
request's own generator, not on who shares the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollplane.protocol.arrays import Float32Array

NEG_INF = float("-inf")

_TOP_P_FIRST_WIDTH = 1024
"""A nucleus is looked for among this many largest logits before the whole vocabulary is sorted."""


@dataclass(frozen=True, kw_only=True)
class Controls:
    """One request's truncation controls. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class RowControls:
    """The controls of the B rows of a batch as tensors; made again when somebody joins, leaves or moves."""

    def __init__(self, rows: Sequence[Controls], *, vocab: int) -> None:
        greedy = [c.temperature == 0 for c in rows]
        live = [Controls() if g else c for g, c in zip(greedy, rows, strict=True)]
        self.greedy = torch.tensor(greedy)
        self.any_greedy = any(greedy)
        self.temperature = torch.tensor([c.temperature for c in live], dtype=torch.float32)[:, None]
        self.any_temperature = any(c.temperature != 1.0 for c in live)
        self.log_min_p = torch.tensor([c.min_p for c in live], dtype=torch.float32).log()[:, None]
        self.any_min_p = any(c.min_p > 0 for c in live)
        top_k = [c.top_k if 0 < c.top_k < vocab else vocab for c in live]
        cut = [i for i, c in enumerate(live) if top_k[i] < vocab or c.top_p < 1]
        self.truncated = torch.tensor(cut, dtype=torch.int64)
        self.all_truncated = len(cut) == len(live)
        self.top_k = torch.tensor([top_k[i] for i in cut], dtype=torch.int64)
        self.top_p = torch.tensor([live[i].top_p for i in cut], dtype=torch.float32)
        self.widest_top_k = max((k for k in (top_k[i] for i in cut) if k < vocab), default=0)
        self.any_open_top_p = any(top_k[i] == vocab for i in cut)
        self.any_top_p = any(live[i].top_p < 1 for i in cut)
        self.every_top_k = len(cut) == len(rows) > 0 and not self.any_greedy and not self.any_open_top_p
        self.one_top_k = len({top_k[i] for i in cut}) == 1


def truncate(logits: Tensor, controls: RowControls) -> Tensor:
    """Temperature, min-p, top-k and top-p: `logits` [B, V] -> [B, V] with -inf outside each row's support."""
    return cut(temper(logits, controls), controls)


def temper(logits: Tensor, controls: RowControls) -> Tensor:
    """Logits divided by each row's temperature."""
    return logits / controls.temperature if controls.any_temperature else logits


def cut(logits: Tensor, controls: RowControls) -> Tensor:
    """Min-p, top-k and top-p; `logits` [B, W] may lack columns that every row's top-k drops."""
    x = logits
    if controls.any_min_p:
        x = x.masked_fill(x < x.amax(-1, keepdim=True) + controls.log_min_p, NEG_INF)
    if len(controls.truncated):
        if controls.all_truncated:
            return _cut_top(x, controls)
        x = x.clone() if x is logits else x
        x[controls.truncated] = _cut_top(x[controls.truncated], controls)
    return x


def _cut_top(x: Tensor, controls: RowControls) -> Tensor:
    """Top-k, then top-p, on rows [R, V] that have either."""
    vocab = x.shape[1]
    width = min(vocab, controls.widest_top_k)
    if controls.any_open_top_p:
        width = min(vocab, max(width, _TOP_P_FIRST_WIDTH))
    threshold, decided = top_threshold(x, largest_values(x, width), controls)
    if not decided:
        threshold, _ = top_threshold(x, largest_values(x, vocab), controls)
    return x.masked_fill(x < torch.from_numpy(threshold), NEG_INF)


def largest_values(x: Tensor, width: int) -> Float32Array:
    """Each row's `width` largest values of [R, V] in falling order: several times faster than torch's topk and sort."""
    values, vocab = x.numpy(), x.shape[1]
    if width < vocab:
        values = np.partition(values, vocab - width, axis=1)[:, vocab - width :]
    return np.sort(values, axis=1)[:, ::-1]


def top_threshold(x: Tensor, largest: Float32Array, controls: RowControls) -> tuple[Float32Array, bool]:
    """The smallest logit each row keeps, [R, 1], and False if some nucleus is wider than the values given.

    Args:
        x: rows [R, V].
        largest: each row's W largest values in falling order, [R, W]; W = V, or W >= every top-k that is on.
        controls: their top-k and top-p.

    Ties at the k-th value are all kept. A token is in the nucleus if the mass before it is below top-p. In numpy,
    whose operations on such small arrays cost half of torch's.
    """
    width = largest.shape[1]
    top_k, top_p = controls.top_k.numpy()[:, None], controls.top_p.numpy()[:, None]
    off = top_k == x.shape[1]
    kth = np.take_along_axis(largest, np.minimum(top_k, width) - 1, axis=1)
    kth[off] = NEG_INF
    if not controls.any_top_p:
        return kth, True
    first = largest[:, :1]
    inside = largest >= kth
    with np.errstate(invalid="ignore"):  # a row of -inf becomes NaN, which is reported with its token
        mass = np.where(inside, np.exp((largest - first).astype(np.float64)), 0.0)
        if controls.any_open_top_p:
            rest = (x - torch.from_numpy(first.copy())).masked_fill_(x < torch.from_numpy(kth), NEG_INF)
            total = rest.double().exp_().sum(-1, keepdim=True).numpy()
        else:
            # Every row has a top-k: what lies beyond the values given are only ties of the k-th.
            total = mass.sum(axis=1, keepdims=True)
            if width < x.shape[1]:
                beyond = (x.numpy() >= kth).sum(axis=1, keepdims=True) - inside.sum(axis=1, keepdims=True)
                total += beyond * np.exp((kth - first).astype(np.float64))
        before = (mass.cumsum(axis=1) - mass) / total
    nucleus = top_p < 1
    dropped = (before >= top_p) & nucleus
    dropped[:, 0] = False
    decided = width == x.shape[1] or not (nucleus & off & ~dropped[:, -1:]).any()
    smallest = np.where(dropped, np.float32(np.inf), largest).min(axis=1, keepdims=True)
    return np.maximum(kth, np.where(nucleus, smallest, np.float32(NEG_INF))), decided


def penalize(
    row: Tensor, *, seen: Tensor, counts: Tensor, repetition: float, presence: float, frequency: float
) -> None:
    """Penalties on one row [V], in place.

    Args:
        row: logits.
        seen: bool [V], ids in the prompt or the output (repetition).
        counts: float32 [V], how often each id was generated (presence and frequency).
        repetition: divides positive and multiplies negative logits of seen ids.
        presence: subtracted once from each generated id.
        frequency: subtracted per occurrence.
    """
    if repetition != 1.0:
        row.copy_(torch.where(seen, torch.where(row > 0, row / repetition, row * repetition), row))
    if frequency or presence:
        row.sub_(counts * frequency + (counts > 0) * presence)


def draw(logprobs: Tensor, uniforms: Tensor, controls: RowControls) -> Tensor:
    """One id per row, int64 [B].

    Args:
        logprobs: [B, V], -inf outside the support.
        uniforms: float64 [B] in [0, 1).
        controls: which rows are greedy (their largest logit; the first of equals).
    """
    if controls.any_greedy and bool(controls.greedy.all()):
        return logprobs.argmax(-1)
    cumulative = logprobs.double().exp_().cumsum(-1)
    total = cumulative[:, -1]
    # Below the total even if rounding says otherwise, so that the id found always has a probability above 0.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)
    if controls.any_greedy:
        ids = torch.where(controls.greedy, logprobs.argmax(-1), ids)
    return ids


def rank_of(logprobs: Tensor, values: Tensor) -> Tensor:
    """Ranks from 1: one more than the ids of [B, V] strictly likelier than `values` [B, W]; int32 [B, W]."""
    return torch.stack([(logprobs > v[:, None]).sum(-1) for v in values.unbind(1)], dim=1).add_(1).to(torch.int32)


def support_of(processed: Tensor, sampled: Tensor, controls: RowControls) -> tuple[Tensor, Tensor]:
    """The sampling mask as CSR: ids int32 [M] in rising order per row, counts int64 [B].

    A greedy row's support is its own token; any other row's is every finite entry of `processed` [B, V].
    """
    kept = processed > NEG_INF
    if controls.any_greedy:
        kept = torch.where(controls.greedy[:, None], False, kept)
        kept[torch.arange(len(sampled)), sampled] = True
    return kept.nonzero()[:, 1].to(torch.int32), kept.sum(-1)
