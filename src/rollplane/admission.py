"""What must hold before a request reaches an engine: the request against the engine's own limits and abilities.

Pure: called by the frontend with what a fleet publishes and by every engine with its own facts, so that a bad request
gets the same answer everywhere and never reaches a model.
"""

from typing import Any, Final

import numpy as np

from rollplane.errors import ContextOverflow, InvalidRequest
from rollplane.protocol.arrays import INT32_MAX
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.sampling import ID_FIELDS
from rollplane.protocol.token_ids import check_token_ids, largest_id

_ALWAYS_FINE: Final = frozenset(
    {
        # No effect on a token-in/token-out route whatever their value, on any engine.
        "detokenize",
        "flat_logprobs",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
        # Neutral or checked here.
        "n",
        "max_tokens",
        "stop",
        "logprobs",
        "prompt_logprobs",
        "routed_experts_prompt_start",
    }
)
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_p": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "temperature": (1.0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_reading_prefix_cache": (False,),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "extra_args": ({},),
    "logit_bias": ({},),
}
_ID_FIELDS: Final = frozenset(ID_FIELDS)


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Refuse what this engine cannot serve exactly as asked.

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
        ContextOverflow: the prompt leaves no room for one token.
    """
    given = request.sampling.given()
    _check_prompt(request, info)
    _check_fields(request, given, info)
    _check_counts(request, given, info)
    if not _ID_FIELDS.isdisjoint(given):
        _check_ids(given, info)
    _check_side_channels(request, given, info)
    if request.features or request.content_parts:
        _check_media(request, info)


def resolve_max_tokens(request: GenerateRequest, info: EngineInfo, *, cap: int | None = None) -> int:
    """How many tokens a choice may have: the caller's limit, the server's cap and the room left in the context.

    Omitted is never a dataclass default: it is the rest of the context (or the cap).
    """
    room = info.max_model_len - request.prompt_tokens
    if cap is not None:
        room = min(room, cap)
    return min(int(request.sampling.get("max_tokens", room)), room)


def wants_routes(request: GenerateRequest, info: EngineInfo) -> bool:
    """Whether the answer carries routed experts: asked for, or given by default where the engine has them."""
    if request.options.routed_experts is not None:
        return request.options.routed_experts
    return info.capabilities.routed_experts and not request.scores_only


def wants_mask(request: GenerateRequest, info: EngineInfo) -> bool:
    """Whether the answer carries sampling masks: asked for, or given by default where the engine has them.

    By default only where they say something: the support is truncated, restricted to allowed ids, or one token (greedy).
    A mask of the whole vocabulary for every token is made only for those who ask.
    """
    if request.options.sampling_mask is not None:
        return request.options.sampling_mask
    params = request.sampling
    restricted = params.truncates or params.get("temperature", 1.0) == 0 or params.get("allowed_token_ids") is not None
    return info.capabilities.sampling_mask and restricted and not request.scores_only


def effective_sampling(request: GenerateRequest, info: EngineInfo, *, cap: int | None = None) -> dict[str, Any]:
    """The parameters that were applied, neutral defaults filled in (no `generation_config.json` here).

    `cap`: the server's limit on `max_tokens`, where it has one.
    """
    given = request.sampling.given()
    defaults: dict[str, Any] = {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
    }
    return {
        **defaults,
        **given,
        "top_k": request.sampling.top_k_limit,
        "max_tokens": resolve_max_tokens(request, info, cap=cap),
    }


def request_warnings(request: GenerateRequest, info: EngineInfo) -> list[str]:
    """What a trainer should know about this answer; each names the setting that would mend it."""
    found = []
    if (
        request.sampling.truncates
        and request.sampling.get("temperature", 1.0) > 0
        and request.sampling.get("logprobs") is not None
        and not wants_mask(request, info)
    ):
        found.append(
            "the support is truncated (top_k, top_p or min_p) and no sampling mask is returned: "
            "the trainer cannot renormalise; set rollplane.sampling_mask where the engine has it"
        )
    return found


def _check_prompt(request: GenerateRequest, info: EngineInfo) -> None:
    ids = request.token_ids
    tokens = ids.size
    if ids.ndim != 1 or not tokens or (high := largest_id(ids)) > INT32_MAX:
        check_token_ids(ids)
    elif high >= info.vocab_bound:
        bad = int(np.flatnonzero(ids >= info.vocab_bound)[0])
        raise InvalidRequest(
            f"token_ids[{bad}] is {int(request.token_ids[bad])}, outside the vocabulary [0, {info.vocab_bound})",
            param=f"token_ids[{bad}]",
        )
    if tokens >= info.max_model_len:
        raise ContextOverflow(
            f"the prompt has {tokens} tokens, but this model's maximum context length is {info.max_model_len} tokens "
            "(prompt and at least one generated token)",
            param="token_ids",
        )


def _check_fields(request: GenerateRequest, given: dict[str, Any], info: EngineInfo) -> None:
    capable = info.capabilities
    honoured = capable.sampling_fields
    for name, value in given.items():
        if name not in _ALWAYS_FINE and name not in honoured and value not in _NEUTRAL.get(name, ()):
            raise InvalidRequest(
                f"sampling_params.{name} is not available on the {info.engine} engine", param=f"sampling_params.{name}"
            )
    if "stop" in given and request.sampling.stop_strings and not capable.stop_strings:
        raise InvalidRequest(
            f"sampling_params.stop needs a tokenizer, which the {info.engine} engine runs without; "
            "use stop_token_ids instead",
            param="sampling_params.stop",
        )
    for name in request.extra:
        if name not in capable.extra_fields:
            raise InvalidRequest(f"{name} is not a field the {info.engine} engine can take", param=name)
    if request.priority and not capable.priority:
        raise InvalidRequest(
            f"priority is {request.priority}, but the {info.engine} engine does not schedule by priority",
            param="priority",
        )
    for name in () if capable.transfer_params else ("kv_transfer_params", "ec_transfer_params"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} is not available on the {info.engine} engine", param=name)
    rank = request.data_parallel_rank
    if rank is not None and rank >= capable.data_parallel_size:
        raise InvalidRequest(
            f"header X-data-parallel-rank is {rank}, the engine has {capable.data_parallel_size} rank(s)",
            param="X-data-parallel-rank",
        )


def _check_counts(request: GenerateRequest, given: dict[str, Any], info: EngineInfo) -> None:
    choices = given.get("n", 1)
    if choices > info.max_num_seqs:
        _refuse("n", f"is {choices}, the engine runs at most {info.max_num_seqs} sequences at once")
    if choices > 1 and given.get("temperature", 1.0) == 0:
        _refuse("n", f"is {choices} with temperature 0: all choices would be the same; use n = 1")
    for name in ("logprobs", "prompt_logprobs"):
        count = given.get(name)
        if count is not None and (count > info.max_logprobs or (count == -1 and info.vocab_bound > info.max_logprobs)):
            asked = f"{count}" if count >= 0 else f"-1 (the whole vocabulary of {info.vocab_bound})"
            _refuse(name, f"is {asked}, the limit is {info.max_logprobs}")
    if "prompt_logprobs" in given and not info.capabilities.prompt_logprobs:
        _refuse("prompt_logprobs", f"is not available on the {info.engine} engine")
    room = info.max_model_len - request.prompt_tokens
    if given.get("min_tokens", 0) > room:
        _refuse("min_tokens", f"is {given.get('min_tokens')}, only {room} tokens fit after the prompt")
    start = given.get("routed_experts_prompt_start")
    if start is not None and start >= request.prompt_tokens:
        _refuse(
            "routed_experts_prompt_start",
            f"is {start}, must be below the prompt length of {request.prompt_tokens} tokens",
        )


def _check_ids(given: dict[str, Any], info: EngineInfo) -> None:
    widths = {
        "stop_token_ids": info.max_stop_token_ids,
        "allowed_token_ids": info.max_allowed_token_ids,
        "logit_bias": info.max_logit_bias,
        "logprob_token_ids": info.max_logprobs,
        "prompt_logprob_token_ids": info.max_logprobs,
    }
    for name, width in widths.items():
        values = given.get(name)
        if not values:
            continue
        if width is not None and len(values) > width:
            _refuse(name, f"has {len(values)} entries, the limit is {width}")
        low, high = min(values), max(values)
        if low < 0 or high >= info.vocab_bound:
            bad = low if low < 0 else high
            _refuse(name, f"holds {bad}, outside the vocabulary [0, {info.vocab_bound})")


def _check_side_channels(request: GenerateRequest, given: dict[str, Any], info: EngineInfo) -> None:
    caps = info.capabilities
    if request.options.routed_experts and not caps.routed_experts:
        why = "the model has no MoE layers" if info.moe is None else "it was started without route capture"
        raise InvalidRequest(
            f"rollplane.routed_experts is true, but this {info.engine} engine returns no routed experts: {why}",
            param="rollplane.routed_experts",
        )
    if request.options.sampling_mask and not caps.sampling_mask:
        raise InvalidRequest(
            f"rollplane.sampling_mask is true, but this {info.engine} engine returns no sampling masks",
            param="rollplane.sampling_mask",
        )
    if caps.mask_needs_truncation and not request.sampling.truncates:
        raise InvalidRequest(
            "this engine was started with sampling masks: a request without top_k, top_p or min_p would need a mask of "
            "the whole vocabulary",
            param="sampling_params",
        )
    if caps.mask_needs_truncation and given.get("temperature", 1.0) == 0:
        _refuse("temperature", "is 0, which an engine started with sampling masks refuses")


def _check_media(request: GenerateRequest, info: EngineInfo) -> None:
    for item in request.features or ():
        if item.modality not in info.capabilities.features:
            raise InvalidRequest(
                f"features.mm_hashes.{item.modality}: the {info.engine} engine takes no {item.modality} features here",
                param=f"features.mm_hashes.{item.modality}",
            )
    for i, part in enumerate(request.content_parts or ()):
        modality = part.type.removesuffix("_url")
        if modality not in info.capabilities.raw_media:
            raise InvalidRequest(
                f"content_parts[{i}]: the {info.engine} engine processes no raw {modality} here; send features",
                param=f"content_parts[{i}]",
            )


def _refuse(name: str, says: str) -> None:
    raise InvalidRequest(f"sampling_params.{name} {says}", param=f"sampling_params.{name}")
