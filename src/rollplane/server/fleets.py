"""One address for several fleets: `/fleets/<name>/...` is the whole API of one, everything else that of all.

The first fleet is what the root administers, so a trainer that knows one policy needs no prefix.
"""

import dataclasses
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from rollplane.router.models import Models
from rollplane.server.app import create_app
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service

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


def fleet_services(service: Service, models: Models) -> dict[str, Service]:
    """What the whole API of each fleet serves."""
    return {
        name: dataclasses.replace(service, engine=router, admin=router.fleet, metrics=Metrics())
        for name, router in models.routers.items()
    }


def with_fleets(root: ASGIApp, service: Service, models: Models) -> FleetPaths:
    """The root's app, and beside it the whole API of each fleet."""
    return FleetPaths(root, {name: create_app(one) for name, one in fleet_services(service, models).items()})
