"""What Dynamo's frontend sends for one Generate request, read as the caller wrote it. Pure.

The frontend (1.6.1) keeps the caller's body, without `token_ids`, in `extra_args.vllm_tito`, and beside it a projection
for its router: `sampling_options`, `stop_conditions`, `output_options`, `routing`. The projection is lossy (floats of 32
bits, `n` always 1, no stop strings), so the caller's own fields are the ones that count; where both name one thing that
decides which answer is right (salt, adapter), they must agree. `extra_args.dynamo_mm_routing_hashes` are the markers by which
it routed images: each must be the one that the image's content has.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from rollplane.errors import InvalidRequest
from rollplane.identity import identify, routing_marker
from rollplane.protocol.arrays import Int32Array, msgpack_encoder
from rollplane.protocol.opaque import check_opaque
from rollplane.protocol.request import MSGPACK, GenerateRequest, RequestLimits, parse_request
from rollplane.protocol.sampling import invalid_from_msgspec
from rollplane.protocol.token_ids import check_token_ids

SALT_PREFIX: Final = "dynamo-cache-salt:"
"""What Dynamo's own workers put before a salt that they hand to vLLM."""
MARKER: Final = re.compile(r"[0-9a-f]{64}")

_encoder = msgpack_encoder()


def is_generate(message: Mapping[str, Any]) -> bool:
    """Whether a message is a Generate request; the others are completions and chats, see `dynamo.completions`."""
    return object_of(message, "extra_args").get("vllm_tito") is not None


def read_generate(
    message: Mapping[str, Any], *, request_id: str, limits: RequestLimits | None = None, base_model: str | None = None
) -> GenerateRequest:
    """The Generate request in a message.

    Args:
        request_id: the frontend's (it has taken `X-Request-Id` and the body's own into account).
        base_model: the name under which the base model is registered.

    Raises:
        InvalidRequest: a malformed message, or the caller's own mistake; naming the field.
        PayloadTooLarge: the features are over their limit.
    """
    extra = object_of(message, "extra_args")
    sent = object_of(extra, "vllm_tito", root="extra_args.")
    routing = object_of(message, "routing")
    for name in ("token_ids", "features_ref"):
        if sent.get(name) is not None:
            raise InvalidRequest(
                f"extra_args.vllm_tito.{name} has no place there", param=f"extra_args.vllm_tito.{name}"
            )
    if not all(isinstance(name, str) for name in sent):
        raise InvalidRequest("extra_args.vllm_tito must have strings for keys", param="extra_args.vllm_tito")
    if sent.get("stream"):
        raise InvalidRequest(
            "stream: true does not pass through Dynamo's frontend; ask this worker's own HTTP server", param="stream"
        )
    if message.get("multi_modal_data") is not None:
        raise InvalidRequest("multi_modal_data beside extra_args.vllm_tito: raw media and Generate exclude each other",
                             param="multi_modal_data")  # fmt: skip
    body = {**sent, "token_ids": prompt_of(message)}
    request = parse_request(encoded(body), content_type=MSGPACK, headers={"x-request-id": request_id}, limits=limits)
    if request.options.max_policy_lag is not None:
        raise InvalidRequest(
            "rollplane.max_policy_lag needs a frontend of ours: behind Dynamo's nobody knows the newest version of the fleet; "
            "use min_policy_version",
            param="rollplane.max_policy_lag",
        )
    check_salt(request.cache_salt, routing)
    request.model = adapter_or_base(routing, sent=request.model, base_model=base_model)
    request.data_parallel_rank = rank_of(routing)
    check_markers(extra.get("dynamo_mm_routing_hashes"), request)
    return request


def encoded(body: Mapping[str, Any]) -> bytes:
    """A Generate body as msgpack.

    Raises:
        InvalidRequest: naming a value that no body can hold: an integer of more than 64 bits, half a surrogate pair, too many
            levels.
    """
    try:
        return _encoder.encode(body)
    except (OverflowError, RecursionError, TypeError, UnicodeEncodeError):
        for name, value in body.items():
            if isinstance(value, np.ndarray):
                continue
            check_opaque(value, param=name)
            try:
                _encoder.encode(value)
            except UnicodeEncodeError:
                raise InvalidRequest(f"{name} holds text that is not Unicode", param=name) from None
        raise


