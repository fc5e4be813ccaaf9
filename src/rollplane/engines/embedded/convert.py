"""Requests as the wire has them -> what the step loop takes. Pure."""

from typing import Final

from rollplane.admission import resolve_max_tokens, wants_mask, wants_routes
from rollplane.engines.embedded.sampler import Controls
from rollplane.engines.embedded.sequence import Generation
from rollplane.errors import InvalidRequest
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.request import GenerateRequest

SAMPLING_FIELDS: Final = [
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "skip_special_tokens",
    "skip_reading_prefix_cache",
    "routed_experts_prompt_start",
]
"""Sampling parameters that the embedded engine honours."""

LEAST_TEMPERATURE: Final = 1e-5
"""Below this, logits divided by the temperature leave float32's range; 0 is greedy."""

MAX_MASK_BYTES: Final = 256 * 2**20
"""Largest sampling mask of one choice whose support is the whole vocabulary, 4 bytes per id."""


def to_generation(
    request: GenerateRequest, info: EngineInfo, *, key: str, seed: int | None, eos_token_ids: frozenset[int]
) -> Generation:
    """The step loop's request, every default resolved.

    Args:
        request: passed `admission.check_request`.
        info: this engine's facts.
        key: the step loop's own name for it, unique among live requests.
        seed: used if the request brings none.
        eos_token_ids: the model's end-of-sequence ids.

    Raises:
        InvalidRequest: what only this engine refuses, by name.
    """
    params = request.sampling
    temperature = float(params.get("temperature", 1.0))
    if 0 < temperature < LEAST_TEMPERATURE:
        _refuse("temperature", f"is {temperature!r}; use 0 for greedy or at least {LEAST_TEMPERATURE}")
    logprobs, token_ids = params.get("logprobs"), tuple(params.get("logprob_token_ids", ()))
    if token_ids and logprobs is None:
        _refuse("logprob_token_ids", "needs logprobs to be asked for (0 gives only these ids)")
    if token_ids and logprobs:
        _refuse("logprob_token_ids", f"names the alternatives, so logprobs must be 0, not {logprobs}")
    max_tokens = resolve_max_tokens(request, info)
    _check_allowed(request, eos_token_ids)
    mask = wants_mask(request, info)
    if mask:
        _check_mask_size(request, info, max_tokens=max_tokens, temperature=temperature)
    return Generation(
        request_id=key,
        prompt=request.token_ids,
        max_tokens=max_tokens,
        controls=Controls(
            temperature=temperature,
            top_k=params.top_k_limit,
            top_p=float(params.get("top_p", 1.0)),
            min_p=float(params.get("min_p", 0.0)),
        ),
        n=params.choices,
        seed=params.get("seed", seed),
        min_tokens=int(params.get("min_tokens", 0)),
        ignore_eos=bool(params.get("ignore_eos", False)),
        stop_token_ids=frozenset(params.get("stop_token_ids", ())),
        stop=tuple(params.stop_strings),
        skip_special_tokens=bool(params.get("skip_special_tokens", True)),
        repetition_penalty=float(params.get("repetition_penalty", 1.0)),
        presence_penalty=float(params.get("presence_penalty", 0.0)),
        frequency_penalty=float(params.get("frequency_penalty", 0.0)),
        logit_bias=tuple(params.get("logit_bias", {}).items()),
        allowed_token_ids=_tuple_or_none(params.get("allowed_token_ids")),
        logprobs=info.vocab_bound if logprobs == -1 else logprobs,
        logprob_token_ids=token_ids,
        prompt_logprobs=info.vocab_bound if params.get("prompt_logprobs") == -1 else params.get("prompt_logprobs"),
        sampling_mask=mask,
        routed_experts=wants_routes(request, info),
        routes_start=int(params.get("routed_experts_prompt_start", 0)),
        adapter=request.adapter,
        priority=request.priority,
        stream=request.stream,
    )


def _check_allowed(request: GenerateRequest, eos_token_ids: frozenset[int]) -> None:
    """Some id must stay possible while ending ids are held back."""
    params = request.sampling
    allowed = params.get("allowed_token_ids")
    if allowed is None or not params.get("min_tokens", 0):
        return
    ending = set(params.get("stop_token_ids", ()))
    if not params.get("ignore_eos", False):
        ending |= eos_token_ids
    if set(allowed) <= ending:
        _refuse("allowed_token_ids", "holds only ids that end the sequence, which min_tokens holds back")


def _check_mask_size(request: GenerateRequest, info: EngineInfo, *, max_tokens: int, temperature: float) -> None:
    """A support that nothing narrows is the whole vocabulary, per token."""
    params = request.sampling
    if params.truncates or temperature == 0 or params.get("allowed_token_ids") is not None:
        return
    size = 4 * max_tokens * info.vocab_bound
    if size > MAX_MASK_BYTES:
        raise InvalidRequest(
            f"without top_k, top_p or min_p every sampling mask is the whole vocabulary: {max_tokens} tokens x "
            f"{info.vocab_bound} ids are {size} bytes, the limit is {MAX_MASK_BYTES}; "
            "set rollplane.sampling_mask to false, truncate, or ask for fewer tokens",
            param="rollplane.sampling_mask",
        )


def _tuple_or_none(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _refuse(name: str, says: str) -> None:
    raise InvalidRequest(f"sampling_params.{name} {says}", param=f"sampling_params.{name}")
