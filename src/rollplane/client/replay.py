"""Replay arithmetic for a trainer: align recorded routes, renormalise over sampling masks, measure the mismatch.

Pure numpy; `rollplane.client.replay_torch` has the part that runs inside a trainer's forward pass. Letters for shapes:

    T  output tokens of one choice          L  MoE layers, in the model's order
    R  routed rows                          K  experts chosen per token and layer (the router's top_k)
    N  ids in a whole sampling mask         V  vocabulary
    B  sequences in a batch                 S  tokens of a padded sequence (prompt + output)

A log-probability is in nats. A sampling mask is CSR: `ids` int32 [N] and `offsets` int32 [T + 1]; token `t` could be
any of `ids[offsets[t]:offsets[t + 1]]`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollplane.errors import EngineProtocolError, InvalidRequest
from rollplane.protocol import invariants
from rollplane.protocol.artifacts import RoutedExperts, SamplingMask
from rollplane.protocol.versions import check_spans

__all__ = [
    "UNRECORDED",
    "Mismatch",
    "ReplayError",
    "RoutedTurn",
    "Spans",
    "check_mask",
    "check_routes",
    "masked_logprobs",
    "mismatch",
    "mismatch_by_version",
    "pad_routes",
    "renormalise",
    "routed_row_count",
    "span_ranges",
    "stitch_routes",
    "support_log_mass",
]

UNRECORDED = -1
"""The expert id of a row that nothing was recorded for: the trainer's router chooses there by itself."""

Spans = Sequence[tuple[str, int | None] | list[Any]]
"""`policy_versions` of a choice: `[[version, first_output_index], ...]`; the index is None where it is not known."""


class ReplayError(InvalidRequest, ValueError):
    """Rollout arrays that do not fit together; the message has the numbers. Nothing is repaired."""


# -- routed experts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoutedTurn:
    """The routes of one answer of a conversation.

    Attributes:
        rows: expert ids, integer [R, L, K]; row 0 belongs to sequence position `start`.
        prompt_tokens: tokens of this turn's prompt, all earlier turns included.
        completion_tokens: tokens that this turn generated.
        start: first sequence position with a row (`routed_experts.start` of the answer).
    """

    rows: NDArray[Any]
    prompt_tokens: int
    completion_tokens: int
    start: int = 0


def routed_row_count(prompt_tokens: int, completion_tokens: int, *, start: int = 0) -> int:
    """How many rows an answer must hold: tokens forwarded minus `start`.

    The last sampled token was never fed back, so `prompt_tokens + completion_tokens - 1` tokens were forwarded. An
    answer without tokens has no rows.

    Raises:
        ReplayError: an empty prompt, a negative count, or a start outside the prompt.
    """
    if prompt_tokens < 1 or completion_tokens < 0:
        raise ReplayError(
            f"{prompt_tokens} prompt and {completion_tokens} completion tokens; must be at least 1 and at least 0"
        )
    if not 0 <= start < prompt_tokens:
        raise ReplayError(f"routes start at {start}; must be at least 0 and below the {prompt_tokens} prompt tokens")
    return prompt_tokens + completion_tokens - 1 - start if completion_tokens else 0


def check_routes(
    rows: NDArray[Any], *, prompt_tokens: int, completion_tokens: int, start: int = 0, experts: int | None = None
) -> None:
    """Check the invariants of one answer's routes.

    Args:
        rows: expert ids as they came, uint8, uint16 or int32 [R, L, K].
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated.
        start: first sequence position with a row.
        experts: experts per layer where known; every id must be below it.

    Raises:
        ReplayError: no uint8, uint16 or int32 [R, L, K] array, a wrong number of rows, an id out of range, a row that
            names one expert twice (an all-zero capture does, for K > 1), or an all-zero array.
    """
    routed_row_count(prompt_tokens, completion_tokens, start=start)
    routes = RoutedExperts(array=rows, start=start)
    try:
        invariants.check_routes(routes, prompt_tokens=prompt_tokens, tokens=completion_tokens, where="routes")
    except EngineProtocolError as error:
        raise ReplayError(error.message) from None
    _check_ids(rows, limit=experts, what="expert ids")


