"""The Generate request: decoded once from JSON or msgpack, checked, and carried as one record from then on.

`parse_request` is the only reader of a caller's body. It makes one pass over the body to find the fields, decodes each
by its own type, and turns token ids into an int32 array without a Python object per token. What depends on an engine
(vocabulary, context, abilities) is checked later, by `rollplane.admission`.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import xxhash

from rollplane.errors import InvalidRequest, PayloadTooLarge, UnsupportedMedia
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.features import DEFAULT_MAX_FEATURE_BYTES, MediaItem, check_items, parse_features
from rollplane.protocol.opaque import check_opaque, json_kind
from rollplane.protocol.sampling import SamplingParams, check_sampling, invalid_from_msgspec, parse_sampling
from rollplane.protocol.token_ids import check_token_ids, read_json_ids, read_packed_ids
from rollplane.protocol.undecodable import undecodable
from rollplane.protocol.versions import check_version_name

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

MAX_REQUEST_ID_CHARS: Final = 256
MAX_SALT_CHARS: Final = 1024
MAX_NAME_CHARS: Final = 1024
MAX_TRANSFER_BYTES: Final = 1 << 20
MAX_CONTENT_PARTS: Final = 256
MAX_EXTRA_FIELDS: Final = 64
MAX_TRACEPARENT_CHARS: Final = 256
MAX_POLICY_LAG: Final = 1_000_000

Encoding = Literal["structured", "npy"]


class RequestOptions(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The `rollplane` object of a request; None where the caller left a field out or sent null.

    `routed_experts` and `sampling_mask`: None = what the server gives, True = required, False = left out.
    `max_policy_lag`: how many of the fleet's updates the version may be behind the newest. `deadline_s` counts from the
    arrival of the request.
    """

    min_policy_version: str | None = None
    policy_version: str | None = None
    max_policy_lag: int | None = None
    group_id: str | None = None
    session_id: str | None = None
    traffic_class: str | None = None
    deadline_s: float | None = None
    routed_experts: bool | None = None
    sampling_mask: bool | None = None
    routed_experts_encoding: Encoding | None = None
    exact_spans: bool | None = None
    echo_sampling: bool | None = None


