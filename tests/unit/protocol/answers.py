"""Random valid answers for tests of the core, and their contract written out naively, one Python loop per rule."""

import itertools
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rollplane.protocol.artifacts import Alternatives, PromptLogprobs, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import ServedBy
from rollplane.protocol.response import Choice, GenerateResponse, Usage

FINISH_REASONS = ("stop", "length", "abort", "repetition")

logprob_values = st.floats(-9999.0, 0.0, width=32)
token_ids = st.integers(0, 151_000)


def int32(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def float32(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def offsets_of(rows: list[list[Any]]) -> np.ndarray:
    return int32(np.cumsum([0, *map(len, rows)]))


@st.composite
def alternatives(draw: Any, rows: int) -> Alternatives:
    width = draw(st.none() | st.integers(0, 3))
    low, high = (0, 3) if width is None else (width, width)
    ids = [draw(st.lists(token_ids, min_size=low, max_size=high, unique=True)) for _ in range(rows)]
    count = sum(map(len, ids))
    return Alternatives(
        ids=int32([x for row in ids for x in row]),
        values=float32(draw(st.lists(logprob_values, min_size=count, max_size=count))),
        ranks=int32(draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))),
        offsets=offsets_of(ids),
    )


@st.composite
def token_logprobs(draw: Any, tokens: int, *, ranks: bool, top: bool) -> TokenLogprobs:
    return TokenLogprobs(
        values=float32(draw(st.lists(logprob_values, min_size=tokens, max_size=tokens))),
        ranks=int32(draw(st.lists(st.integers(1, 1000), min_size=tokens, max_size=tokens))) if ranks else None,
        alternatives=draw(alternatives(tokens)) if top else None,
    )


@st.composite
def masks(draw: Any, sampled: np.ndarray) -> SamplingMask:
    rows = []
    for token in sampled.tolist():
        row = [token, *draw(st.lists(token_ids.filter(lambda x, t=token: x != t), max_size=3, unique=True))]
        rows.append(draw(st.permutations(row)))
    return SamplingMask(ids=int32([x for row in rows for x in row]), offsets=offsets_of(rows))


@st.composite
def routes(draw: Any, *, prompt: int, tokens: int, start: int, layers: int, top_k: int) -> RoutedExperts:
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.int32]))
    rows = prompt + tokens - 1 - start if tokens else 0
    seed = draw(st.integers(0, 2**31))
    keys = np.random.default_rng(seed).random((rows, layers, top_k + 5))
    array = np.argsort(keys, axis=2)[:, :, :top_k].astype(dtype)
    if array.size and not array.any():
        array[0, 0, 0] = 1
    return RoutedExperts(array=array, start=start)


@st.composite
def prompt_logprobs(draw: Any, prompt: np.ndarray) -> PromptLogprobs:
    rows = [[]]
    for token in prompt.tolist()[1:]:
        rows.append([token, *draw(st.lists(token_ids.filter(lambda x, t=token: x != t), max_size=2, unique=True))])
    count = sum(map(len, rows))
    return PromptLogprobs(
        ids=int32([x for row in rows for x in row]),
        values=float32(draw(st.lists(logprob_values, min_size=count, max_size=count))),
        ranks=int32(draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))),
        offsets=offsets_of(rows),
    )


@st.composite
def responses(draw: Any, *, max_choices: int = 3, max_tokens: int = 6) -> GenerateResponse:
    """A whole answer that keeps the contract, with any of its parts there or not."""
    prompt = int32(draw(st.lists(token_ids, min_size=1, max_size=5)))
    with_logprobs, with_ranks, with_top, with_mask, with_routes = (draw(st.booleans()) for _ in range(5))
    start = draw(st.integers(0, prompt.size - 1))
    layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    choices = []
    for index in range(draw(st.integers(1, max_choices))):
        ids = int32(draw(st.lists(token_ids, max_size=max_tokens)))
        tokens = int(ids.size)
        spans = [("v1", 0), ("v2", draw(st.none() | st.integers(1, tokens - 1)))] if tokens > 1 else [("v1", 0)]
        choices.append(
            Choice(
                index=index,
                token_ids=ids,
                finish_reason=draw(st.sampled_from(FINISH_REASONS)),
                logprobs=draw(token_logprobs(tokens, ranks=with_ranks, top=with_top)) if with_logprobs else None,
                stop_reason=draw(st.none() | token_ids | st.sampled_from(["###", 'quote"and\\slash', "é\u2028"])),
                routed_experts=draw(routes(prompt=prompt.size, tokens=tokens, start=start, layers=layers, top_k=top_k))
                if with_routes
                else None,
                sampling_mask=draw(masks(ids)) if with_mask else None,
                policy_versions=spans,
            )
        )
    return GenerateResponse(
        request_id=draw(st.sampled_from(["r1", 'a"b', "ü"])),
        model="m",
        created=1,
        choices=choices,
        usage=Usage(
            prompt_tokens=int(prompt.size),
            completion_tokens=sum(int(c.token_ids.size) for c in choices),
            cached_tokens=draw(st.none() | st.integers(0, prompt.size)),
        ),
        prompt_logprobs=draw(prompt_logprobs(prompt)) if draw(st.booleans()) else None,
        prompt_token_ids=prompt if draw(st.booleans()) else None,
        kv_transfer_params=draw(st.none() | st.just({"blocks": [1, 2], "host": "h"})),
        metrics=draw(st.none() | st.just({"ttft_s": 0.25})),
        served_by=ServedBy(
            worker="w", attempt=draw(st.integers(1, 3)), warnings=draw(st.lists(st.just("a warning"), max_size=1))
        ),
    )


