"""What the step loop reports about a sequence, read out of the slots as the arrays that cross the wire."""

from dataclasses import dataclass

import numpy as np

from rollplane.engines.embedded.sequence import Sequence
from rollplane.engines.embedded.slots import SlotTable
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import (
    LOGPROB_FLOOR,
    Alternatives,
    PromptLogprobs,
    RoutedExperts,
    SamplingMask,
    TokenLogprobs,
    narrow_expert_ids,
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a sequence ended, and the payloads that cover all of it.

    `spans` is (policy version, first output index), never empty; `recomputed_rows` leading rows had their keys and
    values computed again; `error` is set when its sample is unusable.
    """

    finish_reason: str
    stop_reason: int | str | None
    spans: list[tuple[str, int]]
    routes: RoutedExperts | None
    mask: SamplingMask | None
    recomputed_rows: int
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Emission:
    """Tokens of one sequence since the last report (all of them for a unary request), and its ending if it ended.

    `token_ids` int32 [T]; `logprobs` None unless asked for; `floored` alternatives were not finite;
    `prompt_logprobs` comes once per request, with its first emission that has tokens.
    """

    sequence: Sequence
    token_ids: Int32Array
    logprobs: TokenLogprobs | None
    floored: int
    prompt_logprobs: PromptLogprobs | None
    ending: Ending | None


def read_tokens(table: SlotTable, sequence: Sequence) -> tuple[Int32Array, TokenLogprobs | None, int]:
    """Token ids and log-probabilities generated since the last report, and how many alternatives were floored."""
    request = sequence.request
    if sequence.slot < 0:
        ids, logprobs, ranks = (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
        first = last = 0
    else:
        first, last = len(request.prompt) + sequence.delivered, sequence.total
        at = (sequence.slot, slice(first, last))
        ids = table.tokens[at].numpy().astype(np.int32)
        logprobs, ranks = table.logprobs[at].numpy(), table.ranks[at].numpy()
    if request.logprobs is None:
        return ids, None, 0
    alternatives, floored = None, 0
    width = request.alternatives
    if width:
        alternatives, floored = _read_alternatives(table, sequence.slot, first, last, width)
    return ids, TokenLogprobs(values=logprobs.copy(), ranks=ranks.copy(), alternatives=alternatives), floored


def _read_alternatives(table: SlotTable, slot: int, first: int, last: int, width: int) -> tuple[Alternatives, int]:
    n = last - first
    at = (max(slot, 0), slice(first, last), slice(width))
    values = table.alt_values[at].numpy().reshape(-1).copy()
    bad = ~np.isfinite(values)
    values[bad] = LOGPROB_FLOOR
    return (
        Alternatives(
            ids=table.alt_ids[at].numpy().reshape(-1).copy(),
            values=values,
            ranks=table.alt_ranks[at].numpy().reshape(-1).copy(),
            offsets=np.arange(0, (n + 1) * width, width, dtype=np.int32),
        ),
        int(bad.sum()),
    )


def read_ending(table: SlotTable, sequence: Sequence, *, version: str) -> Ending:
    """The ending of a finished sequence, while its slot still holds it (or -1: it never had one)."""
    request = sequence.request
    return Ending(
        finish_reason=sequence.finish_reason or "error",
        stop_reason=sequence.stop_reason,
        spans=list(sequence.spans) or [(version, 0)],
        routes=read_routes(table, sequence) if request.routed_experts else None,
        mask=join_mask_rows(sequence.mask_rows) if request.sampling_mask else None,
        recomputed_rows=sequence.recomputed_rows,
        error=sequence.error,
    )


def read_routes(table: SlotTable, sequence: Sequence) -> RoutedExperts:
    """Rows start .. prompt + completion - 2; none if nothing was generated. The narrowest dtype that holds every id."""
    shape = table.shape
    start = sequence.request.routes_start
    rows = sequence.total - 1 if sequence.generated else start
    kept = table.routes[max(sequence.slot, 0), start:rows].numpy()
    return RoutedExperts(array=narrow_expert_ids(kept, num_experts=shape.experts), start=start)


def join_mask_rows(rows: list[Int32Array]) -> SamplingMask:
    """CSR of one array of ids per token."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    return SamplingMask(ids=np.concatenate(rows) if rows else np.empty(0, np.int32), offsets=offsets)
