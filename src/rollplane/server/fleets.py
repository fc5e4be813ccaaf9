"""One address for several fleets: `/fleets/<name>/...` is the whole API of one, everything else that of all.

The first fleet is what the root administers, so a trainer that knows one policy needs no prefix.
"""

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/fleets/"


class FleetPaths:
    """Sends a request to the app of the fleet that its path names; other paths, and unknown names, to the root's app."""

    def __init__(self, root: ASGIApp, fleets: Mapping[str, ASGIApp]) -> None:
        self.root = root
        self.fleets = dict(fleets)

    def __repr__(self) -> str:
        return f"<FleetPaths {', '.join(self.fleets)}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        path: str = scope.get("path", "")
        if scope["type"] == "http" and path.startswith(PREFIX):
            name, _, rest = path.removeprefix(PREFIX).partition("/")
            app = self.fleets.get(name)
            if app is not None:
                inner = f"/{rest}"
                await app({**scope, "path": inner, "raw_path": inner.encode()}, receive, send)
                return
        await self.root(scope, receive, send)
