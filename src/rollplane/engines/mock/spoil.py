"""Answers that break the contract on purpose: what `rollplane.fold` has to catch."""

import numpy as np

from rollplane.engines.mock.settings import FaultKind
from rollplane.protocol.artifacts import RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, Event


def spoil_choice(kind: FaultKind, event: ChoiceEvent) -> list[Event]:
    """What is sent instead of a terminal event; the event itself where the fault has nothing to spoil in it."""
    if kind == "no_terminal":
        return []
    if kind == "two_terminals":
        return [event, event]
    if kind == "wrong_index":
        event.index += 1_000
    elif kind == "negative_token" and event.token_ids.size:
        event.token_ids = event.token_ids.copy()
        event.token_ids[-1] = -1
    elif event.routed_experts is not None and kind.startswith("routes_"):
        event.routed_experts = _spoil_routes(kind, event.routed_experts)
    elif event.logprobs is not None and event.token_ids.size and kind in ("nan_logprob", "logprob_missing"):
        event.logprobs = _spoil_logprobs(kind, event.logprobs)
    elif event.sampling_mask is not None and event.sampling_mask.ids.size and kind.startswith("mask_"):
        event.sampling_mask = _spoil_mask(kind, event.sampling_mask)
    return [event]


def _spoil_routes(kind: FaultKind, routes: RoutedExperts) -> RoutedExperts | None:
    array = routes.array.copy()
    if kind == "routes_missing":
        return None
    if kind == "routes_zero":
        array[...] = 0
    elif kind == "routes_repeat":
        array[-1:] = array[-1:, :, :1]
    else:
        array = array[:-1]
    return RoutedExperts(array=array, start=routes.start)


def _spoil_logprobs(kind: FaultKind, logprobs: TokenLogprobs) -> TokenLogprobs:
    values = logprobs.values.copy()
    if kind == "logprob_missing":
        return TokenLogprobs(values=values[:-1])
    values[-1] = np.nan
    return TokenLogprobs(values=values, ranks=logprobs.ranks, alternatives=logprobs.alternatives)


def _spoil_mask(kind: FaultKind, mask: SamplingMask) -> SamplingMask:
    ids, offsets = mask.ids.copy(), mask.offsets.copy()
    last = slice(int(offsets[-2]), int(offsets[-1]))
    if kind == "mask_row_empty":
        return SamplingMask(ids=ids[: last.start], offsets=np.append(offsets[:-1], offsets[-2]).astype(np.int32))
    # Ids of the row moved out of any small vocabulary: distinct still, and none of them the sampled one.
    ids[last] += 2**30
    return SamplingMask(ids=ids, offsets=offsets)
