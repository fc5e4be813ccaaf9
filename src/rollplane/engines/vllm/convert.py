"""Our requests as vLLM's fields, and vLLM's outputs as our events. Pure; needs no vLLM.

Every choice is one vLLM request (n = 1, seed + index, as vLLM's own fan-out does), because vLLM 0.31 dies on n > 1 with
prompt_logprobs when LoRA is on, and because each choice's tokens can then be counted at a pause.

Unary requests ask for `FINAL_ONLY`. Streams ask for `CUMULATIVE`, not `DELTA`: when a reader is slow vLLM merges outputs,
and its merging of deltas loses the sampling mask. A cumulative output holds the growing lists themselves, so nothing is
copied until the new tail is cut off here. Log-probabilities come as vLLM's flat lists: one array conversion per choice.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from rollplane.admission import resolve_max_tokens, wants_mask, wants_routes
from rollplane.errors import EngineFailed, EngineProtocolError, InvalidRequest
from rollplane.protocol.arrays import Int32Array, empty_int32
from rollplane.protocol.artifacts import (
    LOGPROB_FLOOR,
    Alternatives,
    PromptLogprobs,
    RoutedExperts,
    SamplingMask,
    TokenLogprobs,
    narrow_expert_ids,
)
from rollplane.protocol.events import ChoiceEvent, FinishReason
from rollplane.protocol.info import EngineInfo, MoeShape
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.sampling import FIELD_NAMES
from rollplane.protocol.versions import PolicySpan

MIN_TEMPERATURE: Final = 0.01
"""vLLM runs a temperature between 0 and this one at this one, without an error."""

MAX_LOGPROB_TOKEN_IDS: Final = 128
TRANSFER_KEYS: Final = ("kv_transfer_params", "ec_transfer_params")
STOP_TEXT_FIELDS: Final = ("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")
"""Fields that change which text a stop string is looked for in; without stop strings no text is made."""

_PLAIN: Final[dict[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
}
"""Fields with a neutral value: what is sent where the caller sent nothing, so that no engine default creeps in."""

_WHERE_GIVEN: Final = (
    "stop_token_ids",
    "logprobs",
    "prompt_logprob_token_ids",
    "prompt_logprob_start",
    "logprob_token_ids",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "repetition_detection",
    "routed_experts_prompt_start",
    "watermarking",
)
"""Fields that are handed on where the caller gave them and left out where not."""

_FINISH: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "repetition",
}


class ChoicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer of a request needs, decided once.

    `alternatives`: how many of the most likely tokens per position, -1 for the whole vocabulary; `fixed_ids`: the
    alternatives are ids the caller named, whose ranks vLLM does not say. `routes_start`: first token whose experts are
    returned. `moe`: shape of the routes, None where none are wanted.
    """

    prompt_tokens: int
    logprobs: bool
    alternatives: int
    fixed_ids: bool
    routes: bool
    routes_start: int
    mask: bool
    moe: MoeShape | None


def plan_choices(request: GenerateRequest, info: EngineInfo) -> ChoicePlan:
    """What this request's answer needs from vLLM's outputs."""
    sampling = request.sampling
    fixed = sampling.get("logprob_token_ids")
    return ChoicePlan(
        prompt_tokens=request.prompt_tokens,
        logprobs=sampling.get("logprobs") is not None,
        alternatives=len(fixed) if fixed else int(sampling.get("logprobs", 0)),
        fixed_ids=bool(fixed),
        routes=info.capabilities.routed_experts and wants_routes(request, info),
        routes_start=int(sampling.get("routed_experts_prompt_start", 0)),
        mask=info.capabilities.sampling_mask and wants_mask(request, info),
        moe=info.moe,
    )


