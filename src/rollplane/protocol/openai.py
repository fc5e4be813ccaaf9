"""OpenAI's completion and chat bodies, as evaluations send them: read once, checked, turned into sampling parameters.

Every sampling parameter of Generate may stand at the top level, as vLLM's servers take them; `logprobs` has OpenAI's
meaning. A field that has no meaning here is refused by name. Prompts are texts or token ids; what turns messages into
tokens is in `rollplane.server.text`.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import UNSET

from rollplane.errors import InvalidRequest, RollplaneError
from rollplane.protocol.arrays import INT32_MAX, Int32Array
from rollplane.protocol.opaque import check_opaque
from rollplane.protocol.request import MAX_SALT_CHARS, RequestLimits, RequestOptions, StreamOptions, check_options
from rollplane.protocol.sampling import (
    FIELD_NAMES,
    OPAQUE_FIELDS,
    Maybe,
    SamplingParams,
    check_sampling,
    invalid_from_msgspec,
)
from rollplane.protocol.undecodable import undecodable

MAX_PROMPTS: Final = 1024
MAX_MESSAGES: Final = 65_536
_PROMPT_IDS: Final = re.compile(r"(?<!\w)token_ids\[")
_NAME: Final = re.compile(r"(?<![\w.])[a-z_]+(?!\w)")


class EvaluationBody(SamplingParams, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both bodies share. `user` and `metadata` are taken and have no effect.

    `rollplane`, `cache_salt` and `priority` mean what they mean on Generate; `return_token_ids` adds token ids to the
    answer, `return_tokens_as_token_ids` writes log-probabilities' tokens as `token_id:<id>`.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    rollplane: RequestOptions | None = None


class CompletionBody(EvaluationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`: a prompt is a text or token ids; several of either are answered in order."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatBody(EvaluationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`: `messages` through the model's own chat template."""

    messages: list[dict[str, Any]]
    logprobs: bool | Maybe = UNSET
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


def parse_completion(body: bytes, *, drop_unknown: bool = False) -> CompletionBody:
    """The checked body of `/v1/completions`.

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
    """
    found: CompletionBody = _read(body, CompletionBody, drop_unknown=drop_unknown)
    if found.echo:
        raise InvalidRequest("echo is not offered; prompt_logprobs scores the prompt", param="echo")
    if found.suffix:
        raise InvalidRequest("suffix is not offered: no engine here fills in the middle", param="suffix")
    if found.best_of is not None and found.best_of != found.get("n", 1):
        raise InvalidRequest(
            f"best_of is {found.best_of}, must be absent or equal to n: answers are not ranked here", param="best_of"
        )
    return found