class StreamOptions(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`include_usage`: a usage chunk at the end; `continuous_usage_stats`: usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One raw medium that the engine processes itself."""

    type: Literal["image_url", "audio_url", "video_url"]
    url: str
    uuid: str | None = None


class GenerateRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One rollout request, as every engine of ours takes it.

    `token_ids` int32 [prompt], the prompt exactly as sent. `features` items in prompt order, None without media.
    `extra`: top-level fields nobody here knows, for an engine that can take them. `body_digest`: hash of what was sent,
    to tell a repeated request from another one with the same id. `expects_*`: preconditions set by a router. `attach_only`:
    join what runs or is kept under the idempotency key, begin nothing. `caller`: tells keys apart, without naming them.
    """

    request_id: str
    token_ids: Int32Array
    sampling: SamplingParams
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    features: list[MediaItem] | None = None
    content_parts: list[ContentPart] | None = None
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    options: RequestOptions = msgspec.field(default_factory=RequestOptions)
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    body_digest: str = ""
    data_parallel_rank: int | None = None
    idempotency_key: str | None = None
    traceparent: str | None = None
    attempt: int = 1
    expects_policy_version: str | None = None
    attach_only: bool = False
    caller: str | None = None
    adapter: str | None = None
    """Engine-side adapter name (`name@generation`), set by the worker that leased it."""

    @property
    def head(self) -> "RequestHead":
        """What is looked at before anything of what serves the request is known."""
        about = self.options
        return RequestHead(
            names=(self.request_id,),
            model=self.model,
            caller=self.caller,
            traffic_class=about.traffic_class,
            deadline_s=about.deadline_s,
        )

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt as sent."""
        return int(self.token_ids.size)

    @property
    def scores_only(self) -> bool:
        """Whether the request only scores its prompt: such callers parse strictly and get no routes unless they ask."""
        return self.sampling.get("prompt_logprobs") is not None and self.sampling.get("max_tokens") == 1


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits for the facts of what serves its model.

    `names`: the ids by which it can be aborted (several where one body asks for several prompts). `deadline_s`: seconds
    from now, None without a deadline.
    """

    names: tuple[str, ...]
    model: str | None
    caller: str | None
    traffic_class: str | None
    deadline_s: float | None


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server lets in, independent of the engine. Bytes and counts."""

    max_prompt_tokens: int = 4_194_304
    max_feature_bytes: int = DEFAULT_MAX_FEATURE_BYTES
    max_deadline_s: float = 86_400.0
    drop_unknown_sampling: bool = False


_JSON_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MSGPACK_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])

_KNOWN: Final[dict[str, Any]] = {
    "request_id": str | None,
    "model": str | None,
    "stream": bool | None,
    "stream_options": StreamOptions | None,
    "cache_salt": str | None,
    "priority": int | None,
    "content_parts": list[ContentPart] | None,
    "return_token_ids": bool | None,
    "kv_transfer_params": dict[str, Any] | None,
    "ec_transfer_params": dict[str, Any] | None,
    "rollplane": RequestOptions | None,
}
_NAMES: Final = _KNOWN.keys() | {"token_ids", "sampling_params", "features"}
_JSON_BY_FIELD = {name: msgspec.json.Decoder(kind) for name, kind in _KNOWN.items()}
_MSGPACK_BY_FIELD = {name: msgspec.msgpack.Decoder(kind) for name, kind in _KNOWN.items()}


class _Body:
    """The fields of one body, each decoded when asked for."""

    def __init__(self, body: bytes | memoryview, *, content_type: str) -> None:
        kind = content_type.split(";", 1)[0].strip().lower() or JSON
        if kind not in (JSON, MSGPACK):
            raise UnsupportedMedia(f"Content-Type {kind!r} is not read here; send {JSON} or {MSGPACK}")
        self.is_json = kind == JSON
        try:
            self.fields = (_JSON_FIELDS if self.is_json else _MSGPACK_FIELDS).decode(body)
        except msgspec.ValidationError:
            raise InvalidRequest("the body must be an object") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not {'JSON' if self.is_json else 'msgpack'}: {error}") from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None

    def digest(self) -> str:
        """A hash of every field but the request's id, in name order: the same work asked for under any id."""
        digest = xxhash.xxh3_128()
        for name in sorted(self.fields):
            if name != "request_id":
                raw = memoryview(self.fields[name])
                digest.update(b"%b\0%d\0" % (name.encode(), len(raw)))
                digest.update(raw)
        return digest.hexdigest()

    def known(self, name: str) -> Any:
        """The typed value of a known field; None where omitted or null."""
        raw = self.fields.get(name)
        if raw is None:
            return None
        decoder = (_JSON_BY_FIELD if self.is_json else _MSGPACK_BY_FIELD)[name]
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise invalid_from_msgspec(error, root=name) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{name} cannot be decoded: {error}", param=name) from None
        except RecursionError:
            raise InvalidRequest(f"{name} is nested too deeply", param=name) from None

    def any(self, name: str) -> Any:
        """The untyped value of a field; None where omitted or null."""
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw) if self.is_json else msgspec.msgpack.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            found = undecodable(raw, root=name, is_json=self.is_json)
            raise found or InvalidRequest(f"{name} cannot be decoded: {error}", param=name) from None

    def token_ids(self) -> Int32Array:
        raw = self.fields.get("token_ids")
        if raw is None:
            raise InvalidRequest("token_ids is required", param="token_ids")
        return read_json_ids(bytes(raw)) if self.is_json else read_packed_ids(raw)


