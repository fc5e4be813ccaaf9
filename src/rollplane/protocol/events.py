"""What an engine says while it serves one request, in order:

    PromptEvent?  ChoiceEvent*  EndEvent

Every choice has exactly one terminal `ChoiceEvent` (its `finish_reason` is set), also when it has no tokens. A unary
request costs one terminal event per choice and no delta; a stream carries deltas first. `EndEvent` is always last.
Failures are raised (`rollplane.errors`); on the internal hop they travel as an `ErrorEvent`.
"""

from typing import Any, Literal

import msgspec

from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import PromptLogprobs, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.versions import PolicySpan

FinishReason = Literal["stop", "length", "abort", "repetition"]

LogprobsMode = Literal["raw", "sampling", "greedy", "unknown"]


class PromptEvent(msgspec.Struct, tag="prompt", kw_only=True, omit_defaults=True):
    """The prompt as the engine ran it; at most one, before any choice ends.

    `prompt_tokens` counts after media expansion; `cached_tokens` None where the engine does not say;
    `prompt_token_ids` int32 [prompt_tokens], only when the request asked (`return_token_ids`).
    """

    prompt_tokens: int
    cached_tokens: int | None = None
    prompt_token_ids: Int32Array | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: Any = None
    mm_placeholders: dict[str, list[dict[str, Any]]] | None = None


class ChoiceEvent(msgspec.Struct, tag="choice", kw_only=True, omit_defaults=True):
    """New tokens of one choice; terminal when `finish_reason` is set.

    `token_ids` int32 [new tokens] and `logprobs` (as long, None unless asked for) are deltas. `routed_experts`,
    `sampling_mask` and `policy_versions` come on the terminal event only and cover the whole choice.
    `stop_reason`: the stop token id or stop string that ended it, None for EOS or another ending.
    """

    index: int
    token_ids: Int32Array
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    routed_experts: RoutedExperts | None = None
    sampling_mask: SamplingMask | None = None
    policy_versions: list[PolicySpan] = msgspec.field(default_factory=list)


class ServedBy(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Who answered and how: the `rollplane` object of a response.

    `recomputed`: [[first row, end row]] of the sequence whose KV or routes were computed again under newer weights.
    `floored_logprobs`: alternatives that were not finite. `effective_sampling`: only when asked (`echo_sampling`).
    """

    worker: str = ""
    instance: str = ""
    epoch: int | None = None
    attempt: int = 1
    logprobs_mode: LogprobsMode = "unknown"
    sampling_mask_mode: str | None = None
    adapter_generation: int | None = None
    floored_logprobs: int = 0
    recomputed: list[tuple[int, int]] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)
    effective_sampling: dict[str, Any] | None = None


class EndEvent(msgspec.Struct, tag="end", kw_only=True, omit_defaults=True):
    """The end of the whole request, after every choice's terminal event."""

    served_by: ServedBy = msgspec.field(default_factory=ServedBy)
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


class ErrorEvent(msgspec.Struct, tag="error", kw_only=True, omit_defaults=True):
    """A typed error on the internal hop, as `errors.error_body` writes it."""

    status: int
    error: dict[str, Any]


Event = PromptEvent | ChoiceEvent | EndEvent
HopEvent = PromptEvent | ChoiceEvent | EndEvent | ErrorEvent
