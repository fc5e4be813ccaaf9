"""The response contract as checks: each breach is an `EngineProtocolError` with its numbers, never a repaired answer.

Used where an engine's output is folded and again by the client. Everything is vectorised: cost per token is a few
array passes.
"""

from typing import Any, Final

import numpy as np

from rollplane.errors import EngineProtocolError
from rollplane.protocol.arrays import INT32_MAX, Int32Array
from rollplane.protocol.artifacts import Alternatives, PromptLogprobs, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.response import Choice, GenerateResponse
from rollplane.protocol.versions import check_spans

_ROUTE_CHUNK_BYTES: Final = 384 * 1024
"""Of routes that are compared at a time: what fits a core's second cache together with its copy."""
_INT32: Final = np.dtype(np.int32)
_FLOAT32: Final = np.dtype(np.float32)
_FEW: Final = 4096
_COUNTED: Final = np.arange(_FEW, dtype=np.int32).tobytes()


def check_response(
    response: GenerateResponse,
    *,
    choices: int,
    prompt_tokens: int | None,
    logprobs: bool,
    routes: bool | None = None,
    mask: bool | None = None,
    prompt_logprobs: bool = False,
    routes_start: int | None = None,
) -> None:
    """Hold a whole answer to the contract.

    Args:
        choices: how many were asked for (n).
        prompt_tokens: the prompt as the engine ran it; None = as `usage` says (media expand it).
        logprobs, routes, mask, prompt_logprobs: what must be there; `routes` and `mask` None = may or may not.
        routes_start: the start that was asked for; None = any.

    Raises:
        EngineProtocolError: with the numbers.
    """
    indices = [choice.index for choice in response.choices]
    if sorted(indices) != list(range(choices)):
        raise EngineProtocolError(f"asked for {choices} choices, got the indices {indices}")
    prompt = response.usage.prompt_tokens
    if prompt_tokens is not None and prompt != prompt_tokens:
        raise EngineProtocolError(f"the prompt has {prompt_tokens} tokens, usage says {prompt}")
    total = sum(int(choice.token_ids.size) for choice in response.choices)
    if total != response.usage.completion_tokens:
        raise EngineProtocolError(f"the choices have {total} tokens, usage says {response.usage.completion_tokens}")
    with_routes = [choice.routed_experts is not None for choice in response.choices]
    if any(with_routes) and not all(with_routes):
        raise EngineProtocolError(f"choices {[i for i, w in enumerate(with_routes) if not w]} lack routed experts")
    if routes is not None and with_routes[0] is not routes:
        raise EngineProtocolError(
            "routed experts were asked for and are missing" if routes else "unasked routed experts"
        )
    for choice in response.choices:
        check_choice(choice, prompt_tokens=prompt, logprobs=logprobs, mask=mask, routes_start=routes_start)
    if prompt_logprobs and response.prompt_logprobs is None and not ended_unstarted(response):
        raise EngineProtocolError("prompt logprobs were asked for and are missing")
    check_prompt(response.prompt_token_ids, response.prompt_logprobs, prompt_tokens=prompt)


def check_prompt(prompt_token_ids: Int32Array | None, logprobs: PromptLogprobs | None, *, prompt_tokens: int) -> None:
    """The prompt's ids and logprobs, where they are there, as long as the prompt; in each row its own token first."""
    if prompt_token_ids is not None:
        check_token_ids(prompt_token_ids, where="prompt_token_ids")
        if prompt_token_ids.size != prompt_tokens:
            raise EngineProtocolError(
                f"prompt_token_ids has {prompt_token_ids.size} ids, the prompt {prompt_tokens} tokens"
            )
    if logprobs is None:
        return
    check_prompt_logprobs(logprobs, prompt_tokens=prompt_tokens)
    if prompt_token_ids is not None:
        first = logprobs.ids[logprobs.offsets[1:-1]]
        wrong = np.flatnonzero(first != prompt_token_ids[1:])
        if wrong.size:
            at = int(wrong[0]) + 1
            raise EngineProtocolError(
                f"prompt_logprobs: position {at} begins with id {int(first[at - 1])}, the prompt has "
                f"{int(prompt_token_ids[at])} there"
            )


