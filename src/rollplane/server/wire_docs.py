"""The Generate bodies as records, for the API description only: `protocol.request` reads and `protocol.answer` writes them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollplane.protocol.events import FinishReason, ServedBy
from rollplane.protocol.request import ContentPart, RequestOptions, StreamOptions
from rollplane.protocol.sampling import SamplingParams

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Features(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Preprocessed media: parallel maps by modality."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[dict[str, Any]]]
    kwargs_data: dict[str, list[str | None]] | None = None
    mm_metadata: dict[str, list[str | None]] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """One rollout request; fields that are not listed are handed to an engine that can take them, else refused."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: SamplingParams
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    model: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    features: Features | None = None
    content_parts: list[ContentPart] | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    rollplane: RequestOptions | None = None


class LogprobEntry(msgspec.Struct, kw_only=True):
    """One token: `token` is `token_id:<id>`, `logprob` in nats."""

    token: str
    logprob: float
    bytes: None
    top_logprobs: list[dict[str, Any]]


class Logprobs(msgspec.Struct, kw_only=True):
    """As long as `token_ids`; empty for a choice without tokens."""

    content: list[LogprobEntry]


class Routes(msgspec.Struct, kw_only=True):
    """`data`: base64 of raw C-order bytes of [rows, MoE layers, top_k]."""

    data: str
    shape: list[int]
    start: int
    dtype: Literal["uint8", "uint16", "int32"]


class ChoiceBody(msgspec.Struct, kw_only=True):
    """One sample."""

    index: int
    token_ids: list[TokenId]
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    routed_experts: Routes | str | None = None
    sampling_mask: list[list[TokenId]] | None = None
    policy_versions: list[tuple[str, int | None]] | None = None


class UsageBody(msgspec.Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class ServedByBody(ServedBy, kw_only=True):
    """Who answered and how; `wire` is the version of the answer's encodings."""

    wire: int = 1


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """One whole answer, all keys present."""

    request_id: str
    model: str
    created: int
    choices: list[ChoiceBody]
    usage: UsageBody
    rollplane: ServedByBody
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_id_logprobs: Any = None
    prompt_token_ids: list[TokenId] | None = None
    mm_placeholders: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


class ListsChoice(ChoiceBody, kw_only=True):
    """One sample with routed experts as lists, [rows, MoE layers, top_k]."""

    routed_experts: list[list[list[int]]] | None = None  # type: ignore[assignment]


class ListsAnswer(GenerateAnswer, kw_only=True):
    """One whole answer under SkyRL's name."""

    choices: list[ListsChoice]  # type: ignore[assignment]


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong; `param` is the dotted path of the field at fault."""

    message: str
    type: str
    code: str
    param: str | None = None
    details: dict[str, Any] | None = None
    retry_after_s: float | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    """Every error."""

    error: ErrorDetail
    status: Literal["error"] | None = None
