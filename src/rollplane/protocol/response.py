"""The Generate response record: arrays inside, written as JSON or msgpack by `rollplane.protocol.answer`."""

from typing import Any, Final

import msgspec

from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import PromptLogprobs, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import FinishReason, ServedBy
from rollplane.protocol.versions import PolicySpan

WIRE_VERSION: Final = 1
"""Version of every encoding of an answer, its arrays and the frames; changes when an old reader would misread."""


class Usage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Token counts; `cached_tokens` None where the engine does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class Choice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One finished sample.

    `token_ids` int32 [T]; `logprobs` rows T or None (not asked for); `routed_experts` rows prompt + T - 1 - start (0 for
    T = 0) or None; `sampling_mask` T rows or None; `policy_versions` spans over the output.
    """

    index: int
    token_ids: Int32Array
    finish_reason: FinishReason
    logprobs: TokenLogprobs | None = None
    stop_reason: int | str | None = None
    routed_experts: RoutedExperts | None = None
    sampling_mask: SamplingMask | None = None
    policy_versions: list[PolicySpan] = msgspec.field(default_factory=list)


class GenerateResponse(msgspec.Struct, kw_only=True):
    """One whole answer. `created` is Unix time in seconds; choices are ordered by index.

    `wire`: the version of its encoding. No field is left out of the msgpack form, so it is always stated.
    """

    request_id: str
    model: str
    created: int
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: Any = None
    prompt_token_ids: Int32Array | None = None
    mm_placeholders: dict[str, list[dict[str, Any]]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    served_by: ServedBy = msgspec.field(default_factory=ServedBy)
    wire: int = WIRE_VERSION