def ended_unstarted(response: GenerateResponse) -> bool:
    """Whether the request was aborted before its prompt was computed: there is nothing to say of the prompt then."""
    return all(choice.finish_reason == "abort" and choice.token_ids.size == 0 for choice in response.choices)


def check_choice(
    choice: Choice,
    *,
    prompt_tokens: int,
    logprobs: bool,
    mask: bool | None = None,
    routes_start: int | None = None,
) -> None:
    """Hold one finished choice to the contract; see `check_response`."""
    where = f"choice {choice.index}"
    if choice.finish_reason not in ("stop", "length", "abort", "repetition"):
        raise EngineProtocolError(f"{where} has the finish reason {choice.finish_reason!r}")
    check_token_ids(choice.token_ids, where=where)
    tokens = int(choice.token_ids.size)
    if logprobs and choice.logprobs is None:
        raise EngineProtocolError(f"{where}: logprobs were asked for and are missing")
    if choice.logprobs is not None:
        check_logprobs(choice.logprobs, tokens=tokens, where=where)
    if mask and choice.sampling_mask is None:
        raise EngineProtocolError(f"{where}: the sampling mask was asked for and is missing")
    if mask is False and choice.sampling_mask is not None:
        raise EngineProtocolError(f"{where}: a sampling mask was not asked for")
    if choice.sampling_mask is not None:
        _check_dtype(choice.sampling_mask.ids, _INT32, where=where, of="sampling mask ids")
        _check_dtype(choice.sampling_mask.offsets, _INT32, where=where, of="sampling mask offsets")
        check_mask(choice.sampling_mask, choice.token_ids, where=where)
    if choice.routed_experts is not None:
        check_routes(choice.routed_experts, prompt_tokens=prompt_tokens, tokens=tokens, start=routes_start, where=where)
    if choice.policy_versions:
        check_spans(choice.policy_versions, tokens=tokens)


def check_token_ids(token_ids: Int32Array, *, where: str) -> None:
    """Sampled ids are one int32 dimension, none negative."""
    if token_ids.ndim != 1 or token_ids.dtype != _INT32:
        raise EngineProtocolError(
            f"{where}: token_ids are {token_ids.dtype.name}{list(token_ids.shape)}, not int32 [T]"
        )
    if token_ids.size and token_ids.item(token_ids.argmin()) < 0:
        raise EngineProtocolError(f"{where}: token id {int(token_ids.min())} is negative")


def check_logprobs(logprobs: TokenLogprobs, *, tokens: int, where: str) -> None:
    """One finite log-probability per token; alternatives, where present, one row per token."""
    _check_dtype(logprobs.values, _FLOAT32, where=where, of="logprobs")
    if logprobs.values.shape != (tokens,):
        raise EngineProtocolError(f"{where}: {logprobs.values.size} logprobs for {tokens} tokens")
    if not _all_finite(logprobs.values):
        bad = int(np.flatnonzero(~np.isfinite(logprobs.values))[0])
        raise EngineProtocolError(
            f"{where}: the logprob of sampled token {bad} is {float(logprobs.values[bad])}; the sample is unusable"
        )
    if logprobs.ranks is not None:
        _check_dtype(logprobs.ranks, _INT32, where=where, of="ranks")
        if logprobs.ranks.shape != (tokens,):
            raise EngineProtocolError(f"{where}: {logprobs.ranks.size} ranks for {tokens} tokens")
    if logprobs.alternatives is not None:
        check_alternatives(logprobs.alternatives, rows=tokens, where=where)