def served_fields(
    vllm_fields: Iterable[str], *, tokenizer: bool, seeds: bool, v2_runner: bool, reasoning: bool
) -> list[str]:
    """The sampling parameters this vLLM honours, among those the wire knows.

    Args:
        vllm_fields: names in its `SamplingParams`.
        tokenizer: it was started with one. seeds: its device takes them. v2_runner: model runner V2. reasoning: a reasoning
            parser is configured.
    """
    lacking: set[str] = set()
    if not tokenizer:
        lacking |= {"stop", "bad_words", "structured_outputs"}
    if not seeds:
        lacking.add("seed")
    if not v2_runner:
        lacking |= {"prompt_logprob_token_ids", "prompt_logprob_start"}
    if not reasoning:
        lacking.add("thinking_token_budget")
    found = set(vllm_fields)
    return [name for name in FIELD_NAMES if name in found and name not in lacking]


def check_for_vllm(request: GenerateRequest, info: EngineInfo) -> None:
    """Refuse what vLLM would change without saying, or what would end or bend its engine.

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
    """
    sampling = request.sampling
    temperature = sampling.get("temperature", 1.0)
    if 0 < temperature < MIN_TEMPERATURE:
        _refuse(
            "temperature",
            f"is {temperature!r}: vLLM would run {MIN_TEMPERATURE} instead; use 0 or >= {MIN_TEMPERATURE}",
        )
    seed = sampling.get("seed")
    if seed is not None and seed < 0 <= seed + sampling.choices:
        _refuse("seed", f"is {seed}: vLLM takes the seed -1 as none")
    if seed is not None and seed + sampling.choices > 2**63 - 1:
        _refuse("seed", f"is {seed}: too large for {sampling.choices} choices")
    fixed = sampling.get("logprob_token_ids")
    if fixed is not None:
        _check_fixed(fixed, sampling.get("logprobs"))
    watermarking = sampling.get("watermarking")
    if watermarking is not None and not isinstance(watermarking, bool):
        _refuse("watermarking", f"must be a boolean, got {type(watermarking).__name__}")
    for name in TRANSFER_KEYS:
        if name in sampling.get("extra_args", {}):
            raise InvalidRequest(
                f"sampling_params.extra_args.{name} is set by the top-level {name}",
                param=f"sampling_params.extra_args.{name}",
            )
    for i, item in enumerate(request.features or ()):
        if item.kwargs is None:
            raise InvalidRequest(
                f"features item {i} ({item.modality}) has no kwargs_data, and this engine resolves none from a cache",
                param="features.kwargs_data",
            )


def check_transfer(request: GenerateRequest, *, kinds: frozenset[str]) -> None:
    """Refuse transfer parameters that no connector of this engine would read.

    Args:
        kinds: those of `TRANSFER_KEYS` that one reads.

    Raises:
        InvalidRequest: naming the field and vLLM's argument.
    """
    for name in TRANSFER_KEYS:
        if getattr(request, name) is not None and name not in kinds:
            flag = f"--{name.removesuffix('_params').replace('_', '-')}-config"
            raise InvalidRequest(f"{name} is read by nobody here: vLLM was started without {flag}", param=name)


def _check_fixed(ids: list[int], logprobs: int | None) -> None:
    if not 1 <= len(ids) <= MAX_LOGPROB_TOKEN_IDS:
        _refuse("logprob_token_ids", f"has {len(ids)} entries, must have 1 to {MAX_LOGPROB_TOKEN_IDS}")
    if len(set(ids)) != len(ids):
        _refuse("logprob_token_ids", "names a token twice")
    if logprobs is None:
        _refuse("logprob_token_ids", "needs logprobs, which says that log-probabilities are returned")
    if logprobs != len(ids):
        _refuse("logprobs", f"is {logprobs} beside {len(ids)} logprob_token_ids; vLLM needs both alike")