def stitch_routes(turns: Sequence[RoutedTurn], *, experts: int | None = None) -> NDArray[np.signedinteger[Any]]:
    """Join the turns of one conversation into one row per forwarded token.

    The last token of a turn is forwarded only by the next turn, so its row comes from there. A position that two turns
    cover keeps the row of the earlier one: that is the row under which the tokens after it were sampled.

    Args:
        turns: in order; each prompt extends the whole sequence of the turn before.
        experts: experts per layer where known; every id must be below it.

    Returns:
        int16 (int32 where ids need it) [prompt + completion of the last turn - 1, L, K]; `UNRECORDED` where no turn has
        a row.

    Raises:
        ReplayError: no turns, a turn whose prompt is shorter than the sequence before it, differing L or K, or rows
            that break the invariants of `check_routes`.
    """
    if not turns:
        raise ReplayError("no turns to stitch")
    for turn in turns:
        check_routes(
            turn.rows,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            start=turn.start,
            experts=experts,
        )
    layers_top_k = turns[0].rows.shape[1:]
    tokens = 0
    for number, turn in enumerate(turns):
        if turn.rows.shape[1:] != layers_top_k:
            raise ReplayError(f"turn {number} has [layers, top_k] {turn.rows.shape[1:]}, turn 0 has {layers_top_k}")
        if turn.prompt_tokens < tokens:
            raise ReplayError(
                f"turn {number} has {turn.prompt_tokens} prompt tokens; must hold the {tokens} tokens before it"
            )
        tokens = turn.prompt_tokens + turn.completion_tokens
    stitched = np.full((tokens - 1, *layers_top_k), UNRECORDED, dtype=_signed_dtype([turn.rows for turn in turns]))
    for turn in reversed(turns):  # earlier turns are written last: their rows win
        stitched[turn.start : turn.start + len(turn.rows)] = turn.rows
    return stitched


def pad_routes(rows: Sequence[NDArray[Any]], *, tokens: int) -> NDArray[np.signedinteger[Any]]:
    """Stack sequences of different lengths for a batched forward pass over right-padded ids.

    Args:
        rows: one integer [R_i, L, K] array per sequence, row 0 at sequence position 0 (see `stitch_routes`).
        tokens: tokens S of the padded forward pass.

    Returns:
        int16 (int32 where ids need it) [B, S, L, K], `UNRECORDED` past each sequence's rows.

    Raises:
        ReplayError: no sequences, differing L or K, or more rows than tokens.
    """
    if not rows:
        raise ReplayError("no sequences to pad")
    for index, one in enumerate(rows):
        _check_rows_shape(one)
        if one.shape[1:] != rows[0].shape[1:]:
            raise ReplayError(
                f"sequence {index} has [layers, top_k] {one.shape[1:]}, sequence 0 has {rows[0].shape[1:]}"
            )
        if len(one) > tokens:
            raise ReplayError(f"sequence {index} has {len(one)} routed rows; the forward pass has {tokens} tokens")
    padded = np.full((len(rows), tokens, *rows[0].shape[1:]), UNRECORDED, dtype=_signed_dtype(rows))
    for index, one in enumerate(rows):
        padded[index, : len(one)] = one
    return padded


def _check_rows_shape(rows: NDArray[Any]) -> None:
    if rows.ndim != 3 or not np.issubdtype(rows.dtype, np.integer):
        raise ReplayError(
            f"routes are {rows.dtype} {list(rows.shape)}; must be integers of shape [rows, layers, top_k]"
        )


def _signed_dtype(rows: Sequence[NDArray[Any]]) -> type[np.signedinteger[Any]]:
    """The narrowest signed type that holds `UNRECORDED` and every id: torch indexes no unsigned 16-bit arrays."""
    largest = max((int(one.max()) for one in rows if one.size), default=0)
    return np.int16 if largest <= np.iinfo(np.int16).max else np.int32


# -- sampling masks ------------------------------------------------------------------------------------------------


def check_mask(
    ids: NDArray[Any], offsets: NDArray[Any], token_ids: NDArray[Any], *, vocabulary: int | None = None
) -> None:
    """Check the invariants of one answer's sampling mask.

    Args:
        ids: integer [N].
        offsets: integer [T + 1].
        token_ids: the sampled ids, integer [T].
        vocabulary: V where known; every id must be below it.

    Raises:
        ReplayError: offsets that are not T + 1 rising numbers from 0 to N, an empty row, a row with an id twice, an id
            out of range, or a row without its own sampled token.
    """
    try:
        invariants.check_mask(SamplingMask(ids=ids, offsets=offsets), token_ids, where="mask")
    except EngineProtocolError as error:
        raise ReplayError(error.message) from None
    _check_ids(ids, limit=vocabulary, what="sampling mask ids")


