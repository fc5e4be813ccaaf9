"""A language model in closed form: autoregressive, truncatable and scorable, yet computed for all positions at once.

At position p the candidates are ordered by rank, and rank r has the logit `-DECAY * r`. The token at rank r is

    t_p = (S_{p-1} + b_p + r * s_p)  mod M,          S_p = m * S_{p-1} + t_p  mod M

with M prime, b_p and s_p pseudo-random by weights, adapter, media and position, and S a rolling hash of every token so
far. So the next token depends on the whole prefix, a prompt that repeats an output goes on as that output did, and any
sequence can be scored; and since S is a linear recurrence, S_p = (m + 1) * S_{p-1} + (b_p + r_p * s_p), all tokens of an
output follow from their ranks by one cumulative sum. Ranks are drawn from a truncated geometric distribution, whose
inverse is known, so top-k, top-p and min-p are exact.

Only what bends the ranks (allowed_token_ids, logit_bias, stop ids held back by min_tokens, a position where EOS is most
likely) is done token by token.
"""

import math
from typing import Final

import numpy as np

from rollplane.engines.mock.controls import DECAY, Controls
from rollplane.engines.mock.draws import Draws
from rollplane.engines.mock.hashing import Int64Array, stream, uniforms
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import LOGPROB_FLOOR, PromptLogprobs

_MULTIPLIER: Final = 3
_SALT_SHIFT, _SALT_STRIDE, _SALT_ENDING = 1, 2, 3
_NEGLIGIBLE_NATS: Final = 60.0


