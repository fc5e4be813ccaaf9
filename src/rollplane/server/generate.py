"""`POST /inference/v1/generate`: read, run, fold, write; unary here, streams in `server.sse`."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp

from rollplane.admission import wants_mask, wants_routes
from rollplane.engines.base import whole_of
from rollplane.errors import InvalidRequest, Unavailable
from rollplane.fold import FoldPlan, folded
from rollplane.protocol.answer import RoutesForm, encode_json, encode_msgpack, encode_pieces, json_pieces
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.pieces import Piece
from rollplane.protocol.request import JSON, MSGPACK, GenerateRequest, parse_request
from rollplane.server.engine_calls import BIG_BODY_BYTES, BIG_NUMBERS, any_big, info_of
from rollplane.server.error_responses import as_rollplane_error
from rollplane.server.observe import REQUEST_ID
from rollplane.server.peer import head_of, peer_of
from rollplane.server.pieces import PiecesAnswer
from rollplane.server.service import Service
from rollplane.server.sse import EventStream
from rollplane.server.watch import read_body, run_unanswered
from rollplane.server.whole import WholeAnswer

EVENT_STREAM: Final = "text/event-stream"


async def generate(
    request: Request,
    *,
    routes: RoutesForm | None = None,
    prepare: Callable[[GenerateRequest], None] | None = None,
) -> ASGIApp:
    """Serve one Generate request, under whichever of its names.

    Args:
        routes: the form of routed experts in a whole answer; None: what the request or the settings say.
        prepare: what this name checks and sets in the request, before it runs.

    Raises:
        RollplaneError: before the first byte of an answer; translated by the app.
    """
    service: Service = request.app.state.service
    head, peer = head_of(request.scope), peer_of(request.scope)
    arrived = time.monotonic()
    stream = False
    try:
        if service.lifecycle.draining:
            raise Unavailable("this server is on its way out")
        body = await read_body(
            request.receive,
            limit_bytes=service.settings.max_body_bytes,
            headers=head,
            timeout_s=service.settings.body_timeout_s,
            peer=peer,
        )
        asked = await read_request(head, body, service)
        del body
        if prepare is not None:
            prepare(asked)
        stream = asked.stream
        request.scope[REQUEST_ID] = asked.request_id
        wanted = wanted_type(head.get("accept"), stream=stream)
        info = await info_of(service, request.receive, asked.head, options=asked.options)
        plan = plan_for(asked, info, exact=service.role == "worker")
        encoding = asked.options.routed_experts_encoding or service.settings.routes_encoding
        if stream:
            return EventStream(service, asked, plan, routes=encoding, arrived=arrived)
        with service.one_in_flight():
            work = _answer(service, asked, plan, wanted=wanted, routes=routes or encoding)
            answer = await run_unanswered(work, request.receive, peer=peer)
    except Exception as error:
        found = as_rollplane_error(error)
        service.metrics.count_error(found, stream=stream)
        raise found from error
    service.metrics.count_whole(time.monotonic() - arrived)
    if isinstance(answer, bytes):
        return WholeAnswer(answer, kind=wanted.encode())
    return PiecesAnswer(answer, media_type=wanted, stall_s=service.settings.write_stall_s)


async def read_request(head: Mapping[str, str], body: bytes, service: Service) -> GenerateRequest:
    """The checked request in a body and its head; a big one is read in the pool."""
    kind = head.get("content-type", JSON)
    read = functools.partial(parse_request, body, content_type=kind, headers=head, limits=service.limits)
    return await service.in_pool(read, big=len(body) > BIG_BODY_BYTES)


@functools.lru_cache(maxsize=64)
def wanted_type(accept: str | None, *, stream: bool) -> str:
    """The content type of the answer: JSON unless msgpack is named; a stream is always server-sent events.

    Raises:
        InvalidRequest: msgpack alone was asked for, with `stream: true`.
    """
    names = [part.split(";", 1)[0].strip().lower() for part in (accept or "*/*").split(",")]
    if not stream:
        return MSGPACK if MSGPACK in names else JSON
    if names == [MSGPACK]:
        raise InvalidRequest(f"a stream is written as {EVENT_STREAM}, and Accept names {MSGPACK} only", param="Accept")
    return EVENT_STREAM


def plan_for(request: GenerateRequest, info: EngineInfo, *, exact: bool = True) -> FoldPlan:
    """What the answer to a request must look like.

    Args:
        exact: this engine's capabilities are the ones that serve the request, so what it gives by default must be
            there. False for a fleet, whose workers may differ: then it may be there.
    """
    routes: bool | None = request.options.routed_experts
    mask: bool | None = request.options.sampling_mask
    if exact or request.scores_only:
        routes, mask = wants_routes(request, info), wants_mask(request, info)
    return FoldPlan(
        request_id=request.request_id,
        model=request.model or info.model,
        choices=request.sampling.choices,
        prompt_tokens=None if request.content_parts is not None else request.prompt_tokens,
        logprobs=request.sampling.get("logprobs") is not None,
        routes=routes,
        mask=mask,
        prompt_logprobs=request.sampling.get("prompt_logprobs") is not None,
        routes_start=request.sampling.get("routed_experts_prompt_start"),
    )


async def _answer(
    service: Service, request: GenerateRequest, plan: FoldPlan, *, wanted: str, routes: RoutesForm
) -> bytes | list[Piece]:
    events = await whole_of(service.engine, request)
    big = any_big(events)
    response = await service.in_pool(folded, events, plan, big=big)
    service.metrics.count_response(response)
    if not big and response.usage.completion_tokens <= BIG_NUMBERS:
        return encode_msgpack(response) if wanted == MSGPACK else encode_json(response, routes=routes)

    def write() -> list[Piece]:
        return encode_pieces(response) if wanted == MSGPACK else json_pieces(response, routes=routes)

    return await service.in_pool(write)
