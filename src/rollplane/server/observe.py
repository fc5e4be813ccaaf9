"""The outermost middleware: a request id on every answer, and an answer of our shape for every unexpected error."""

import os
from typing import Final
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollplane.server.error_responses import as_rollplane_error, error_response
from rollplane.server.peer import head_of

MAX_ECHOED_CHARS = 256
REQUEST_ID: Final = "rollplane.request_id"
"""In a request's scope: its id, once that is known."""


class ObserveMiddleware:
    """Sets `X-Request-Id` (the caller's, the request's own, or a new one) and turns stray exceptions into a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; see the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = head_of(scope).get("x-request-id")
        if given and len(given) <= MAX_ECHOED_CHARS:
            scope[REQUEST_ID] = given
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), id_header(scope)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                raise
            await error_response(as_rollplane_error(error))(scope, receive, send_with_id)


def id_header(scope: Scope) -> tuple[bytes, bytes]:
    """The header of an answer that names its request, which has a new name where it came without one."""
    known: str | None = scope.get(REQUEST_ID)
    if known is None:
        known = scope[REQUEST_ID] = os.urandom(16).hex()
    return b"x-request-id", header_text(known).encode("latin-1")


def header_text(request_id: str) -> str:
    """A request id as a header value: itself where it is ASCII, else percent-encoded."""
    return request_id if request_id.isascii() and request_id.isprintable() else quote(request_id)
