"""What a rollout may ask for besides its prompt."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from rollplane.protocol.features import MediaItem


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `Client.generate` and `Client.stream`; an absent one (or None) is left out of the request.

    sampling_params: by vLLM's names; `max_tokens` left out runs to the end of the context.
    request_id: made up if absent; the answer has it.
    model: base model, alias or adapter name.
    group_id, session_id: keep the samples of one problem, the turns of one conversation, near their cache.
    traffic_class: whose share of a full fleet this counts against: train (the default), eval or another name.
    routed_experts, sampling_mask: absent = what the server gives, True = required, False = left out.
    policy_version: exactly this version; min_policy_version: this one or a later one;
    max_policy_lag: at most so many of the fleet's updates behind the newest.
    cache_salt: separates prefix caches. priority: lower is earlier.
    features: processed media, the wire envelope or a list of `MediaItem`. content_parts: raw media.
    return_token_ids: the prompt as the engine ran it. exact_spans: version boundaries that are never unknown.
    echo_sampling: the effective sampling parameters in the answer.
    deadline_s: seconds for everything, all tries together. idempotency_key: the answer is kept under it for repeats.
    data_parallel_rank: rank of an engine with several. extra: fields of an engine that nobody here knows.
    """

    sampling_params: Mapping[str, Any] | None
    request_id: str | None
    model: str | None
    group_id: str | None
    session_id: str | None
    traffic_class: str | None
    routed_experts: bool | None
    sampling_mask: bool | None
    policy_version: str | None
    min_policy_version: str | None
    max_policy_lag: int | None
    cache_salt: str | None
    priority: int | None
    features: Mapping[str, Any] | Iterable[MediaItem] | None
    content_parts: Sequence[Mapping[str, Any]] | None
    return_token_ids: bool | None
    exact_spans: bool | None
    echo_sampling: bool | None
    deadline_s: float | None
    idempotency_key: str | None
    data_parallel_rank: int | None
    extra: Mapping[str, Any] | None