def sampling_fields(request: GenerateRequest, info: EngineInfo, *, index: int = 0, vocab_tokens: int) -> dict[str, Any]:
    """The fields of vLLM's `SamplingParams` for choice `index`; `versions.make_sampling_params` makes the record.

    Args:
        vocab_tokens: the model's vocabulary, which stands for "no top-k" where vLLM demands one.

    Only choice 0 scores the prompt: it is the same prompt for all.
    """
    sampling = request.sampling
    fields: dict[str, Any] = {name: sampling.get(name, neutral) for name, neutral in _PLAIN.items()}
    for name in _WHERE_GIVEN:
        value = sampling.get(name)
        if value is not None:
            fields[name] = value
    if index == 0 and sampling.get("prompt_logprobs") is not None:
        fields["prompt_logprobs"] = sampling.get("prompt_logprobs")
    if index > 0:
        fields.pop("prompt_logprob_token_ids", None)
        fields.pop("prompt_logprob_start", None)
    if (seed := sampling.get("seed")) is not None:
        fields["seed"] = seed + index
    fields["n"] = 1
    fields["top_k"] = sampling.top_k_limit or (vocab_tokens if info.capabilities.mask_needs_truncation else 0)
    fields["max_tokens"] = resolve_max_tokens(request, info)
    if stop := sampling.stop_strings:
        fields["stop"] = stop
        for name in STOP_TEXT_FIELDS:
            if (value := sampling.get(name)) is not None:
                fields[name] = value
    fields["detokenize"] = bool(stop)
    extra = dict(sampling.get("extra_args", {}))
    for name in TRANSFER_KEYS:
        if (params := getattr(request, name)) is not None:
            extra[name] = params
    if extra:
        fields["extra_args"] = extra
    fields["output_kind"] = "CUMULATIVE" if request.stream else "FINAL_ONLY"
    fields["flat_logprobs"] = True
    fields["skip_clone"] = True  # the record is made for this request alone
    return fields


# Outputs -------------------------------------------------------------------------------------------------------------


def read_delta(output: Any, plan: ChoicePlan, *, index: int, sent: int) -> tuple[ChoiceEvent | None, int]:
    """The tokens of a choice past the `sent` ones, and how many alternatives were floored; None where nothing is new."""
    if len(output.token_ids) <= sent:
        return None, 0
    ids, logprobs, floored = _read_tokens(output, plan, sent=sent)
    return ChoiceEvent(index=index, token_ids=ids, logprobs=logprobs), floored


def read_ending(
    output: Any, plan: ChoicePlan, *, index: int, sent: int, spans: list[PolicySpan]
) -> tuple[ChoiceEvent, int]:
    """The terminal event of a choice: its tokens past the `sent` ones, and what covers the whole of it.

    Raises:
        EngineFailed: vLLM gave up on this request.
        EngineProtocolError: a finish reason or side payload that breaks the contract.
    """
    ids, logprobs, floored = _read_tokens(output, plan, sent=sent)
    finish = finish_reason(output)
    reason = output.stop_reason if finish == "stop" else None
    return (
        ChoiceEvent(
            index=index,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=finish,
            stop_reason=reason,
            routed_experts=read_routes(output, plan, tokens=len(output.token_ids)) if plan.routes else None,
            sampling_mask=read_mask(output.sampling_mask) if plan.mask else None,
            policy_versions=spans,
        ),
        floored,
    )


def finish_reason(output: Any) -> FinishReason:
    """Why a finished choice ended.

    Raises:
        EngineFailed: vLLM reports an error. EngineProtocolError: a reason nobody knows.
    """
    said = output.finish_reason
    if said == "error":
        raise EngineFailed("vLLM ended the request with an error; its log says which")
    if said not in _FINISH:
        raise EngineProtocolError(f"choice {output.index} has the finish reason {said!r}")
    return _FINISH[said]


def empty_ending(plan: ChoicePlan, *, index: int, spans: list[PolicySpan]) -> ChoiceEvent:
    """The terminal event of a choice that was aborted before vLLM had it."""
    return ChoiceEvent(
        index=index,
        token_ids=empty_int32(),
        logprobs=TokenLogprobs(values=np.empty(0, dtype=np.float32)) if plan.logprobs else None,
        finish_reason="abort",
        routed_experts=_no_routes(plan) if plan.routes else None,
        sampling_mask=SamplingMask(ids=empty_int32(), offsets=np.zeros(1, dtype=np.int32)) if plan.mask else None,
        policy_versions=spans,
    )