def _check_ids(ids: NDArray[Any], *, limit: int | None, what: str) -> None:
    """Ids lie in 0..limit, where a limit is known."""
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (limit is not None and high >= limit):
        below = "" if limit is None else f" and below {limit}"
        raise ReplayError(f"{what} range from {low} to {high}; must be at least 0{below}")


def support_log_mass(support_logprobs: ArrayLike, offsets: NDArray[Any]) -> NDArray[np.float64]:
    """The log of the probability that lies on each token's support.

    Args:
        support_logprobs: the trainer's log-probabilities (or logits) at `ids` of the mask, floating [N].
        offsets: integer [T + 1].

    Returns:
        float64 [T], the logsumexp of each row. For log-probabilities it is at most 0: 0 means nothing was cut off.

    Raises:
        ReplayError: offsets that do not run from 0 to N, or an empty row.
    """
    values = np.asarray(support_logprobs, dtype=np.float64)
    if len(offsets) < 1 or int(offsets[0]) != 0 or int(offsets[-1]) != len(values):
        raise ReplayError(f"sampling mask offsets must run from 0 to the {len(values)} values given")
    counts = np.diff(offsets)
    if not len(counts):
        return np.empty(0, dtype=np.float64)
    if int(counts.min()) < 1:
        raise ReplayError(f"sampling mask row {int(counts.argmin())} has {int(counts.min())} ids; must have at least 1")
    starts = offsets[:-1]
    peaks = np.maximum.reduceat(values, starts)
    sums = np.add.reduceat(np.exp(values - np.repeat(peaks, counts)), starts)
    return np.asarray(peaks + np.log(sums), dtype=np.float64)


def renormalise(logprobs: ArrayLike, support_logprobs: ArrayLike, offsets: NDArray[Any]) -> NDArray[np.float64]:
    """Log-probabilities under the truncated distribution that the tokens were drawn from.

    Args:
        logprobs: the trainer's log-probabilities of the sampled tokens over the whole vocabulary, floating [T].
        support_logprobs: the same distribution at `ids` of the mask, floating [N].
        offsets: integer [T + 1].

    Returns:
        float64 [T]: `logprobs - support_log_mass(support_logprobs, offsets)`.

    Raises:
        ReplayError: the lengths do not fit.
    """
    mass = support_log_mass(support_logprobs, offsets)
    values = np.asarray(logprobs, dtype=np.float64)
    if values.shape != mass.shape:
        raise ReplayError(f"{values.shape} log-probabilities for a sampling mask of {mass.shape} tokens")
    return np.asarray(values - mass, dtype=np.float64)


def masked_logprobs(
    logits: NDArray[Any], token_ids: NDArray[Any], ids: NDArray[Any], offsets: NDArray[Any], *, temperature: float = 1.0
) -> NDArray[np.float64]:
    """Log-probabilities of the sampled tokens from whole logits, normalised over the sampling mask.

    Args:
        logits: floating [T, V], before temperature.
        token_ids: the sampled ids, integer [T].
        ids: integer [N].
        offsets: integer [T + 1].
        temperature: of the rollout, above 0.

    Returns:
        float64 [T].

    Raises:
        ReplayError: shapes that do not fit, or a mask that breaks the invariants of `check_mask`.
    """
    if logits.ndim != 2 or len(logits) != len(token_ids):
        raise ReplayError(f"logits have shape {list(logits.shape)}; must be [{len(token_ids)}, vocabulary]")
    if not temperature > 0:
        raise ReplayError(f"temperature must be above 0, got {temperature}")
    check_mask(ids, offsets, token_ids, vocabulary=logits.shape[1])
    rows = np.arange(len(token_ids))
    support = logits[np.repeat(rows, np.diff(offsets)), ids].astype(np.float64) / temperature
    return renormalise(logits[rows, token_ids].astype(np.float64) / temperature, support, offsets)


