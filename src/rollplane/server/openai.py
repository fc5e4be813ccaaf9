"""`/v1/completions`, `/v1/chat/completions`, `/tokenize` and `/detokenize`: what trainers send their evaluations to.

A body becomes one Generate request per prompt, run on the same engine (on a frontend: through the same router) as rollouts are, so
policy versions, adapters, pauses, deadlines and limits hold alike. Sampling defaults are neutral, and `max_tokens`
omitted is the room left in the context, as on Generate.
"""

import asyncio
import time
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rollplane.errors import InvalidRequest, PayloadTooLarge, Unavailable, UnsupportedMedia
from rollplane.fold import Fold
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.openai import (
    ChatBody,
    CompletionBody,
    EvaluationBody,
    in_callers_words,
    own_names,
    parse_chat,
    parse_completion,
    prompts_of,
    read_fields,
)
from rollplane.protocol.request import (
    JSON,
    ContentPart,
    GenerateRequest,
    RequestHead,
    RequestOptions,
    caller_of,
    request_id_of,
)
from rollplane.protocol.response import GenerateResponse
from rollplane.server.engine_calls import BIG_BODY_BYTES, BIG_NUMBERS, add_event, info_of, running
from rollplane.server.error_responses import as_rollplane_error, json_response
from rollplane.server.generate import plan_for
from rollplane.server.observe import REQUEST_ID
from rollplane.server.openai_answers import Style, encode, whole_answer
from rollplane.server.openai_stream import ChunkStream
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service
from rollplane.server.text import TextModel, chat_messages
from rollplane.server.watch import read_body, run_watched

BIG_TEXT_CHARS: Final = 16_384
TRAFFIC_CLASS: Final = "eval"
"""Whose share of a full fleet these routes count against, where the caller says nothing else."""
ERRORS: Final = (400, 404, 409, 413, 415, 429, 502, 503, 504)


class Asked:
    """One evaluation body as Generate requests, with how its answer is written."""

    def __init__(self, requests: list[GenerateRequest], style: Style, texts: TextModel, body: EvaluationBody) -> None:
        self.requests = requests
        self.style = style
        self.texts = texts
        self.stream_options = body.stream_options
        self.field = "messages" if style.chat else "prompt"

    def __repr__(self) -> str:
        return f"<Asked {self.style.response_id}, {len(self.requests)} prompts>"


async def completions(request: Request) -> ASGIApp:
    """Serve one completion body."""
    return await _serve(request, chat=False)


async def chat_completions(request: Request) -> ASGIApp:
    """Serve one chat body."""
    return await _serve(request, chat=True)


async def _serve(request: Request, *, chat: bool) -> ASGIApp:
    service: Service = request.app.state.service
    arrived = time.monotonic()
    stream, names = False, dict[str, str]()
    try:
        if service.lifecycle.draining:
            raise Unavailable("this server is on its way out")
        body = await evaluation_body(request, service)
        parsed = await parsed_body(service, body, chat=chat)
        stream, names = bool(parsed.stream), own_names(parsed)
        asked = await read_asked(request, service, parsed, body)
        request.scope[REQUEST_ID] = asked.requests[0].request_id
        if stream:
            return ChunkStream(
                service,
                asked.requests,
                asked.style,
                asked.texts,
                options=asked.stream_options,
                field=asked.field,
                names=names,
                arrived=arrived,
            )
        with service.one_in_flight():
            answer = await run_watched(_answer(service, asked), request.receive)
    except Exception as error:
        found = in_callers_words(as_rollplane_error(error), prompt="messages" if chat else "prompt", names=names)
        service.metrics.count_error(found, stream=stream)
        raise found from error
    service.metrics.count_whole(time.monotonic() - arrived)
    return Response(answer, media_type=JSON)


async def parsed_body(service: Service, body: bytes, *, chat: bool) -> EvaluationBody:
    """A body read and checked, as the server is set."""
    drop, reads_tools = service.settings.drop_unknown_sampling, service.settings.tool_call_parser is not None

    def parse() -> EvaluationBody:
        if chat:
            return parse_chat(body, drop_unknown=drop, reads_tools=reads_tools)
        return parse_completion(body, drop_unknown=drop)

    return await service.in_pool(parse, big=len(body) > BIG_BODY_BYTES)


