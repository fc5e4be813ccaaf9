"""`/v1/chat/completions/render`: a chat as the Generate request that would answer it, media as features; vLLM's name.

TRL's and SkyRL's clients let the server process their images so and then send what came back, with token ids of their own, to
Generate. The template and the tokens are made where the request arrives; media go to an engine that processes raw ones.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollplane.engines.base import MediaRenderer
from rollplane.errors import InvalidRequest
from rollplane.protocol.openai import ChatBody
from rollplane.protocol.rendered import RENDER_PATH as RENDER_PATH
from rollplane.protocol.rendered import RenderBody, Rendered
from rollplane.protocol.request import GenerateRequest
from rollplane.router.models import Models
from rollplane.router.router import Router
from rollplane.server.admin_calls import decode_body
from rollplane.server.error_responses import json_response
from rollplane.server.openai import ERRORS, evaluation_body, parsed_body, read_asked
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service


class RenderedChat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A body that Generate takes."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    features: dict[str, Any] | None
    cache_salt: str | None = None
    priority: int = 0


async def render_chat(request: Request) -> Response:
    """Apply the template, tokenize, and process the media."""
    service: Service = request.app.state.service
    raw = await evaluation_body(request, service)
    body = await parsed_body(service, raw, chat=True)
    asked = await read_asked(request, service, body, raw)
    (one,) = asked.requests
    token_ids, features = one.token_ids.tolist(), None
    if one.content_parts:
        rendered = await _with_features(service, one)
        token_ids, features = rendered.token_ids, rendered.features
    return json_response(
        RenderedChat(
            request_id=one.request_id,
            model=one.model or service.engine.info.model,
            token_ids=token_ids,
            sampling_params=msgspec.to_builtins(one.sampling),
            features=features,
            cache_salt=one.cache_salt,
            priority=one.priority,
        )
    )


async def _with_features(service: Service, request: GenerateRequest) -> Rendered:
    body = RenderBody(token_ids=request.token_ids.tolist(), content_parts=request.content_parts or [])
    if isinstance(service.engine, Router | Models):
        return await service.engine.render_media(body, model=request.model)
    return await _renderer(service).render_media(body)


async def render_media(request: Request) -> Response:
    """A frontend asks this worker to process media."""
    service: Service = request.app.state.service
    body = await decode_body(request, RenderBody, limit_bytes=service.settings.max_body_bytes)
    return json_response(await _renderer(service).render_media(body))


def _renderer(service: Service) -> MediaRenderer:
    if not isinstance(service.engine, MediaRenderer):
        raise InvalidRequest(
            f"the {service.engine.info.engine} engine makes no features of raw media", param="messages"
        )
    return service.engine


def render_routes() -> list[ApiRoute]:
    """The public route."""
    return [
        ApiRoute(
            "/v1/chat/completions/render",
            render_chat,
            methods=["POST"],
            access="data",
            doc=Doc(
                summary="A chat as a Generate request, media as features",
                tag="evaluation",
                body=ChatBody,
                answer=RenderedChat,
                errors=ERRORS,
            ),
        )
    ]