# -- mismatch ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far a trainer's log-probabilities lie from the rollout's, over `tokens` tokens.

    With d = trainer - rollout log-probability, in nats:

    Attributes:
        kl: mean of `exp(d) - d - 1`, the k3 estimator of the divergence; 0 only where they agree.
        mean_abs: mean of |d|.
        max_abs: largest |d|.
        tokens: how many tokens were compared.
    """

    kl: float
    mean_abs: float
    max_abs: float
    tokens: int


def mismatch(trainer: ArrayLike, rollout: ArrayLike, *, where: ArrayLike | None = None) -> Mismatch:
    """Compare two arrays of log-probabilities of the same tokens.

    Args:
        trainer: floating, any shape.
        rollout: floating, the same shape.
        where: booleans of the same shape; only true positions count (padding is false).

    Raises:
        ReplayError: differing shapes, no token to compare, or a value that is not finite.
    """
    ours, theirs = np.asarray(trainer, dtype=np.float64), np.asarray(rollout, dtype=np.float64)
    if ours.shape != theirs.shape:
        raise ReplayError(f"trainer log-probabilities have shape {list(ours.shape)}, rollout ones {list(theirs.shape)}")
    if where is not None:
        chosen = np.asarray(where, dtype=bool)
        if chosen.shape != ours.shape:
            raise ReplayError(f"`where` has shape {list(chosen.shape)}, the log-probabilities {list(ours.shape)}")
        ours, theirs = ours[chosen], theirs[chosen]
    if not ours.size:
        raise ReplayError("no token to compare")
    difference = ours - theirs
    if not np.isfinite(difference).all():
        bad = int((~np.isfinite(difference)).sum())
        raise ReplayError(f"{bad} of {difference.size} log-probability differences are not finite")
    magnitude = np.abs(difference)
    # expm1 keeps the digits of a tiny d, which `exp(d) - d - 1` would cancel away.
    return Mismatch(
        kl=float((np.expm1(difference) - difference).mean()),
        mean_abs=float(magnitude.mean()),
        max_abs=float(magnitude.max()),
        tokens=int(difference.size),
    )


def span_ranges(spans: Spans, *, tokens: int) -> list[tuple[str | None, int, int]]:
    """Which output tokens each policy version made.

    Args:
        spans: `[[version, first_output_index], ...]`.
        tokens: output tokens T of the choice.

    Returns:
        `(version, begin, end)`, together covering 0..T. The version is None for tokens whose boundary is not known:
        `[["v7", 0], ["v8", None]]` says nothing about any single token.

    Raises:
        ReplayError: no spans, a first index other than 0, or indices that do not rise within 0..T.
    """
    named = [(str(version), index) for version, index in spans]
    try:
        check_spans(named, tokens=tokens)
    except EngineProtocolError as error:
        raise ReplayError(error.message) from None
    known = [(version, index, at) for at, (version, index) in enumerate(named) if index is not None]
    ends = [*known[1:], ("", tokens, len(named))]
    return [
        (version if next_at == at + 1 else None, begin, end)
        for (version, begin, at), (_, end, next_at) in zip(known, ends, strict=True)
    ]


def mismatch_by_version(samples: Iterable[tuple[ArrayLike, ArrayLike, Spans]]) -> dict[str | None, Mismatch]:
    """The mismatch of every policy version that made tokens.

    Args:
        samples: per choice: trainer log-probabilities [T], rollout log-probabilities [T], `policy_versions`.

    Returns:
        One `Mismatch` per version, in order of appearance; key None holds tokens whose version is not known.

    Raises:
        ReplayError: shapes or spans that do not fit, or values that are not finite.
    """
    parts: dict[str | None, list[tuple[NDArray[np.float64], NDArray[np.float64]]]] = {}
    for trainer, rollout, spans in samples:
        ours, theirs = np.asarray(trainer, dtype=np.float64), np.asarray(rollout, dtype=np.float64)
        if ours.ndim != 1 or ours.shape != theirs.shape:
            raise ReplayError(f"log-probabilities have shapes {list(ours.shape)} and {list(theirs.shape)}; must be [T]")
        for version, begin, end in span_ranges(spans, tokens=len(ours)):
            if end > begin:
                parts.setdefault(version, []).append((ours[begin:end], theirs[begin:end]))
    return {
        version: mismatch(np.concatenate([ours for ours, _ in pairs]), np.concatenate([theirs for _, theirs in pairs]))
        for version, pairs in parts.items()
    }