def object_of(tree: Mapping[str, Any], name: str, *, root: str = "") -> Mapping[str, Any]:
    """A member that is an object; empty where it is left out or null.

    Raises:
        InvalidRequest: it is something else.
    """
    value = tree.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{root}{name} must be an object, got {type(value).__name__}", param=f"{root}{name}")
    return value


def prompt_of(message: Mapping[str, Any]) -> Int32Array:
    """The prompt, int32 [prompt].

    Raises:
        InvalidRequest: there is none, or it holds something else than token ids.
    """
    found = message.get("token_ids")
    if not isinstance(found, list):
        what = "is required" if found is None else f"must be an array of integers, got {type(found).__name__}"
        raise InvalidRequest(f"token_ids {what}", param="token_ids")
    try:
        return check_token_ids(np.array(msgspec.convert(found, list[int], strict=True), dtype=np.int64))
    except msgspec.ValidationError as error:
        raise invalid_from_msgspec(error, root="token_ids") from None
    except OverflowError:
        raise InvalidRequest("token_ids holds a number of more than 64 bits", param="token_ids") from None
    except UnicodeEncodeError:
        raise InvalidRequest("token_ids holds text", param="token_ids") from None


def check_salt(sent: str | None, routing: Mapping[str, Any]) -> None:
    """Refuse a salt that the router used and the caller did not send.

    Raises:
        InvalidRequest: the two differ. A salt that only the caller's body has (it may stand in `sampling_params`, where the
            router does not look) is no contradiction.
    """
    routed = routing.get("cache_salt")
    if routed is None:
        return
    if not isinstance(routed, str):
        raise InvalidRequest(
            f"routing.cache_salt must be a string, got {type(routed).__name__}", param="routing.cache_salt"
        )
    if routed.removeprefix(SALT_PREFIX) != sent:
        raise InvalidRequest(
            f"routing.cache_salt is {routed!r}, the request's cache_salt is {sent!r}", param="routing.cache_salt"
        )


def adapter_or_base(routing: Mapping[str, Any], *, sent: str | None, base_model: str | None) -> str | None:
    """The model that a request names: an adapter, or None for the base model.

    Raises:
        InvalidRequest: the router's adapter is not the one that the caller named.
    """
    lora = routing.get("lora_name")
    if lora is not None and not isinstance(lora, str):
        raise InvalidRequest(
            f"routing.lora_name must be a string, got {type(lora).__name__}", param="routing.lora_name"
        )
    if lora is not None and sent is not None and lora != sent:
        raise InvalidRequest(
            f"routing.lora_name is {lora!r}, the request's model is {sent!r}", param="routing.lora_name"
        )
    name = lora if lora is not None else sent
    return None if name == base_model else name


def rank_of(routing: Mapping[str, Any]) -> int | None:
    """The data-parallel rank that the router chose, None where it chose none.

    Raises:
        InvalidRequest: it is no rank.
    """
    rank = routing.get("dp_rank")
    if rank is not None and (type(rank) is not int or rank < 0):
        got = rank if type(rank) is int else type(rank).__name__
        raise InvalidRequest(f"routing.dp_rank must be an integer >= 0, got {got}", param="routing.dp_rank")
    return rank


def check_markers(markers: Any, request: GenerateRequest) -> None:
    """Hold the markers by which a request was routed to its media's content; gives every item its identity.

    Raises:
        InvalidRequest: they are no list of markers, their number is not the items', or one is not its content's.
    """
    where = "extra_args.dynamo_mm_routing_hashes"
    identify(request.features)
    if markers is None:
        return
    if not isinstance(markers, list) or not all(isinstance(m, str) and MARKER.fullmatch(m) for m in markers):
        raise InvalidRequest(f"{where} must be an array of strings of 64 hex digits", param=where)
    items = request.features or []
    if len(markers) != len(items):
        raise InvalidRequest(f"{where} has {len(markers)} entries, features has {len(items)} items", param=where)
    for i, (marker, item) in enumerate(zip(markers, items, strict=True)):
        if item.mm_hash is None:
            raise InvalidRequest(f"{where}[{i}] stands for an item without content", param=f"{where}[{i}]")
        found = routing_marker(item.mm_hash)
        if marker != found:
            raise InvalidRequest(
                f"{where}[{i}] is {marker[:16]}..., the content of item {i} ({item.modality}) has {found[:16]}...",
                param=f"{where}[{i}]",
            )