def _read_tokens(output: Any, plan: ChoicePlan, *, sent: int) -> tuple[Int32Array, TokenLogprobs | None, int]:
    tokens = output.token_ids[sent:] if sent else output.token_ids
    ids = np.array(tokens, dtype=np.int32)
    if not plan.logprobs:
        return ids, None, 0
    if output.logprobs is None:
        raise EngineProtocolError(f"choice {output.index}: logprobs were asked for and vLLM returned none")
    logprobs, floored = read_logprobs(output.logprobs, plan, sent=sent)
    return ids, logprobs, floored


def read_logprobs(logprobs: Any, plan: ChoicePlan, *, sent: int = 0) -> tuple[TokenLogprobs, int]:
    """The log-probabilities of the tokens past the `sent` ones, and how many alternatives were floored."""
    flat = _flatten(logprobs, sent)
    rows = flat.widths.size
    if rows == 0:
        return TokenLogprobs(values=np.empty(0, dtype=np.float32)), 0
    if int(flat.widths.min()) < 1:
        raise EngineProtocolError(f"vLLM returned no logprob for token {sent + int(flat.widths.argmin())}")
    first = np.cumsum(flat.widths) - flat.widths
    values, ranks = flat.values[first], flat.ranks[first]
    if plan.alternatives == 0:
        return TokenLogprobs(values=values, ranks=ranks), 0
    alternatives, floored = _alternatives(flat, first, plan)
    return TokenLogprobs(values=values, ranks=ranks, alternatives=alternatives), floored


class _Flat(msgspec.Struct):
    """Logprobs of some positions end to end: the position's own token first, then others. `widths` per position."""

    ids: Int32Array
    values: Any
    ranks: Int32Array
    widths: Any


def _flatten(logprobs: Any, sent: int) -> _Flat:
    """The positions past the `sent` ones of vLLM's `FlatLogprobs` as arrays."""
    starts = np.array(logprobs.start_indices[sent:], dtype=np.int64)
    ends = np.array(logprobs.end_indices[sent:], dtype=np.int64)
    at = int(starts[0]) if starts.size else 0
    end = int(ends[-1]) if ends.size else 0
    return _Flat(
        ids=np.array(logprobs.token_ids[at:end], dtype=np.int32),
        values=np.array(logprobs.logprobs[at:end], dtype=np.float32),
        ranks=_ranks(logprobs.ranks[at:end]),
        widths=ends - starts,
    )


def _ranks(ranks: Sequence[int | None]) -> Int32Array:
    """int32, 0 where vLLM does not say."""
    try:
        return np.array(ranks, dtype=np.int32)
    except TypeError:
        return np.array([rank or 0 for rank in ranks], dtype=np.int32)


def _alternatives(flat: _Flat, first: Any, plan: ChoicePlan) -> tuple[Alternatives, int]:
    """The most likely tokens per position in the order of their ranks, or the ids the caller named.

    vLLM puts the sampled token in front of them whether it is among them or not.
    """
    kept = np.ones(flat.ids.size, dtype=np.bool_)
    kept[first] = False
    values = flat.values[kept]
    ranks = np.zeros(values.size, dtype=np.int32) if plan.fixed_ids else flat.ranks[kept]
    floored = _floor(values)
    return Alternatives(ids=flat.ids[kept], values=values, ranks=ranks, offsets=_offsets(flat.widths - 1)), floored


def read_prompt_logprobs(logprobs: Any, *, prompt_tokens: int) -> tuple[PromptLogprobs, int]:
    """The prompt's log-probabilities, its own token first in each row, and how many were floored.

    Raises:
        EngineProtocolError: not one row per prompt token.
    """
    flat = _flatten(logprobs, 0)
    if flat.widths.size != prompt_tokens:
        raise EngineProtocolError(f"vLLM returned {flat.widths.size} prompt logprobs for {prompt_tokens} prompt tokens")
    counts = flat.widths
    if flat.ids.size:
        rows = np.repeat(np.arange(counts.size), counts)
        first = np.cumsum(counts) - counts
        kept = flat.ids != np.repeat(flat.ids[np.minimum(first, flat.ids.size - 1)], counts)
        kept[first[counts > 0]] = True
        flat.ids, flat.values, flat.ranks = flat.ids[kept], flat.values[kept], flat.ranks[kept]
        counts = np.bincount(rows[kept], minlength=counts.size)
    floored = _floor(flat.values)
    return PromptLogprobs(ids=flat.ids, values=flat.values, ranks=flat.ranks, offsets=_offsets(counts)), floored