async def evaluation_body(request: Request, service: Service) -> bytes:
    """The JSON body of an evaluation route, within the server's limits."""
    kind = request.headers.get("content-type", JSON).split(";", 1)[0].strip().lower()
    if kind not in (JSON, ""):
        raise UnsupportedMedia(f"Content-Type {kind!r} is not read here; send {JSON}")
    return await read_body(
        request.receive,
        limit_bytes=service.settings.max_body_bytes,
        headers=request.headers,
        timeout_s=service.settings.body_timeout_s,
    )


async def read_asked(request: Request, service: Service, body: EvaluationBody, raw: bytes) -> Asked:
    """A checked body as Generate requests, one per prompt.

    Raises:
        InvalidRequest: no tokenizer here, or a template that does not take the messages. PayloadTooLarge: too many tokens.
    """
    texts = await service.texts.model()
    media: list[ContentPart] = []
    prompts: list[str | Int32Array]
    if isinstance(body, ChatBody):
        messages, media = chat_messages(body.messages)
        prompts = [await service.in_pool(lambda: _render(texts, body, messages), big=len(raw) > BIG_TEXT_CHARS)]
        special = bool(body.add_special_tokens)
    else:
        prompts = prompts_of(body) if isinstance(body, CompletionBody) else []
        special = body.add_special_tokens is not False
    ids = await service.in_pool(
        lambda: [texts.encode(each, special=special) if isinstance(each, str) else each for each in prompts],
        big=len(raw) > BIG_TEXT_CHARS,
    )
    for i, each in enumerate(ids):
        where = "messages" if media or isinstance(body, ChatBody) else "prompt" if len(ids) == 1 else f"prompt[{i}]"
        if each.size == 0:
            raise InvalidRequest(f"{where} has no tokens", param=where)
        if each.size > service.settings.max_prompt_tokens:
            raise PayloadTooLarge(
                f"{where} has {each.size} tokens, the limit is {service.settings.max_prompt_tokens}", param=where
            )
    request_id = request_id_of(request.headers.get("x-request-id"), body.request_id)
    options = _options(request, body)
    names = _names(request_id, prompts=len(ids))
    head = RequestHead(
        names=tuple(dict.fromkeys([request_id, *names])),
        model=body.model,
        caller=caller_of(request.headers.get("authorization")),
        traffic_class=options.traffic_class,
        deadline_s=options.deadline_s,
    )
    info = await info_of(service, request.receive, head, options=options)
    model = body.model or info.model
    style = Style.of(body, model=model, request_id=request_id, routes=service.settings.routes_encoding)
    return Asked(_requests(request, body, raw, ids, media, style, names, options), style, texts, body)


def _names(request_id: str, *, prompts: int) -> list[str]:
    """The request id of each prompt."""
    return [request_id] if prompts == 1 else [f"{request_id}-{i}" for i in range(prompts)]


def _options(request: Request, body: EvaluationBody) -> RequestOptions:
    options = body.rollplane or RequestOptions()
    if options.session_id is None:
        options.session_id = request.headers.get("x-session-id")
    options.traffic_class = options.traffic_class or TRAFFIC_CLASS
    # Evaluations parse strictly and train nothing: side channels are for those who ask.
    options.routed_experts = options.routed_experts or False
    options.sampling_mask = options.sampling_mask or False
    return options


def _render(texts: TextModel, body: ChatBody, messages: list[dict[str, Any]]) -> str:
    return texts.render(
        messages,
        generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_last=bool(body.continue_final_message),
        tools=body.tools or None,
        options=body.chat_template_kwargs,
    )


