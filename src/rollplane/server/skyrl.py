"""SkyRL's own names, beside vLLM's that it also uses (`server.compat`, `server.openai`): the same calls, in its shapes.

Its client asks for routed experts by the route it posts to and reads them as JSON lists; loads an adapter by a name of its own; and
tells the router when a trajectory has ended.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from rollplane.errors import InvalidRequest
from rollplane.protocol.request import GenerateRequest
from rollplane.server.compat import LoadAdapterBody, load_adapter
from rollplane.server.error_responses import json_response
from rollplane.server.generate import generate
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.wire_docs import GenerateBody, ListsAnswer


async def generate_with_routes(request: Request) -> ASGIApp:
    """Generate with `routed_experts` required, written as lists [prompt + completion - 1, layers, top_k].

    Raises:
        RollplaneError: see `server.generate.generate`; a model without routed experts is refused.
    """
    return await generate(request, routes="nested", prepare=_require_routes)


def _require_routes(asked: GenerateRequest) -> None:
    """Lists state neither a start nor an encoding, and a stream has its own form."""
    if asked.stream:
        raise InvalidRequest("this route answers whole; stream from /inference/v1/generate", param="stream")
    if asked.sampling.get("routed_experts_prompt_start"):
        raise InvalidRequest(
            "routed experts are lists here, which begin at the prompt's first token; leave "
            "routed_experts_prompt_start out, or ask /inference/v1/generate",
            param="sampling_params.routed_experts_prompt_start",
        )
    if asked.options.routed_experts is False or asked.options.routed_experts_encoding is not None:
        field = "routed_experts" if asked.options.routed_experts is False else "routed_experts_encoding"
        raise InvalidRequest(
            f"this route always gives routed experts, as lists: rollplane.{field} belongs to /inference/v1/generate",
            param=f"rollplane.{field}",
        )
    asked.options.routed_experts = True
    asked.body_digest += "-skyrl"  # the same body on Generate's own route is another request


async def finish_session(request: Request) -> Response:
    """A session has ended. It reserves nothing here (it only prefers the worker that has its prefix), so nothing is released."""
    session = request.query_params.get("session_id", "")
    if not session:
        raise InvalidRequest("query parameter session_id must name a session", param="session_id")
    return json_response({"status": "ok"})


def skyrl_routes() -> list[ApiRoute]:
    """What SkyRL's remote client calls under names of its own."""
    return [
        ApiRoute(
            "/skyrl/v1/generate",
            generate_with_routes,
            methods=["POST"],
            access="data",
            doc=Doc(
                summary="Generate with routed experts as lists",
                tag="compatibility",
                body=GenerateBody,
                answer=ListsAnswer,
                errors=(400, 404, 409, 413, 415, 422, 429, 502, 503, 504),
            ),
        ),
        ApiRoute(
            "/skyrl/v1/load_lora_adapter",
            load_adapter,
            methods=["POST"],
            access="admin",
            doc=Doc(
                summary="Load an adapter",
                tag="compatibility",
                body=LoadAdapterBody,
                errors=(400, 404, 409, 413, 415, 502, 503, 504),
            ),
        ),
        ApiRoute(
            "/finish_session",
            finish_session,
            methods=["POST"],
            access="data",
            doc=Doc(
                summary="A session has ended (nothing is held for it)",
                tag="compatibility",
                query={"session_id": {"schema": {"type": "string"}}},
                errors=(400,),
            ),
        ),
    ]
