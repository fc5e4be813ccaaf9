"""The innermost middleware: what is asked most goes to its route without a walk through the table of all of them."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollplane.errors import RollplaneError
from rollplane.server.error_responses import on_rollplane_error
from rollplane.server.routes import ApiRoute, Handler


class DirectMiddleware:
    """Calls the handlers of `paths` itself; everything else passes on.

    Args:
        routes: the app's, whose handlers and methods these are.
        paths: of routes without parameters.
    """

    def __init__(self, app: ASGIApp, *, routes: Sequence[ApiRoute], paths: Sequence[str]) -> None:
        self._app = app
        self._handlers: dict[tuple[str, str], Handler] = {
            (method, route.path): route.handler
            for route in routes
            if route.path in paths
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; errors of ours that leave the handler are translated as the app does."""
        handler = self._handlers.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            answer = await handler(request)
        except RollplaneError as error:
            answer = await on_rollplane_error(request, error)
        await answer(scope, receive, send)
