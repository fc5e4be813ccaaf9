"""A Generate request as a trainer writes it: the body, the headers, and what the answer must look like."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from rollplane.errors import InvalidRequest
from rollplane.fold import FoldPlan
from rollplane.protocol.arrays import INT32_MAX, Int32Array, msgpack_encoder
from rollplane.protocol.features import MediaItem, features_envelope
from rollplane.protocol.request import JSON, MSGPACK

TokenIds = Sequence[int] | np.ndarray[Any, Any]
Features = Mapping[str, Any] | Iterable[MediaItem]

Encoder = msgspec.msgpack.Encoder | msgspec.json.Encoder


def _as_list(obj: Any) -> Any:
    if isinstance(obj, (np.ndarray, np.generic)):
        return obj.tolist()
    raise NotImplementedError(f"{type(obj).__name__} does not cross the wire")


ENCODERS: Final[dict[str, Encoder]] = {MSGPACK: msgpack_encoder(), JSON: msgspec.json.Encoder(enc_hook=_as_list)}
"""Content type -> what writes it."""


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """One request ready to be sent, any number of times. `deadline_s` bounds all tries together."""

    request_id: str
    content: bytes
    headers: dict[str, str]
    plan: FoldPlan
    deadline_s: float | None


def make_body(
    token_ids: TokenIds,
    *,
    wire: str = MSGPACK,
    sampling_params: Mapping[str, Any] | None = None,
    request_id: str | None = None,
    model: str | None = None,
    stream: bool = False,
    group_id: str | None = None,
    session_id: str | None = None,
    traffic_class: str | None = None,
    routed_experts: bool | None = None,
    sampling_mask: bool | None = None,
    policy_version: str | None = None,
    min_policy_version: str | None = None,
    max_policy_lag: int | None = None,
    cache_salt: str | None = None,
    priority: int | None = None,
    features: Features | None = None,
    content_parts: Sequence[Mapping[str, Any]] | None = None,
    return_token_ids: bool | None = None,
    exact_spans: bool | None = None,
    echo_sampling: bool | None = None,
    deadline_s: float | None = None,
    idempotency_key: str | None = None,
    data_parallel_rank: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> GenerateBody:
    """Write a request; `Client.generate` describes the arguments, `wire` is the body's content type.

    Raises:
        InvalidRequest: token ids that are not integers in [0, 2**31 - 1], or an `extra` field with a name of ours.
    """
    ids = token_array(token_ids)
    sampling = dict(sampling_params or {})
    rid = request_id if request_id is not None else uuid.uuid4().hex
    fields: dict[str, Any] = {
        "request_id": rid,
        "model": model,
        "token_ids": ids,
        "sampling_params": sampling,
        "stream": stream or None,
        "cache_salt": cache_salt,
        "priority": priority,
        "content_parts": None if content_parts is None else [dict(part) for part in content_parts],
        "return_token_ids": return_token_ids,
        "rollplane": _given(
            group_id=group_id,
            session_id=session_id,
            traffic_class=traffic_class,
            routed_experts=routed_experts,
            sampling_mask=sampling_mask,
            policy_version=policy_version,
            min_policy_version=min_policy_version,
            max_policy_lag=max_policy_lag,
            exact_spans=exact_spans,
            echo_sampling=echo_sampling,
            deadline_s=deadline_s,
        )
        or None,
    }
    if features is not None:
        fields["features"] = dict(features) if isinstance(features, Mapping) else features_envelope(list(features))
    if stream:
        # Every chunk's usage: the prompt's length must be known before a choice ends, and media expand the prompt.
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    for name, value in (extra or {}).items():
        if name in fields:
            raise InvalidRequest(f"extra.{name} is a field of its own; pass it by name", param=f"extra.{name}")
        fields[name] = value
    headers = {"Content-Type": wire}
    if idempotency_key is not None:
        headers["Idempotency-Key"] = idempotency_key
    if data_parallel_rank is not None:
        headers["X-data-parallel-rank"] = str(data_parallel_rank)
    return GenerateBody(
        request_id=rid,
        content=ENCODERS[wire].encode({name: value for name, value in fields.items() if value is not None}),
        headers=headers,
        plan=FoldPlan(
            request_id=rid,
            model=model or "",
            choices=int(sampling.get("n") or 1),
            prompt_tokens=None if content_parts is not None else int(ids.size),
            logprobs=sampling.get("logprobs") is not None,
            routes=routed_experts,
            mask=sampling_mask,
            prompt_logprobs=sampling.get("prompt_logprobs") is not None,
            routes_start=sampling.get("routed_experts_prompt_start"),
        ),
        deadline_s=deadline_s,
    )


def token_array(token_ids: TokenIds) -> Int32Array:
    """int32 [prompt] of any sequence of integers.

    Raises:
        InvalidRequest: empty, not integers (`True` is none), more than one dimension, or out of range.
    """
    if not isinstance(token_ids, np.ndarray):
        kinds = {type(x) for x in token_ids} - {int}
        if any(not issubclass(kind, np.integer) for kind in kinds):
            names = sorted(kind.__name__ for kind in kinds)
            raise InvalidRequest(f"token_ids must be integers, got {', '.join(names)}", param="token_ids")
    try:
        array = np.asarray(token_ids)
    except (OverflowError, ValueError) as error:
        raise InvalidRequest(f"token_ids cannot be read: {error}", param="token_ids") from None
    if array.size == 0:
        raise InvalidRequest("token_ids must not be empty", param="token_ids")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(
            f"token_ids must be one dimension of integers, got {array.dtype.name}{list(array.shape)}", param="token_ids"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > INT32_MAX:
        bad = low if low < 0 else high
        raise InvalidRequest(f"token_ids hold {bad}, outside [0, {INT32_MAX}]", param="token_ids")
    return np.ascontiguousarray(array, dtype=np.int32)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