def _requests(
    request: Request,
    body: EvaluationBody,
    raw: bytes,
    prompts: list[Int32Array],
    media: list[ContentPart],
    style: Style,
    names: list[str],
    options: RequestOptions,
) -> list[GenerateRequest]:
    caller = caller_of(request.headers.get("authorization"))
    digest, key = xxhash.xxh3_128_hexdigest(raw), request.headers.get("idempotency-key")
    one = len(prompts) == 1
    return [
        GenerateRequest(
            request_id=name,
            token_ids=ids,
            sampling=style.sampling,
            model=body.model,
            stream=bool(body.stream),
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            content_parts=media or None,
            return_token_ids=bool(body.return_token_ids and media),
            options=options,
            body_digest=f"{digest}-{i}",
            idempotency_key=key if key is None or one else f"{key}-{i}",
            caller=caller,
        )
        for i, (name, ids) in enumerate(zip(names, prompts, strict=True))
    ]


async def _answer(service: Service, asked: Asked) -> bytes:
    responses = await all_of([_folded(service, each) for each in asked.requests])
    for response in responses:
        service.metrics.count_response(response)
    tokens = sum(response.usage.completion_tokens for response in responses)

    def write() -> bytes:
        prompts = [each.token_ids for each in asked.requests]
        return encode(whole_answer(responses, asked.style, asked.texts, prompts=prompts))

    return await service.in_pool(write, big=tokens > 1024 or tokens * len(responses) > BIG_NUMBERS)


async def _folded(service: Service, request: GenerateRequest) -> GenerateResponse:
    fold = Fold(plan_for(request, service.engine.info, exact=service.role == "worker"))
    async with running(service.engine, request) as events:
        async for event in events:
            await add_event(service, fold, event)
    return fold.response()


async def all_of(work: list[Any]) -> list[Any]:
    """The results of several coroutines; the first error ends the others and is the one raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prompt` or `messages`; `add_special_tokens` is true for prompts and false for chats unless given. `model` has no effect:
    there is one tokenizer.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class Tokens(msgspec.Struct, kw_only=True):
    """Token ids, how many, and the model's context."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids; special ones are written out."""

    tokens: list[int]
    model: str | None = None


class PromptText(msgspec.Struct, kw_only=True):
    """The text."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """The token ids of a text or a chat."""
    service: Service = request.app.state.service
    body = read_fields(await evaluation_body(request, service), TokenizeBody)
    texts = await service.texts.model()
    if (body.prompt is None) is (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.messages is not None:
        messages, _ = chat_messages(body.messages)
        text = texts.render(messages, generation_prompt=body.add_generation_prompt, options=body.chat_template_kwargs)
        special = bool(body.add_special_tokens)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
    ids = await service.in_pool(lambda: texts.encode(text, special=special), big=len(text) > BIG_TEXT_CHARS)
    return json_response(
        Tokens(tokens=ids.tolist(), count=int(ids.size), max_model_len=service.engine.info.max_model_len)
    )


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service: Service = request.app.state.service
    body = read_fields(await evaluation_body(request, service), DetokenizeBody)
    bound = service.engine.info.vocab_bound
    for i, token in enumerate(body.tokens):
        if not 0 <= token < bound:
            raise InvalidRequest(f"tokens[{i}] is {token}, outside [0, {bound})", param=f"tokens[{i}]")
    texts = await service.texts.model()
    ids = np.asarray(body.tokens, dtype=np.int32)
    text = await service.in_pool(lambda: texts.decode(ids, skip_special=False), big=ids.size > BIG_TEXT_CHARS)
    return json_response(PromptText(prompt=text))


def openai_routes() -> list[ApiRoute]:
    """The evaluation routes."""
    table: list[tuple[str, Any, str, Any, Any]] = [
        ("/v1/completions", completions, "Text or token ids in, text out", CompletionBody, None),
        ("/v1/chat/completions", chat_completions, "A chat in, the next message out", ChatBody, None),
        ("/tokenize", tokenize, "Token ids of a text or a chat", TokenizeBody, Tokens),
        ("/detokenize", detokenize, "Text of token ids", DetokenizeBody, PromptText),
    ]
    return [
        ApiRoute(
            path,
            handler,
            methods=["POST"],
            access="data",
            doc=Doc(summary=summary, tag="evaluation", body=body, answer=answer, errors=ERRORS),
        )
        for path, handler, summary, body, answer in table
    ]