class Language:
    """The model without its weights; `scope` keys (see `hashing.key_of`) are the weights.

    Args:
        vocab_tokens: ids are in [0, vocab_tokens); sampled ones below the largest prime in it.
        max_positions: longest sequence.
        eos_token_id, ending_rate: see `MockSettings`.
    """

    def __init__(self, *, vocab_tokens: int, max_positions: int, eos_token_id: int, ending_rate: float) -> None:
        self.modulus = largest_prime(vocab_tokens)
        self.eos_token_id = eos_token_id
        self.ending_rate = ending_rate
        self._hash = _Powers(_MULTIPLIER, modulus=self.modulus, count=max_positions + 1)
        self._grow = _Powers(_MULTIPLIER + 1, modulus=self.modulus, count=max_positions + 1)

    def __repr__(self) -> str:
        return f"<Language of {self.modulus} tokens>"

    def states(self, token_ids: Int32Array, *, state: int = 0) -> Int64Array:
        """The rolling hash after each token."""
        return self._hash.recur(state, token_ids.astype(np.int64) % self.modulus)

    def draw(self, scope: int, state: int, *, position: int, first: int, count: int, seed: int, by: Controls) -> Draws:
        """Sample `count` tokens.

        Args:
            scope: key of weights, adapter and media.
            state: rolling hash of everything before.
            position: sequence position of the first token drawn.
            first: its index in the output, which counts random numbers.
            seed: of this choice.
            by: the sampling controls.
        """
        chances = uniforms(seed, np.arange(first, first + count))
        parts: list[Draws] = []
        at = 0
        special = np.arange(count) if by.bends else np.flatnonzero(self._endings(scope, position, count))
        while at < count:
            nearest = int(np.searchsorted(special, at))
            end = int(special[nearest]) if nearest < special.size else count
            if end > at:
                part, states = self._run(scope, state, position + at, chances[at:end], by)
                fit = self._unheld(part, states, state, scope, position + at, first + at, by)
                if fit < len(part):
                    part, end = part.cut(0, fit), at + fit
                if fit:
                    parts.append(part)
                    state = int(states[fit - 1])
                at = end
            if at < count:
                part = self._step(scope, state, position + at, float(chances[at]), first + at, by)
                parts.append(part)
                state = (_MULTIPLIER * state + int(part.ids[0])) % self.modulus
                at += 1
        return Draws.joined(parts, by)

    def score(self, scope: int, token_ids: Int32Array, *, alternatives: int) -> PromptLogprobs:
        """Log-probabilities of a prompt at temperature 1, untruncated; each own token first, then the best others."""
        size = int(token_ids.size)
        rows = size - 1
        if rows == 0:
            none = np.empty(0, dtype=np.int32)
            return PromptLogprobs(
                ids=none, values=np.empty(0, np.float32), ranks=none, offsets=np.zeros(2, dtype=np.int32)
            )
        shift, stride = self._shape(scope, 1, rows)
        states = self.states(token_ids[:-1])
        base = (states + shift) % self.modulus
        base[self._endings(scope, 1, rows)] = self.eos_token_id % self.modulus
        own = token_ids[1:].astype(np.int64)
        ranks = ((own - base) * _inverses(stride, self.modulus)) % self.modulus
        log_z = _log_normaliser(DECAY, self.modulus)
        best = np.arange(min(alternatives, self.modulus), dtype=np.int64)
        ids = np.concatenate([own[:, None], (base[:, None] + best * stride[:, None]) % self.modulus], axis=1)
        every = np.concatenate([ranks[:, None], np.broadcast_to(best, (rows, best.size))], axis=1)
        keep = np.ones(ids.shape, dtype=np.bool_)
        keep[:, 1:] = best != ranks[:, None]
        offsets = np.zeros(size + 1, dtype=np.int32)
        np.cumsum(keep.sum(axis=1), out=offsets[2:])
        return PromptLogprobs(
            ids=ids[keep].astype(np.int32),
            values=(-DECAY * every[keep] - log_z).astype(np.float32),
            ranks=(every[keep] + 1).astype(np.int32),
            offsets=offsets,
        )

    def _shape(self, scope: int, position: int, count: int) -> tuple[Int64Array, Int64Array]:
        """b_p and s_p for positions from `position` on."""
        at = np.arange(position, position + count)
        shift = stream(scope, at, salt=_SALT_SHIFT) % np.uint64(self.modulus)
        stride = stream(scope, at, salt=_SALT_STRIDE) % np.uint64(self.modulus - 1) + np.uint64(1)
        return shift.astype(np.int64), stride.astype(np.int64)

    def _endings(self, scope: int, position: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        if not self.ending_rate:
            return np.zeros(count, dtype=np.bool_)
        return uniforms(scope, np.arange(position, position + count), salt=_SALT_ENDING) < self.ending_rate

    def _run(
        self, scope: int, state: int, position: int, chances: np.ndarray[tuple[int], np.dtype[np.float64]], by: Controls
    ) -> tuple[Draws, Int64Array]:
        """Tokens that nothing bends, all at once, and the rolling hash after each."""
        count = int(chances.size)
        shift, stride = self._shape(scope, position, count)
        slope, support = by.slope, by.support(self.modulus)
        if by.greedy:
            ranks = np.zeros(count, dtype=np.int64)
        else:
            mass = -math.expm1(-slope * support)
            ranks = np.minimum(np.floor(np.log1p(-chances * mass) / -slope).astype(np.int64), support - 1)
        kicks = (shift + ranks * stride) % self.modulus
        states = self._grow.recur(state, kicks)
        before = np.empty_like(states)
        before[0] = state
        before[1:] = states[:-1]
        ids = ((before + kicks) % self.modulus).astype(np.int32)
        width = self.modulus if by.greedy else support
        log_z = _log_normaliser(slope, width)
        values = (-slope * ranks - log_z).astype(np.float32)
        base = before + shift
        alternatives = alternative_values = None
        if by.alternatives:
            best = np.arange(min(by.alternatives, self.modulus), dtype=np.int64)
            alternatives = ((base[:, None] + best * stride[:, None]) % self.modulus).astype(np.int32)
            row = np.where(best < width, -slope * best - log_z, LOGPROB_FLOOR).astype(np.float32)
            alternative_values = np.broadcast_to(row, alternatives.shape)
        mask_ids = mask_counts = None
        if by.mask:
            kept = np.arange(1 if by.greedy else support, dtype=np.int64)
            mask_ids = ((base[:, None] + kept * stride[:, None]) % self.modulus).astype(np.int32).reshape(-1)
            mask_counts = np.full(count, kept.size, dtype=np.int32)
        return (
            Draws(
                ids=ids,
                values=values,
                ranks=(ranks + 1).astype(np.int32),
                alternative_ids=alternatives,
                alternative_values=alternative_values,
                mask_ids=mask_ids,
                mask_counts=mask_counts,
            ),
            states,
        )

    def _unheld(
        self, part: Draws, states: Int64Array, state: int, scope: int, position: int, first: int, by: Controls
    ) -> int:
        """How many tokens of a run stand although `min_tokens` holds stop ids back: those where none has a near rank."""
        held_rows = min(len(part), by.min_tokens - first)
        if held_rows <= 0 or not by.held_ids:
            return len(part)
        shift, stride = self._shape(scope, position, held_rows)
        before = np.concatenate([[state], states[: held_rows - 1]])
        held = np.array(by.held_ids, dtype=np.int64)
        ranks = ((held - (before + shift)[:, None]) * _inverses(stride, self.modulus)[:, None]) % self.modulus
        near = (ranks < self._reach(by)).any(axis=1)
        return int(near.argmax()) if near.any() else len(part)

    def _reach(self, by: Controls) -> int:
        """Ranks from here on have no weight that float32 could show."""
        return int(min(self.modulus, math.ceil(_NEGLIGIBLE_NATS / by.slope) + by.alternatives + 1))

    def _step(self, scope: int, state: int, position: int, chance: float, index: int, by: Controls) -> Draws:
        """One token, over explicit candidates."""
        shift, stride = self._shape(scope, position, 1)
        base = (state + int(shift[0])) % self.modulus
        if self._endings(scope, position, 1)[0]:
            base = self.eos_token_id % self.modulus
        step = int(stride[0])
        inverse = pow(step, -1, self.modulus)
        held = set(by.held_ids) if index < by.min_tokens else set()
        if by.allowed_ids is not None:
            ids = np.array(sorted(set(by.allowed_ids)), dtype=np.int64)
        else:
            whole = by.mask and not by.greedy and by.support(self.modulus) == self.modulus
            reach = self.modulus if whole else min(self.modulus, self._reach(by) + len(by.bias) + len(held))
            ids = (base + np.arange(reach, dtype=np.int64) * step) % self.modulus
            extra = [i for i in by.bias if (i - base) * inverse % self.modulus >= reach]
            ids = np.concatenate([ids, np.array(extra, dtype=np.int64)])
        logits = -DECAY * (((ids - base) * inverse) % self.modulus).astype(np.float64)
        for token_id, bias in by.bias.items():
            logits[ids == token_id] += bias
        if held:
            logits[np.isin(ids, list(held))] = -np.inf
        if not np.isfinite(logits).any():
            # Everything allowed is held back: as in a real sampler, there is no distribution left.
            return Draws.broken(by)
        return _choose(ids, logits, chance, by)


def _choose(
    ids: Int64Array, logits: np.ndarray[tuple[int], np.dtype[np.float64]], chance: float, by: Controls
) -> Draws:
    """One token of explicit candidates: order, truncate, draw."""
    order = np.argsort(-logits, kind="stable")
    ids, scaled = ids[order], logits[order] * (by.slope / DECAY)
    finite = int(np.isfinite(scaled).sum())
    weights = np.exp(scaled[:finite] - scaled[0])
    kept = finite
    if not by.greedy:
        kept = min(kept, by.top_k) if by.top_k else kept
        if by.min_p > 0:
            kept = min(kept, int((weights >= by.min_p).sum()))
        if by.top_p < 1:
            sums = np.cumsum(weights[:kept])
            kept = min(kept, int(np.searchsorted(sums, by.top_p * sums[-1] * (1 - 1e-12))) + 1)
    log_z = float(scaled[0] + np.log(weights[:kept].sum()))
    sums = np.cumsum(weights[:kept])
    rank = 0 if by.greedy else min(int(np.searchsorted(sums, chance * sums[-1], side="right")), kept - 1)
    values = np.full(ids.size, LOGPROB_FLOOR, dtype=np.float32)
    values[:kept] = scaled[:kept] - log_z
    alternatives = alternative_values = None
    if by.alternatives:
        alternatives = np.zeros((1, by.alternatives), dtype=np.int32)
        alternative_values = np.full((1, by.alternatives), LOGPROB_FLOOR, dtype=np.float32)
        size = min(by.alternatives, ids.size)
        alternatives[0, :size], alternative_values[0, :size] = ids[:size], values[:size]
        if size < by.alternatives:
            # What is not allowed has no probability; ids from 0 up stand for it.
            others = np.setdiff1d(np.arange(by.alternatives + ids.size), ids)[: by.alternatives - size]
            alternatives[0, size:] = others
    support = 1 if by.greedy else kept
    return Draws(
        ids=ids[rank : rank + 1].astype(np.int32),
        values=values[rank : rank + 1],
        ranks=np.array([rank + 1], dtype=np.int32),
        alternative_ids=alternatives,
        alternative_values=alternative_values,
        mask_ids=ids[:support].astype(np.int32) if by.mask else None,
        mask_counts=np.array([support], dtype=np.int32) if by.mask else None,
    )


class _Powers:
    """Linear recurrences x_i = f * x_{i-1} + k_i mod M, solved for whole arrays."""

    def __init__(self, factor: int, *, modulus: int, count: int) -> None:
        self.modulus = modulus
        self._up = _powers(factor % modulus, modulus, count)
        self._down = _powers(pow(factor, -1, modulus), modulus, count)

    def recur(self, start: int, kicks: Int64Array) -> Int64Array:
        """x_1..x_n for x_0 = start."""
        n = kicks.size
        sums = np.cumsum(self._down[1 : n + 1] * kicks % self.modulus)
        out: Int64Array = self._up[1 : n + 1] * ((start + sums) % self.modulus) % self.modulus
        return out


def _powers(factor: int, modulus: int, count: int) -> Int64Array:
    out = np.ones(1, dtype=np.int64)
    step = factor
    while out.size < count:
        out = np.concatenate([out, out * step % modulus])
        step = step * step % modulus
    return out[:count]


def _inverses(values: Int64Array, modulus: int) -> Int64Array:
    """Inverses mod a prime, by Fermat: v ** (modulus - 2)."""
    out, base, left = np.ones_like(values), values % modulus, modulus - 2
    while left:
        if left & 1:
            out = out * base % modulus
        base = base * base % modulus
        left >>= 1
    return out


def _log_normaliser(slope: float, support: int) -> float:
    """log of the sum over r < support of exp(-slope * r)."""
    return math.log(-math.expm1(-slope * support)) - math.log(-math.expm1(-slope))


def largest_prime(limit: int) -> int:
    """The largest prime that is at most `limit` (limit >= 8)."""
    return next(n for n in range(limit, 4, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))