def broken_rule(response: GenerateResponse, *, choices: int, logprobs: bool, start: int | None = None) -> str | None:
    """The first rule of the response contract that the answer breaks, or None. Slow, plain, and written apart from src."""
    if sorted(c.index for c in response.choices) != list(range(choices)):
        return "indices"
    if sum(len(c.token_ids) for c in response.choices) != response.usage.completion_tokens:
        return "usage"
    if len({c.routed_experts is None for c in response.choices}) > 1:
        return "routes of some"
    prompt = response.usage.prompt_tokens
    ids = None if response.prompt_token_ids is None else response.prompt_token_ids.tolist()
    if ids is not None and (len(ids) != prompt or min(ids) < 0):
        return "prompt ids"
    if response.prompt_logprobs is not None:
        part = response.prompt_logprobs
        rows = _rows(part.offsets, part.ids, rows=prompt)
        if rows is None or _bad_alternatives(part) or rows[0] or not all(rows[1:]):
            return "prompt logprobs"
        if any(len(set(row)) < len(row) or min(row, default=0) < 0 for row in rows):
            return "prompt logprobs"
        if ids is not None and any(row[0] != token for row, token in zip(rows[1:], ids[1:], strict=True)):
            return "own token first"
    for choice in response.choices:
        if rule := _broken_choice(choice, prompt=prompt, logprobs=logprobs, start=start):
            return rule
    return None


def _broken_choice(choice: Choice, *, prompt: int, logprobs: bool, start: int | None) -> str | None:
    sampled = choice.token_ids.tolist()
    tokens = len(sampled)
    if choice.finish_reason not in FINISH_REASONS or any(token < 0 for token in sampled):
        return "finish reason or ids"
    if logprobs and choice.logprobs is None:
        return "logprobs missing"
    if choice.logprobs is not None:
        values = choice.logprobs.values.tolist()
        if len(values) != tokens or not all(map(math.isfinite, values)):
            return "logprobs"
        if choice.logprobs.ranks is not None and len(choice.logprobs.ranks) != tokens:
            return "ranks"
        top = choice.logprobs.alternatives
        if top is not None:
            rows = _rows(top.offsets, top.ids, rows=tokens)
            if rows is None or _bad_alternatives(top):
                return "alternatives"
            if any(len(set(row)) < len(row) or min(row, default=0) < 0 for row in rows):
                return "alternatives"
    if choice.sampling_mask is not None:
        rows = _rows(choice.sampling_mask.offsets, choice.sampling_mask.ids, rows=tokens)
        if rows is None:
            return "mask offsets"
        for row, token in zip(rows, sampled, strict=True):
            if token not in row or len(set(row)) < len(row) or min(row) < 0:
                return "mask"
    if choice.routed_experts is not None:
        array, first = choice.routed_experts.array, choice.routed_experts.start
        if start is not None and first != start:
            return "start"
        if array.ndim != 3 or not 0 <= first < prompt:
            return "routes"
        if len(array) != (prompt + tokens - 1 - first if tokens else 0):
            return "rows"
        cells = [cell for row in array.tolist() for cell in row]
        if any(len(set(cell)) < len(cell) or min(cell) < 0 for cell in cells):
            return "repeated expert"
        if cells and not any(x for cell in cells for x in cell):
            return "all zero"
    last = -1
    for i, (version, first) in enumerate(choice.policy_versions):
        if i == 0 and first != 0:
            return "spans"
        if i and version == choice.policy_versions[i - 1][0]:
            return "spans"
        if first is not None:
            if first <= last or first >= max(tokens, 1):
                return "spans"
            last = first
    return None


def _rows(offsets: np.ndarray, flat: np.ndarray, *, rows: int) -> list[list[int]] | None:
    at = offsets.tolist()
    if len(at) != rows + 1 or at[0] != 0 or at[-1] != len(flat) or any(b < a for a, b in itertools.pairwise(at)):
        return None
    return [flat.tolist()[a:b] for a, b in itertools.pairwise(at)]


def _bad_alternatives(part: Any) -> bool:
    return not len(part.ids) == len(part.values) == len(part.ranks) or not all(map(math.isfinite, part.values.tolist()))