def parse_request(
    body: bytes,
    *,
    content_type: str = JSON,
    headers: Mapping[str, str] | None = None,
    limits: RequestLimits | None = None,
) -> GenerateRequest:
    """The request in a body and its headers (names in lower case).

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
        PayloadTooLarge: a payload is over its limit.
        UnsupportedMedia: neither JSON nor msgpack.
    """
    limits = limits or RequestLimits()
    headers = headers or {}
    fields = _Body(body, content_type=content_type)
    token_ids = fields.token_ids()
    if token_ids.size > limits.max_prompt_tokens:
        raise PayloadTooLarge(
            f"token_ids has {token_ids.size} entries, the limit is {limits.max_prompt_tokens}", param="token_ids"
        )
    sampling_obj = fields.any("sampling_params")
    if not isinstance(sampling_obj, dict):
        what = "is required" if sampling_obj is None else f"must be an object, got {json_kind(sampling_obj)}"
        raise InvalidRequest(f"sampling_params {what}", param="sampling_params")
    salt = _cache_salt(fields.known("cache_salt"), sampling_obj.pop("cache_salt", None))
    sampling = parse_sampling(sampling_obj, drop_unknown=limits.drop_unknown_sampling)
    stream = fields.known("stream") or False
    stream_options = fields.known("stream_options")
    if stream_options is not None and not stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if stream and sampling.get("prompt_logprobs") is not None:
        raise InvalidRequest(
            "sampling_params.prompt_logprobs is not available with stream: true",
            param="sampling_params.prompt_logprobs",
        )
    options = _options(fields, session=headers.get("x-session-id"), limits=limits)
    features = _features(fields, prompt_tokens=int(token_ids.size), limits=limits)
    return GenerateRequest(
        request_id=request_id_of(headers.get("x-request-id"), fields.known("request_id")),
        token_ids=token_ids,
        sampling=sampling,
        model=_name(fields.known("model"), param="model"),
        stream=stream,
        stream_options=stream_options,
        cache_salt=salt,
        priority=_priority(fields.known("priority")),
        features=features,
        content_parts=_content_parts(fields.known("content_parts"), features=features),
        return_token_ids=fields.known("return_token_ids") or False,
        kv_transfer_params=_transfer_params(fields, "kv_transfer_params"),
        ec_transfer_params=_transfer_params(fields, "ec_transfer_params"),
        options=options,
        extra=_extra(fields),
        body_digest=fields.digest(),
        data_parallel_rank=_rank(headers.get("x-data-parallel-rank")),
        idempotency_key=_header_text(headers.get("idempotency-key"), name="Idempotency-Key"),
        traceparent=_traceparent(headers.get("traceparent")),
        caller=caller_of(headers.get("authorization")),
    )


def check_carried(request: GenerateRequest) -> None:
    """Hold a request that came over the internal hop to what `parse_request` promises of its arrays and numbers.

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
    """
    check_token_ids(request.token_ids)
    check_sampling(request.sampling)
    if request.features is not None:
        check_items(request.features, prompt_tokens=request.prompt_tokens)


def caller_of(authorization: str | None) -> str | None:
    """What tells callers apart: the beginning of their key's digest, whichever way the header is spelt. None without a key."""
    if authorization is None:
        return None
    scheme, _, key = authorization.strip().partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else authorization.strip()
    return hashlib.sha256(key.encode()).hexdigest()[:16] if key else None


def _extra(fields: _Body) -> dict[str, Any]:
    """The fields nobody here knows, for an engine that may take them."""
    if fields.fields.keys() <= _NAMES:
        return {}
    names = [name for name in fields.fields if name not in _NAMES]
    if len(names) > MAX_EXTRA_FIELDS:
        raise InvalidRequest(
            f"the body has {len(names)} unknown fields, the limit is {MAX_EXTRA_FIELDS}; one is {names[0]}"
        )
    extra = {name: fields.any(name) for name in names}
    for name, value in extra.items():
        check_opaque(value, param=name)
    return extra


def _traceparent(text: str | None) -> str | None:
    """The trace context; one that cannot be valid is dropped, as W3C Trace Context asks, and never fails a request."""
    return text if text is not None and len(text) <= MAX_TRACEPARENT_CHARS and text.isascii() else None


def request_id_of(header: str | None, field: str | None) -> str:
    """A request's id: the header's before the body's, a new one where neither is given.

    Raises:
        InvalidRequest: empty, too long, or not printable.
    """
    value = header if header is not None else field
    if value is None:
        return os.urandom(16).hex()
    if not 1 <= len(value) <= MAX_REQUEST_ID_CHARS or not value.isprintable():
        raise InvalidRequest(
            f"request_id must be a printable string of 1 to {MAX_REQUEST_ID_CHARS} characters, has {len(value)}",
            param="request_id",
        )
    return value


def _cache_salt(top: str | None, nested: Any) -> str | None:
    if nested is not None and not isinstance(nested, str):
        raise InvalidRequest(
            f"sampling_params.cache_salt must be a string, got {json_kind(nested)}", param="sampling_params.cache_salt"
        )
    if top is not None and nested is not None and top != nested:
        raise InvalidRequest(
            f"cache_salt is {top!r} at top level and {nested!r} in sampling_params", param="cache_salt"
        )
    salt = top if top is not None else nested
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, has {len(salt)}", param="cache_salt"
        )
    return salt


