"""A Generate request as vLLM's wire carries it. Pure: what the wire cannot say is refused here, by name, before sending.

Two things differ from a plain copy. A field the caller left out is not left to the server's default where that default
may come from the model's `generation_config.json` or be greedy: the neutral value is sent. And everything is checked
against the wire's own widths, so that nothing is cut off on the way.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import numpy as np

from rollplane.admission import resolve_max_tokens
from rollplane.engines.grpc.packed import extend_field
from rollplane.engines.grpc.proto import inference_pb2 as pb
from rollplane.engines.grpc.struct_json import write_struct
from rollplane.errors import InvalidRequest, PayloadTooLarge
from rollplane.identity import media_identity
from rollplane.protocol.features import MediaItem
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.request import ContentPart, GenerateRequest
from rollplane.protocol.sampling import SamplingParams

NO_TOP_K: Final = 2**32 - 1
"""On the wire 0 is the server's default, which a model's generation config may set; this is off."""

MODALITIES: Final = {"image": pb.MODALITY_IMAGE, "video": pb.MODALITY_VIDEO, "audio": pb.MODALITY_AUDIO}

SAMPLING_FIELDS: Final = (
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
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "skip_reading_prefix_cache",
)
"""Sampling parameters the wire carries."""

NO_EFFECT: Final = frozenset({"flat_logprobs", "detokenize", "spaces_between_special_tokens", "stream_interval"})
"""Parameters that change no token and no number of an answer of token ids, whatever their value."""

NEUTRAL_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "bad_words": ([],),
    "extra_args": ({},),
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (0,),
    "repetition_detection": ({},),
}
"""Parameters the wire does not carry, with the values that ask for nothing."""


_FINE: Final = frozenset({*SAMPLING_FIELDS, *NO_EFFECT})

MAX_KNOWN: Final = 256
MAX_KNOWN_BYTES: Final = 1024
"""Sampling parameters whose message is kept: requests of a run share theirs, and few have long ones."""

MAX_ID_BYTES: Final = 5
MAX_CHARACTER_BYTES: Final = 4
MAX_OTHER_BYTES: Final = 256
"""Of all that a request says beside its ids, names and sampling: a dozen tags, lengths and numbers, at most ten bytes each."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(SamplingParams).decode


class ConvertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What conversion depends on beside the request.

    `media_hosts`: hosts whose http(s) URLs the engine may fetch. `max_request_bytes`: the server's own limit (vllm-rs
    0.31: 32 MiB).
    """

    media_hosts: tuple[str, ...] = ()
    max_request_bytes: int = 32 * 2**20


def to_wire(
    request: GenerateRequest, info: EngineInfo, *, settings: ConvertSettings | None = None
) -> list[pb.GenerateRequest]:
    """The wire requests of one request: one per choice, since the server takes no `num_sequences` over 1.

    Child `i` has the id `<request_id>#<i>` (the id itself where there is one choice) and the seed `seed + i`.

    Raises:
        InvalidRequest: the wire cannot say it; names the field.
        PayloadTooLarge: a wire request is over the server's limit.
    """
    settings = settings or ConvertSettings()
    params = request.sampling
    _check_sayable(request)
    seed = params.get("seed")
    sampling = _sampling_of(params)
    wire = pb.GenerateRequest.FromString(sampling)
    wire.request_id = request.request_id
    wire.stopping.max_new_tokens = resolve_max_tokens(request, info)
    if seed is not None:
        wire.sampling.seed = seed
    if request.return_token_ids:
        wire.response.prompt_token_ids = True
    wire.priority = request.priority
    if request.options.session_id is not None:
        wire.session_id = request.options.session_id
    if request.adapter is not None:
        wire.lora_name = request.adapter
    extend_field(wire.token_ids, "ids", request.token_ids)  # in place: a message that is given is copied
    _add_kv(wire, request)
    for item in request.features or ():
        wire.media.append(features_item(item, adapter=request.adapter))
    for i, part in enumerate(request.content_parts or ()):
        wire.media.append(raw_item(part, param=f"content_parts[{i}]", hosts=settings.media_hosts))
    if _at_most(request, sampling=sampling) > settings.max_request_bytes:
        size = wire.ByteSize()
        if size > settings.max_request_bytes:
            raise PayloadTooLarge(
                f"the request has {size} bytes on the engine's wire, its limit is {settings.max_request_bytes}"
            )
    return _children(wire, choices=params.choices, seed=seed)


def _at_most(request: GenerateRequest, *, sampling: bytes) -> float:
    """Bytes that the wire request does not exceed; its size itself costs as much as writing it."""
    if request.features or request.content_parts or request.kv_transfer_params or request.ec_transfer_params:
        return math.inf
    names = (request.request_id, request.options.session_id, request.adapter, request.cache_salt)
    characters = sum([len(name) for name in names if name is not None])
    return MAX_ID_BYTES * request.prompt_tokens + MAX_CHARACTER_BYTES * characters + len(sampling) + MAX_OTHER_BYTES


def _sampling_of(params: SamplingParams) -> bytes:
    """What a wire request says of sampling: all but seed and limit, the fields in which the requests of a run differ."""
    shared = msgspec.structs.replace(params, seed=msgspec.UNSET, max_tokens=msgspec.UNSET)
    key = _encode(shared)
    return _known_sampling(key) if len(key) <= MAX_KNOWN_BYTES else _sampling_message(shared)


@functools.lru_cache(maxsize=MAX_KNOWN)
def _known_sampling(key: bytes) -> bytes:
    return _sampling_message(_decode(key))


def _sampling_message(params: SamplingParams) -> bytes:
    wire = pb.GenerateRequest(
        temperature=float(params.get("temperature", 1.0)),
        sampling=pb.RandomSampling(
            num_sequences=1,
            top_k=params.top_k_limit or NO_TOP_K,
            top_p=float(params.get("top_p", 1.0)),
            min_p=float(params.get("min_p", 0.0)),
        ),
        decoding=_decoding(params),
        stopping=pb.StoppingCriteria(
            min_new_tokens=params.get("min_tokens", 0),
            stop_token_ids=params.get("stop_token_ids", []),
            stop_strings=params.stop_strings,
            include_stop_strings=params.get("include_stop_str_in_output", False),
            ignore_eos=params.get("ignore_eos", False),
        ),
        response=_response_options(params),
    )
    return wire.SerializeToString()


def child_ids(request_id: str, *, choices: int) -> list[str]:
    """The ids under which the server knows the choices of a request."""
    return [request_id] if choices == 1 else [f"{request_id}#{i}" for i in range(choices)]


def _children(wire: pb.GenerateRequest, *, choices: int, seed: int | None) -> list[pb.GenerateRequest]:
    if choices == 1:
        return [wire]
    children = []
    for i, name in enumerate(child_ids(wire.request_id, choices=choices)):
        child = pb.GenerateRequest()
        child.CopyFrom(wire)
        child.request_id = name
        if seed is not None:
            child.sampling.seed = seed + i
        children.append(child)
    return children


def _check_sayable(request: GenerateRequest) -> None:
    for name, value in request.sampling.given().items():
        if name in _FINE or value in NEUTRAL_VALUES.get(name, ()):
            continue
        if name == "routed_experts_prompt_start":
            # Nothing is captured here, so there is nothing to cut; admission has checked its range.
            continue
        _refuse(name, "cannot be said on vLLM's gRPC wire")
    for name in ("routed_experts", "sampling_mask"):
        if getattr(request.options, name):
            raise InvalidRequest(
                f"rollplane.{name} is true, but vLLM's gRPC wire carries no {name.replace('_', ' ')}",
                param=f"rollplane.{name}",
            )
    for name in request.extra:
        raise InvalidRequest(f"{name} cannot be said on vLLM's gRPC wire", param=name)
    if request.return_token_ids and request.content_parts:
        raise InvalidRequest(
            "return_token_ids is true, but for raw media vLLM's gRPC wire does not say where the placeholders are; "
            "send features",
            param="return_token_ids",
        )
    if request.stream and request.sampling.get("prompt_logprobs") is not None:
        _refuse("prompt_logprobs", "is not available with stream: true")


def _decoding(params: SamplingParams) -> pb.DecodingParameters:
    out = pb.DecodingParameters(
        presence_penalty=params.get("presence_penalty", 0.0),
        frequency_penalty=params.get("frequency_penalty", 0.0),
        repetition_penalty=params.get("repetition_penalty", 1.0),
        logit_bias=params.get("logit_bias", {}),
        allowed_token_ids=params.get("allowed_token_ids", []),
    )
    structure = params.get("structured_outputs")
    if structure:
        _add_structure(out, structure)
    return out


def _add_structure(out: pb.DecodingParameters, structure: dict[str, Any]) -> None:
    given = {name: value for name, value in structure.items() if value is not None and value is not False}
    unknown = sorted(set(given) - set(_STRUCTURES))
    if unknown:
        _refuse(f"structured_outputs.{unknown[0]}", "cannot be said on vLLM's gRPC wire")
    if len(given) != 1:
        _refuse("structured_outputs", f"must name one structure, names {sorted(given) or 'none'}")
    ((name, value),) = given.items()
    expected, write = _STRUCTURES[name]
    if not isinstance(value, expected):
        _refuse(f"structured_outputs.{name}", f"has a value of the wrong kind ({type(value).__name__})")
    write(out, value)


def _write_json(out: pb.DecodingParameters, value: str | dict[str, Any]) -> None:
    out.json = value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _write_choice(out: pb.DecodingParameters, value: list[Any]) -> None:
    if not value or not all(isinstance(each, str) for each in value):
        _refuse("structured_outputs.choice", "must be a list of strings, not empty")
    out.choice.choices.extend(value)


def _writer(name: str) -> Callable[[pb.DecodingParameters, Any], None]:
    return lambda out, value: setattr(out, name, value)


_STRUCTURES: Final[dict[str, tuple[type | tuple[type, ...], Callable[[pb.DecodingParameters, Any], None]]]] = {
    "json": ((str, dict), _write_json),
    "regex": (str, _writer("regex")),
    "choice": (list, _write_choice),
    "grammar": (str, _writer("grammar")),
    "json_object": (bool, _writer("json_object")),
    "structural_tag": (str, _writer("structural_tag")),
}


def _response_options(params: SamplingParams) -> pb.ResponseOptions:
    out = pb.ResponseOptions(
        output_text=False,
        output_token_ids=True,
        skip_special_tokens=params.get("skip_special_tokens"),  # stop strings are searched in the text it shapes
    )
    count, ids = params.get("logprobs"), params.get("logprob_token_ids")
    if count is not None or ids:
        out.output_logprobs = True
        candidates = _candidates(count, ids)
        if candidates is not None:
            out.output_candidates.CopyFrom(candidates)
    count = params.get("prompt_logprobs")
    if count is not None:
        out.prompt_logprobs = True
        out.prompt_token_ids = True  # a row's first entry is the prompt's own token, also after media expansion
        candidates = _candidates(count, None)
        if candidates is not None:
            out.prompt_candidates.CopyFrom(candidates)
    return out


def _candidates(count: int | None, ids: list[int] | None) -> pb.CandidateTokens | None:
    if ids:
        if count:
            _refuse(
                "logprob_token_ids", f"cannot be combined with logprobs {count} on vLLM's gRPC wire; use logprobs 0"
            )
        return pb.CandidateTokens(token_ids=pb.TokenIds(ids=ids))
    if count == -1:
        return pb.CandidateTokens(all=True)
    return pb.CandidateTokens(top_n=count) if count else None


def _add_kv(wire: pb.GenerateRequest, request: GenerateRequest) -> None:
    if request.sampling.get("skip_reading_prefix_cache"):
        wire.kv.bypass_prefix_cache = True
    if request.cache_salt is not None:
        wire.kv.cache_salt = request.cache_salt
    if request.kv_transfer_params is not None:
        wire.kv.kv_transfer_params.CopyFrom(write_struct(request.kv_transfer_params, param="kv_transfer_params"))
    if request.ec_transfer_params is not None:
        wire.kv.ec_transfer_params.CopyFrom(write_struct(request.ec_transfer_params, param="ec_transfer_params"))


def features_item(item: MediaItem, *, adapter: str | None) -> pb.MediaItem:
    """A processed medium. The content hash names it; the identifier is scoped by the adapter's engine-side name.

    Raises:
        InvalidRequest: an item without its payload, which only an engine that holds it could resolve.
    """
    if item.kwargs is None:
        raise InvalidRequest(
            f"features.kwargs_data.{item.modality}: an item without its payload cannot be sent to a vLLM gRPC server",
            param=f"features.kwargs_data.{item.modality}",
        )
    mm_hash = item.mm_hash or media_identity(item.modality, item.kwargs)
    return pb.MediaItem(
        modality=MODALITIES[item.modality],
        features=pb.PreprocessedMediaFeatures(
            kwargs=item.kwargs,
            identifier=scoped_identifier(mm_hash, adapter=adapter),
            offset=item.offset,
            length=item.length,
            mm_hash=mm_hash,
            is_embed=() if item.is_embed is None else np.asarray(item.is_embed, dtype=np.bool_).tolist(),
        ),
    )


def scoped_identifier(mm_hash: str, *, adapter: str | None) -> str:
    """The cache identity of a medium: its content hash, led by the engine-side adapter name where one is used."""
    return mm_hash if adapter is None else f"{adapter}:{mm_hash}"


def raw_item(part: ContentPart, *, param: str, hosts: tuple[str, ...]) -> pb.MediaItem:
    """A medium that the engine fetches and processes itself.

    Raises:
        InvalidRequest: neither a data URI nor an http(s) URL of an allowed host.
    """
    out = pb.MediaItem(modality=MODALITIES[part.type.removesuffix("_url")], uuid=part.uuid or "")
    if part.url[:5].lower() == "data:":
        out.data_uri = part.url
        return out
    try:
        url = urlsplit(part.url)
        host = url.hostname
    except ValueError as error:
        raise InvalidRequest(f"{param}.url is not a URL: {error}", param=f"{param}.url") from None
    if url.scheme not in ("http", "https") or not host:
        raise InvalidRequest(
            f"{param}.url must be a data URI or an http(s) URL, has the scheme {url.scheme!r}", param=f"{param}.url"
        )
    if host not in hosts:
        raise InvalidRequest(
            f"{param}.url: the host {host!r} is not among those media may come from ({', '.join(hosts) or 'none'}); "
            "send a data URI, or name the host in the setting media_hosts",
            param=f"{param}.url",
        )
    out.url = part.url
    return out


def _refuse(name: str, says: str) -> None:
    raise InvalidRequest(f"sampling_params.{name} {says}", param=f"sampling_params.{name}")
