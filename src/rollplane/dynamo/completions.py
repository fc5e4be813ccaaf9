"""Dynamo's completions and chats, which its frontend tokenized, as Generate requests. Pure.

Here the projection is the request: `stop_conditions`, `sampling_options` and `output_options`. The frontend turns ids back
into text and looks for stop strings itself, and stops the worker at one; so stop strings are not handed on.
"""

from collections.abc import Mapping
from typing import Any, Final

from rollplane.dynamo.envelope import adapter_or_base, encoded, object_of, prompt_of, rank_of
from rollplane.errors import InvalidRequest
from rollplane.protocol.request import MSGPACK, GenerateRequest, RequestLimits, parse_request

SAMPLING: Final = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
)
STOPPING: Final = ("max_tokens", "min_tokens", "ignore_eos")
ALL: Final = 2**32 - 1
"""How the frontend says "all" of logprobs."""


def read_completion(
    message: Mapping[str, Any], *, request_id: str, limits: RequestLimits | None = None, base_model: str | None = None
) -> GenerateRequest:
    """The request in a message that is no Generate; streamed, but for prompt logprobs, which a stream cannot carry.

    Raises:
        InvalidRequest: media, or a field that is no value.
    """
    for name in ("multi_modal_data", "prompt_embeds"):
        if message.get(name):
            raise InvalidRequest(f"{name} is not served: send processed features to /inference/v1/generate", param=name)
    routing = object_of(message, "routing")
    stops, options = object_of(message, "stop_conditions"), object_of(message, "sampling_options")
    output = object_of(message, "output_options")
    guided = options.get("guided_decoding")
    if guided is not None:
        raise InvalidRequest("guided decoding is not served over completions; use structured_outputs on Generate",
                             param="guided_decoding")  # fmt: skip
    sampling: dict[str, Any] = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    sampling |= {name: stops[name] for name in STOPPING if stops.get(name) is not None}
    ids = _ids(stops.get("stop_token_ids_hidden"), name="stop_conditions.stop_token_ids_hidden")
    if not stops.get("ignore_eos"):
        ids += [i for i in _ids(message.get("eos_token_ids"), name="eos_token_ids") if i not in ids]
    if ids:
        sampling["stop_token_ids"] = ids
    for name in ("logprobs", "prompt_logprobs"):
        count = output.get(name)
        if count is not None:
            sampling[name] = -1 if count == ALL else count
    body = {
        "token_ids": prompt_of(message),
        "sampling_params": sampling,
        "stream": sampling.get("prompt_logprobs") is None,
        "cache_salt": routing.get("cache_salt"),
        "model": message.get("model"),
        "priority": routing.get("priority"),
        # Nobody reads them on these routes.
        "rollplane": {"sampling_mask": False, "routed_experts": False},
    }
    request = parse_request(encoded(body), content_type=MSGPACK, headers={"x-request-id": request_id}, limits=limits)
    # The router counts a higher priority as more urgent; the engines a lower one.
    request.priority = -request.priority
    request.model = adapter_or_base(routing, sent=request.model, base_model=base_model)
    request.data_parallel_rank = rank_of(routing)
    return request


def _ids(value: Any, *, name: str) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise InvalidRequest(f"{name} must be an array of integers", param=name)
    return list(value)