def read_fixed_scores(scores: np.ndarray[Any, Any] | None) -> list[list[float]] | None:
    """`prompt_logprob_token_ids`' scores [rows, ids] as JSON can say them."""
    if scores is None:
        return None
    found: list[list[float]] = np.where(np.isfinite(scores), scores, LOGPROB_FLOOR).astype(np.float64).tolist()
    return found


def _offsets(counts: Any) -> Int32Array:
    offsets = np.zeros(counts.size + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _floor(values: np.ndarray[Any, Any]) -> int:
    """Put the documented floor in place of what is not finite; how many there were."""
    bad = ~np.isfinite(values)
    count = int(np.count_nonzero(bad))
    if count:
        values[bad] = LOGPROB_FLOOR
    return count


def read_routes(output: Any, plan: ChoicePlan, *, tokens: int) -> RoutedExperts | None:
    """The experts of a finished choice, narrow and with the start that was asked for.

    None where vLLM returned none although there are tokens: the fold refuses such an answer where routes were wanted.

    Raises:
        EngineProtocolError: not [rows, layers, top_k], or an id outside the model's experts.
    """
    if tokens == 0:
        return _no_routes(plan)
    array = output.routed_experts
    if array is None:
        return None
    array = np.asarray(array)
    if array.ndim != 3 or array.dtype.kind not in "ui":
        raise EngineProtocolError(f"vLLM returned routed experts of {array.dtype.name}{list(array.shape)}")
    try:
        narrow = np.ascontiguousarray(array) if array.dtype == np.uint8 else narrow_expert_ids(array)
    except ValueError as error:
        raise EngineProtocolError(f"vLLM returned routed experts of which {error}") from None
    if plan.moe is not None and narrow.size and int(narrow.max()) >= plan.moe.num_experts:
        raise EngineProtocolError(
            f"vLLM returned expert {int(narrow.max())} of a model of {plan.moe.num_experts} experts"
        )
    return RoutedExperts(array=narrow, start=plan.routes_start)


def _no_routes(plan: ChoicePlan) -> RoutedExperts:
    layers, top_k = (plan.moe.layers, plan.moe.top_k) if plan.moe is not None else (1, 1)
    return RoutedExperts(array=np.empty((0, layers, top_k), dtype=np.uint8), start=plan.routes_start)


def read_mask(mask: Any) -> SamplingMask | None:
    """vLLM's list of ids per token as CSR; None where vLLM returned none and there may be tokens."""
    if mask is None:
        return None
    rows = mask.token_ids
    offsets = _offsets(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
    ids = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return SamplingMask(ids=ids, offsets=offsets)


def read_timings(stats: Any) -> dict[str, Any] | None:
    """vLLM's times of one request in seconds, and how often it was preempted; what it did not measure is left out."""
    if stats is None:
        return None
    found: dict[str, Any] = {"preemptions": int(getattr(stats, "num_preemptions", 0))}
    marks = {
        name: float(getattr(stats, name, 0.0))
        for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    }
    for name, begin, end in (
        ("queue_s", "queued_ts", "scheduled_ts"),
        ("prefill_s", "scheduled_ts", "first_token_ts"),
        ("decode_s", "first_token_ts", "last_token_ts"),
    ):
        if marks[begin] > 0 and marks[end] > 0 and math.isfinite(marks[end] - marks[begin]):
            found[name] = marks[end] - marks[begin]
    return found


def _refuse(name: str, says: str) -> None:
    raise InvalidRequest(f"sampling_params.{name} {says}", param=f"sampling_params.{name}")