def check_alternatives(alternatives: Alternatives | PromptLogprobs, *, rows: int, where: str) -> None:
    """CSR of the right height, values as long as ids and finite (the engine floors and counts what is not).

    No row holds an id twice: as an object's keys the second would hide the first.
    """
    ids, values, ranks, offsets = alternatives.ids, alternatives.values, alternatives.ranks, alternatives.offsets
    _check_dtype(ids, _INT32, where=where, of="ids of alternatives")
    _check_dtype(values, _FLOAT32, where=where, of="values of alternatives")
    _check_dtype(ranks, _INT32, where=where, of="ranks of alternatives")
    _check_dtype(offsets, _INT32, where=where, of="offsets of alternatives")
    one_each = _check_offsets(offsets, rows=rows, entries=ids.size, where=where, of="alternatives")
    if not ids.size == values.size == ranks.size:
        raise EngineProtocolError(
            f"{where}: alternatives have {ids.size} ids, {values.size} values, {ranks.size} ranks"
        )
    if not _all_finite(alternatives.values):
        raise EngineProtocolError(f"{where}: an alternative's logprob is not finite and was not floored")
    _check_ids_once(ids, offsets, what=where, of="the alternatives", one_each=one_each)


def check_prompt_logprobs(logprobs: PromptLogprobs, *, prompt_tokens: int) -> None:
    """Row 0 empty, every other row with at least the prompt's own token."""
    where = "prompt_logprobs"
    check_alternatives(logprobs, rows=prompt_tokens, where=where)
    counts = np.diff(logprobs.offsets)
    if prompt_tokens and int(counts[0]) != 0:
        raise EngineProtocolError(f"{where}: the first position has {int(counts[0])} entries, must have none")
    if prompt_tokens > 1 and int(counts[1:].min()) < 1:
        raise EngineProtocolError(f"{where}: position {1 + int(counts[1:].argmin())} has no entry")


def check_mask(mask: SamplingMask, token_ids: Int32Array, *, where: str) -> None:
    """One row per token, none empty, no id twice in a row, each row holding its sampled token."""
    tokens = int(token_ids.size)
    one_each = _check_offsets(mask.offsets, rows=tokens, entries=mask.ids.size, where=where, of="sampling mask")
    if tokens == 0:
        return
    counts = np.diff(mask.offsets)
    if int(counts.min()) < 1:
        raise EngineProtocolError(f"{where}: the sampling mask of token {int(counts.argmin())} is empty")
    held = np.logical_or.reduceat(mask.ids == np.repeat(token_ids, counts), mask.offsets[:-1])
    if not held.all():
        bad = int(np.flatnonzero(~held)[0])
        raise EngineProtocolError(
            f"{where}: the sampling mask of token {bad} ({int(counts[bad])} ids) lacks the sampled id {int(token_ids[bad])}"
        )
    _check_ids_once(mask.ids, mask.offsets, what=where, of="the sampling mask", one_each=one_each)


def _all_finite(values: np.ndarray[Any, Any]) -> bool:
    """Whether no number [N] is infinite or none. Looking for a byte costs a third of numpy's own `all`."""
    return 0 not in np.isfinite(values).tobytes()


def _check_ids_once(ids: Int32Array, offsets: Int32Array, *, what: str, of: str, one_each: bool) -> None:
    """No id is negative and no row holds one twice. Rows in rising order, as masks usually come, cost one pass."""
    if ids.size == 0:
        return
    if ids.item(ids.argmin()) < 0:
        raise EngineProtocolError(f"{what}: {of}: id {int(ids.min())} is outside [0, {INT32_MAX}]")
    if one_each:
        return
    rising = ids[1:] > ids[:-1]
    borders = offsets[1:-1] - 1
    rising[borders[(borders >= 0) & (borders < rising.size)]] = True
    if rising.all():
        return
    rows = np.repeat(np.arange(offsets.size - 1, dtype=np.int64), np.diff(offsets))
    keys = (rows << 32) | ids
    keys.sort()
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if twice.size:
        key = int(keys[twice[0]])
        raise EngineProtocolError(f"{what}: {of} of token {key >> 32} holds id {key & INT32_MAX} twice")


