"""The HTTP app of a worker or a frontend: routes and middleware, all in one place.

Requests pass, from the outside in: `ObserveMiddleware` (request id, unexpected errors), `AuthMiddleware` (access by the
same route table), `DirectMiddleware` (a shorter way to the routes asked most), then the route. All are pure ASGI, so streams
and disconnects pass untouched.
"""

from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp

from rollplane.errors import RollplaneError
from rollplane.protocol.hop import GENERATE_PATH, KEYS_PATH, STATE_PATH
from rollplane.protocol.kv_events import KV_EVENTS_PATH
from rollplane.server.admin import engine_routes
from rollplane.server.auth import AuthMiddleware
from rollplane.server.broadcast import broadcast_routes
from rollplane.server.compat import compat_routes
from rollplane.server.direct import DirectMiddleware
from rollplane.server.error_responses import error_response, on_http_exception, on_rollplane_error
from rollplane.server.generate import generate
from rollplane.server.health import health_routes
from rollplane.server.hop import hop_generate
from rollplane.server.keys import keys
from rollplane.server.kv_events import kv_events
from rollplane.server.native import native_routes
from rollplane.server.observe import ObserveMiddleware
from rollplane.server.openai import openai_routes
from rollplane.server.openapi import describe, docs, openapi
from rollplane.server.operations import operation_routes
from rollplane.server.placement_metrics import PlacementCollector, Placing
from rollplane.server.render import RENDER_PATH, render_media, render_routes
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.server_info import server_info_routes
from rollplane.server.service import Service
from rollplane.server.skyrl import skyrl_routes
from rollplane.server.state import state
from rollplane.server.wire_docs import GenerateAnswer, GenerateBody

GENERATE_ERRORS = (400, 404, 409, 413, 415, 422, 429, 502, 503, 504)


def create_app(service: Service) -> Starlette:
    """The app that serves a worker or a frontend."""
    routes = route_table(service.role)
    if isinstance(service.engine, Placing):
        service.metrics.registry.register(PlacementCollector(service.engine))
    app = App(
        routes=list(routes),
        middleware=[
            Middleware(ObserveMiddleware),
            Middleware(
                AuthMiddleware, keys=service.keys, routes=routes, refuse=error_response, admin_port=service.admin_port
            ),
            Middleware(DirectMiddleware, routes=routes, paths=(GENERATE_PATH, "/inference/v1/generate")),
        ],
        exception_handlers=_handlers(),
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body, and `//health` is not `/health`
    app.state.service = service
    app.state.openapi = describe(routes, title=f"Rollplane {service.role}", keyed=not service.keys.open)
    return app


class App(Starlette):
    """Starlette without its outermost middleware: `ObserveMiddleware` answers stray exceptions, in our shape."""

    def build_middleware_stack(self) -> ASGIApp:
        """See `Starlette.build_middleware_stack`."""
        app: ASGIApp = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        for kind, args, options in reversed(self.user_middleware):
            app = kind(app, *args, **options)
        return app


def route_table(role: str) -> list[ApiRoute]:
    """Every route of a role."""
    routes = [
        ApiRoute(
            "/inference/v1/generate",
            generate,
            methods=["POST"],
            access="data",
            doc=Doc(
                summary="Token ids in, token ids out",
                tag="data",
                body=GenerateBody,
                answer=GenerateAnswer,
                errors=GENERATE_ERRORS,
            ),
        ),
        *openai_routes(),
        *render_routes(),
        *server_info_routes(),
        *health_routes(),
        *engine_routes(),
        *operation_routes(),
        *broadcast_routes(),
        *native_routes(),
        *compat_routes(),
        *skyrl_routes(),
        ApiRoute(
            "/openapi.json",
            openapi,
            methods=["GET"],
            access="data",
            doc=Doc(summary="This description", tag="description"),
        ),
        ApiRoute(
            "/docs",
            docs,
            methods=["GET"],
            access="data",
            doc=Doc(summary="This description as a page", tag="description", answer_type="text/html"),
        ),
    ]
    if role == "worker":
        hidden = Doc(summary="Internal", tag="internal", hidden=True)
        # First: what a fleet asks most is matched first.
        routes = [
            ApiRoute(GENERATE_PATH, hop_generate, methods=["POST"], access="admin", doc=hidden),
            ApiRoute(STATE_PATH, state, methods=["GET"], access="admin", doc=hidden),
            ApiRoute(RENDER_PATH, render_media, methods=["POST"], access="admin", doc=hidden),
            ApiRoute(KEYS_PATH, keys, methods=["POST"], access="admin", doc=hidden),
            ApiRoute(KV_EVENTS_PATH, kv_events, methods=["GET"], access="admin", doc=hidden),
            *routes,
        ]
    return routes


def _handlers() -> Mapping[Any, Any]:
    return {RollplaneError: on_rollplane_error, HTTPException: on_http_exception}
