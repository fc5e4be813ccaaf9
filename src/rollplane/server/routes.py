"""One HTTP route as data: how it is served, who may call it, and what its description says."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from rollplane.server.auth import Access

Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True, kw_only=True)
class Doc:
    """What the API description says of a route.

    `body` and `answer`: record types (None: no JSON body, or another content type). `query`: name -> schema. `errors`: statuses
    that callers should expect beside 401, 403 and 500.
    """

    summary: str
    tag: str
    body: Any = None
    body_required: bool = True
    answer: Any = None
    answer_type: str = "application/json"
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: Sequence[int] = ()
    hidden: bool = False


class ApiRoute(Route):
    """A Starlette route with its access and its description."""

    def __init__(self, path: str, handler: Handler, *, methods: Sequence[str], access: Access, doc: Doc) -> None:
        super().__init__(path, handler, methods=list(methods))
        self.handler = handler
        self.access = access
        self.doc = doc

    def __repr__(self) -> str:
        return f"<ApiRoute {'|'.join(sorted(self.methods or ()))} {self.path} ({self.access})>"