def is_one_each(offsets: Int32Array) -> bool:
    """Whether every row has exactly one entry, as with `logprobs: 1`."""
    size = offsets.size
    counted = _COUNTED[: size * 4] if size <= _FEW else np.arange(size, dtype=np.int32).tobytes()
    return offsets.tobytes() == counted


def check_routes(
    routes: RoutedExperts, *, prompt_tokens: int, tokens: int, start: int | None = None, where: str = "choice 0"
) -> None:
    """rows = prompt + completion - 1 - start; no row repeats an expert; not all zero."""
    array = routes.array
    if array.ndim != 3 or array.dtype.name not in ("uint8", "uint16", "int32"):
        raise EngineProtocolError(f"{where}: routed experts are {array.dtype.name}{list(array.shape)}")
    if array.shape[1] < 1 or array.shape[2] < 1:
        raise EngineProtocolError(
            f"{where}: routed experts of shape {list(array.shape)} have no layer or no expert per token"
        )
    if not 0 <= routes.start < max(prompt_tokens, 1):
        raise EngineProtocolError(
            f"{where}: routed experts start at {routes.start}, the prompt has {prompt_tokens} tokens"
        )
    if start is not None and routes.start != start:
        raise EngineProtocolError(f"{where}: routed experts start at {routes.start}, asked for {start}")
    rows = prompt_tokens + tokens - 1 - routes.start if tokens else 0
    if array.shape[0] != rows:
        raise EngineProtocolError(
            f"{where}: {array.shape[0]} routed rows, must be {rows} = prompt {prompt_tokens} + completion {tokens} - 1 - "
            f"start {routes.start}"
        )
    if array.size == 0:
        return
    if array.dtype == np.int32 and int(array.min()) < 0:
        raise EngineProtocolError(f"{where}: routed expert id {int(array.min())} is negative")
    if not array.any():
        raise EngineProtocolError(f"{where}: all {array.size} routed expert ids are zero: the capture did not run")
    repeated = _first_repeat(array)
    if repeated is not None:
        row, layer = repeated
        raise EngineProtocolError(
            f"{where}: routed row {row}, layer {layer} repeats an expert: {array[row, layer].tolist()}"
        )


def _first_repeat(array: np.ndarray[Any, Any]) -> tuple[int, int] | None:
    """(row, layer) of the first repeated expert id, in chunks that fit a cache."""
    rows, layers, top_k = array.shape
    if top_k == 1:
        return None
    chunk = max(1, _ROUTE_CHUNK_BYTES // (layers * top_k * array.itemsize))
    for at in range(0, rows, chunk):
        columns = np.ascontiguousarray(array[at : at + chunk].reshape(-1, top_k).T)
        for i in range(1, top_k):
            same = columns[:-i] == columns[i:]
            if same.any():
                flat = int(np.flatnonzero(same.any(axis=0))[0])
                return at + flat // layers, flat % layers
    return None


def _check_dtype(array: np.ndarray[Any, Any], dtype: np.dtype[Any], *, where: str, of: str) -> None:
    if array.ndim != 1 or array.dtype != dtype:
        raise EngineProtocolError(
            f"{where}: {of} are {array.dtype.name}{list(array.shape)}, not {dtype.name} in one dimension"
        )


def _check_offsets(offsets: Int32Array, *, rows: int, entries: int, where: str, of: str) -> bool:
    """Offsets of so many rows rise from 0 to the entries. Returns whether every row has exactly one."""
    if offsets.ndim != 1 or offsets.size != rows + 1:
        raise EngineProtocolError(f"{where}: {of}: {max(offsets.size - 1, 0)} rows for {rows} tokens")
    if offsets.item(0) != 0 or offsets.item(-1) != entries:
        raise EngineProtocolError(
            f"{where}: {of}: offsets run from {int(offsets[0])} to {int(offsets[-1])} over {entries} entries"
        )
    one_each = entries == rows and is_one_each(offsets)
    if rows and not one_each and int(np.diff(offsets).min()) < 0:
        raise EngineProtocolError(f"{where}: {of}: offsets fall")
    return one_each