def _name(value: str | None, *, param: str) -> str | None:
    if value is not None and not 1 <= len(value) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"{param} must have 1 to {MAX_NAME_CHARS} characters, has {len(value)}", param=param)
    return value


def _priority(value: int | None) -> int:
    if value is None:
        return 0
    if not -(2**31) <= value < 2**31:
        raise InvalidRequest(f"priority must be a 32-bit integer, got {value}", param="priority")
    return value


def _rank(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise InvalidRequest(
            f"header X-data-parallel-rank must be an integer in [0, 999999], got {text[:32]!r}",
            param="X-data-parallel-rank",
        )
    return int(text)


def _header_text(text: str | None, *, name: str) -> str | None:
    if text is not None and not 1 <= len(text) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"header {name} must have 1 to {MAX_REQUEST_ID_CHARS} characters, has {len(text)}", param=name
        )
    return text


def _options(fields: _Body, *, session: str | None, limits: RequestLimits) -> RequestOptions:
    options: RequestOptions | None = fields.known("rollplane")
    if options is None:
        options = RequestOptions()
        if session is None:
            return options
    if session is not None:
        if options.session_id is not None and options.session_id != session:
            raise InvalidRequest(
                f"rollplane.session_id is {options.session_id!r}, header X-Session-ID is {session!r}",
                param="rollplane.session_id",
            )
        options.session_id = session
    check_options(options, max_deadline_s=limits.max_deadline_s)
    return options


def check_options(options: RequestOptions, *, max_deadline_s: float) -> None:
    """Hold the `rollplane` object to its rules.

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
    """
    for name in ("min_policy_version", "policy_version"):
        version = getattr(options, name)
        if version is not None:
            check_version_name(version, param=f"rollplane.{name}")
    for name in ("min_policy_version", "max_policy_lag"):
        if getattr(options, name) is not None and options.policy_version is not None:
            raise InvalidRequest(
                f"rollplane.{name} and rollplane.policy_version exclude each other", param=f"rollplane.{name}"
            )
    lag = options.max_policy_lag
    if lag is not None and not 0 <= lag <= MAX_POLICY_LAG:
        raise InvalidRequest(
            f"rollplane.max_policy_lag must be an integer in [0, {MAX_POLICY_LAG}], got {lag}",
            param="rollplane.max_policy_lag",
        )
    for name in ("group_id", "session_id", "traffic_class"):
        _name(getattr(options, name), param=f"rollplane.{name}")
    deadline_s = options.deadline_s
    if deadline_s is not None and not (math.isfinite(deadline_s) and 0 < deadline_s <= max_deadline_s):
        raise InvalidRequest(
            f"rollplane.deadline_s must be in (0, {max_deadline_s:g}] seconds, got {deadline_s!r}",
            param="rollplane.deadline_s",
        )


def _features(fields: _Body, *, prompt_tokens: int, limits: RequestLimits) -> list[MediaItem] | None:
    obj = fields.any("features")
    if obj is None:
        return None
    if not isinstance(obj, dict):
        raise InvalidRequest(f"features must be an object, got {json_kind(obj)}", param="features")
    return parse_features(obj, prompt_tokens=prompt_tokens, max_bytes=limits.max_feature_bytes)


def _content_parts(parts: list[ContentPart] | None, *, features: list[MediaItem] | None) -> list[ContentPart] | None:
    if parts is None:
        return None
    if features is not None:
        raise InvalidRequest("content_parts and features exclude each other", param="content_parts")
    if not 1 <= len(parts) <= MAX_CONTENT_PARTS:
        raise InvalidRequest(
            f"content_parts must have 1 to {MAX_CONTENT_PARTS} parts, has {len(parts)}", param="content_parts"
        )
    for i, part in enumerate(parts):
        if not part.url:
            raise InvalidRequest(f"content_parts[{i}].url is empty", param=f"content_parts[{i}].url")
        if part.uuid is not None:
            _name(part.uuid, param=f"content_parts[{i}].uuid")
    return parts


def _transfer_params(fields: _Body, name: str) -> dict[str, Any] | None:
    raw = fields.fields.get(name)
    if raw is not None and len(memoryview(raw)) > MAX_TRANSFER_BYTES:
        raise PayloadTooLarge(f"{name} has {len(memoryview(raw))} bytes, the limit is {MAX_TRANSFER_BYTES}", param=name)
    value: dict[str, Any] | None = fields.known(name)
    if value is not None:
        check_opaque(value, param=name)
    return value