def parse_chat(body: bytes, *, drop_unknown: bool = False, reads_tools: bool = False) -> ChatBody:
    """The checked body of `/v1/chat/completions`.

    Args:
        reads_tools: tool calls are read from this model's text.

    Raises:
        InvalidRequest: naming the field, the value's kind and the limit.
    """
    found: ChatBody = _read(body, ChatBody, drop_unknown=drop_unknown)
    if not 1 <= len(found.messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must hold 1 to {MAX_MESSAGES}, has {len(found.messages)}", param="messages")
    if found.tools and found.tool_choice != "none" and not reads_tools:
        raise InvalidRequest(
            "tools with a tool_choice other than none: no parser of this model's tool calls is here (--tool-call-parser); with "
            "tool_choice none the tools are shown in the prompt, and calls come back as text",
            param="tools",
        )
    if found.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest(
            f"tool_choice must be absent, none or auto, got {found.tool_choice!r}", param="tool_choice"
        )
    if found.top_logprobs is not None:
        if not found.get("logprobs"):
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if found.top_logprobs < 0:
            raise InvalidRequest(f"top_logprobs must be >= 0, got {found.top_logprobs}", param="top_logprobs")
    if found.max_completion_tokens is not None and found.get("max_tokens") not in (None, found.max_completion_tokens):
        raise InvalidRequest(
            f"max_completion_tokens is {found.max_completion_tokens} and max_tokens {found.get('max_tokens')}",
            param="max_completion_tokens",
        )
    if found.continue_final_message and found.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    return found


def sampling_of(body: EvaluationBody) -> SamplingParams:
    """The sampling parameters of a body, under Generate's names and checked as Generate's are.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = {name: getattr(body, name) for name in FIELD_NAMES if getattr(body, name) is not UNSET}
    if isinstance(body, ChatBody):
        fields["logprobs"] = (body.top_logprobs or 0) if body.get("logprobs") else None
        if body.max_completion_tokens is not None:
            fields["max_tokens"] = body.max_completion_tokens
    if body.vllm_xargs:
        extra = fields.get("extra_args") or {}
        both = sorted(set(extra) & set(body.vllm_xargs))
        if both:
            raise InvalidRequest(f"vllm_xargs repeats {both[0]!r}, which extra_args has too", param="vllm_xargs")
        fields["extra_args"] = {**extra, **body.vllm_xargs}
    grammar = _structure(body)
    if grammar is not None:
        fields["structured_outputs"] = grammar
    params = SamplingParams(**fields)
    try:
        check_sampling(params)
    except InvalidRequest as error:
        raise in_callers_words(error, prompt="prompt", names=own_names(body)) from None
    return params


def prompts_of(body: CompletionBody, *, most: int = MAX_PROMPTS) -> list[str | Int32Array]:
    """The prompts in order: texts, or token ids as int32 arrays.

    Raises:
        InvalidRequest: none, too many, an empty one, or ids outside 31 bits.
    """
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    if len({type(each) for each in given}) > 1:
        raise InvalidRequest(
            "prompt mixes kinds; send texts only, token ids only, or lists of ids only", param="prompt"
        )
    if isinstance(given[0], int):
        return [_ids(given, where="prompt")]
    if len(given) > most:
        raise InvalidRequest(f"prompt holds {len(given)} prompts, the limit is {most}", param="prompt")
    return [each if isinstance(each, str) else _ids(each, where=f"prompt[{i}]") for i, each in enumerate(given)]


def in_callers_words(
    error: RollplaneError, *, prompt: str, names: Mapping[str, str] = MappingProxyType({})
) -> RollplaneError:
    """The same error with the caller's own names of the fields: no `sampling_params.`, `prompt` for `token_ids`, and what
    `own_names` says.
    """

    def said(text: str) -> str:
        text = _PROMPT_IDS.sub(f"{prompt}[", text.replace("sampling_params.", ""))
        return _NAME.sub(lambda found: names.get(found[0], found[0]), text)

    param = error.param
    renamed = type(error)(said(error.message), details=error.details)
    renamed.param = prompt if param == "token_ids" else None if param is None else said(param)
    renamed.retry_after_s = error.retry_after_s
    return renamed


def own_names(body: EvaluationBody) -> dict[str, str]:
    """Generate's name of a field -> the one under which this body has it, where it has it under another."""
    found = {}
    if body.get("structured_outputs") is None and body.response_format is not None:
        found["structured_outputs"] = "response_format"
    if body.get("extra_args") is None and body.vllm_xargs is not None:
        found["extra_args"] = "vllm_xargs"
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None:
            found["logprobs"] = "top_logprobs"
        if body.get("max_tokens") is None and body.max_completion_tokens is not None:
            found["max_tokens"] = "max_completion_tokens"
    return found


def _read(body: bytes, kind: type[Any], *, drop_unknown: bool) -> Any:
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise undecodable(body) or InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidRequest("the body must be an object")
    names = kind.__struct_fields__
    unknown = [name for name in tree if name not in names]
    if unknown and not drop_unknown:
        raise InvalidRequest(f"{unknown[0]} is not a field of this route", param=unknown[0])
    for name in (
        *OPAQUE_FIELDS,
        "vllm_xargs",
        "metadata",
        "response_format",
        "chat_template_kwargs",
        "messages",
        "tools",
    ):
        if name in tree and name in names:
            check_opaque(tree[name], param=name)
    with _refusals():
        found = msgspec.convert({name: tree[name] for name in tree if name in names}, kind, strict=True, str_keys=True)
    _check_common(found)
    return found


def _named(error: InvalidRequest) -> InvalidRequest:
    """msgspec's path begins with a dot where the root has no name."""
    param = (error.param or "").removeprefix(".")
    return InvalidRequest(error.message.removeprefix(".").removeprefix(": "), param=param or None)


def read_fields(body: bytes, kind: type[Any]) -> Any:
    """A small JSON object as a struct.

    Raises:
        InvalidRequest: naming the field.
    """
    with _refusals():
        return msgspec.json.decode(body, type=kind)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What msgspec says of a body, as our error."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _named(invalid_from_msgspec(error, root="")) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _check_common(body: EvaluationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.stream and body.get("prompt_logprobs") is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream: true", param="prompt_logprobs")
    if body.store:
        raise InvalidRequest("store is true; nothing is stored here", param="store")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, has {len(body.cache_salt)}", param="cache_salt"
        )
    if body.priority is not None and not -(2**31) <= body.priority < 2**31:
        raise InvalidRequest(f"priority must be a 32-bit integer, got {body.priority}", param="priority")
    if body.rollplane is not None:
        check_options(body.rollplane, max_deadline_s=RequestLimits().max_deadline_s)


def _structure(body: EvaluationBody) -> dict[str, Any] | None:
    """What `response_format` asks of the engine, as `structured_outputs`."""
    asked = body.response_format
    if asked is None or asked.get("type") == "text":
        return None
    if body.get("structured_outputs") is not None:
        raise InvalidRequest("response_format and structured_outputs exclude each other", param="response_format")
    if asked.get("type") == "json_object":
        return {"json_object": True}
    schema = asked.get("json_schema")
    if asked.get("type") == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json": schema["schema"]}
    raise InvalidRequest(
        "response_format.type must be text, json_object, or json_schema with json_schema.schema",
        param="response_format",
    )


def _ids(values: Any, *, where: str) -> Int32Array:
    if not values:
        raise InvalidRequest(f"{where} must not be empty", param=where)
    low, high = min(values), max(values)
    if low < 0 or high > INT32_MAX:
        raise InvalidRequest(f"{where} holds {low if low < 0 else high}, outside [0, {INT32_MAX}]", param=where)
    return np.asarray(values, dtype=np.int32)
