"""What the processes of one frontend ask each other, on sockets in a directory of their own; and what they pass on.

A follower passes administration and `/metrics` to the owner as they came; whoever asked is known there by the same keys.
"""

import asyncio
import contextlib
import dataclasses
import socket
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollplane.engines.remote import ABORT_PATH
from rollplane.errors import Cancelled, NotFound, RollplaneError, TransportError
from rollplane.protocol.hop import GENERATE_PATH
from rollplane.rl.followed import FollowedFleet
from rollplane.router.router import Router
from rollplane.server.admin import MAX_MANIFEST_BYTES, AbortBody, abort
from rollplane.server.admin_calls import canonical
from rollplane.server.app import route_table
from rollplane.server.crew import (
    ABORT_ALL_PATH,
    FLEET_PATH,
    METRICS_PATH,
    OWNER,
    QUEUE_PATH,
    VIEW_PATH,
    Crew,
    Follower,
    Teller,
    owner_gone,
)
from rollplane.server.crew_metrics import Page
from rollplane.server.crew_queue import Admitted, Ask, enter
from rollplane.server.crew_router import CrewRouter
from rollplane.server.error_responses import error_response, on_rollplane_error
from rollplane.server.fleets import PREFIX
from rollplane.server.health import metrics_text
from rollplane.server.hop import hop_generate
from rollplane.server.metrics import Metrics
from rollplane.server.ops import make_server
from rollplane.server.routes import ApiRoute
from rollplane.server.service import Service
from rollplane.server.watch import read_body, run_unanswered, run_watched

NOT_PASSED: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "expect"})
"""Headers of one connection alone."""
BODY_S: Final = 60.0
PASSED_FOR: Final = b"x-rollplane-passed-for"
"""Host and port of the caller of what a follower passes on; read on the processes' own sockets alone."""
ROOT_APP: Final = "root"
"""The name of the metrics of the app that no fleet's prefix leads to."""
STOP_S: Final = 5.0


@contextlib.asynccontextmanager
async def in_crew(
    crew: Crew, public: ASGIApp, service: Service, *, routers: Mapping[str, Router], apps: Mapping[str, Service]
) -> AsyncGenerator[ASGIApp, None]:
    """Answer the other processes, and follow or lead them; what the public port is to serve.

    Args:
        public: the whole app. service: of its root. routers: by fleet, of this crew. apps: services by metrics' name.
    """
    fleets = {name: router.fleet for name, router in routers.items()}
    routes = route_table("frontend")
    teller = Teller(fleets) if crew.owns else None
    followed = {name: fleet for name, fleet in fleets.items() if isinstance(fleet, FollowedFleet)}
    follower = None if crew.owns else Follower(crew, followed)
    ours = {name: router for name, router in routers.items() if isinstance(router, CrewRouter)}
    inner = public if teller is None else Settled(public, teller, routes=routes)
    path = crew.socket_of(crew.index)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.setblocking(False)
        plain = msgspec.structs.replace(service.settings, tls_cert_file=None, tls_key_file=None)
        server = make_server(internal_app(service, inner, routers=ours, apps=apps, teller=teller), plain)
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="the other processes")
        try:
            if follower is not None:
                follower.start()
                yield PassOn(public, crew, routes=routes, owners_port=service.admin_port is not None)
            else:
                yield inner
        finally:
            if follower is not None:
                await follower.close()
            server.should_exit = True
            done, _ = await asyncio.wait({serving}, timeout=STOP_S)
            if not done:
                serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def internal_app(
    service: Service,
    public: ASGIApp,
    *,
    routers: Mapping[str, CrewRouter],
    apps: Mapping[str, Service],
    teller: Teller | None,
) -> ASGIApp:
    """What the other processes reach here.

    Args:
        service: of the root's app.
        public: the whole app; the owner answers what followers pass on with it.
        routers: by fleet.
        apps: the services whose metrics are asked for, by name.
        teller: the owner's; None on a follower, whose queues are not asked either.
    """
    life = uuid.uuid4().hex

    async def view(request: Request) -> Response:
        if teller is None:
            raise NotFound("this process is not the control owner")
        query = request.query_params
        told = teller.told(int(query["process"]), owner=query["owner"], after=int(query["after"]))
        return Response(await run_unanswered(told, request.receive))

    async def queue(request: Request) -> ASGIApp:
        router = routers.get(request.path_params["fleet"])
        if router is None or teller is None:
            raise NotFound("this process has no such queue")
        wanted = router.queue
        ask = msgspec.json.decode(await request.body(), type=Ask)
        return Admitted(wanted, await run_unanswered(enter(wanted, ask), request.receive))

    async def metrics(request: Request) -> Response:
        asked = apps.get(request.path_params["app"])
        if asked is None:
            raise NotFound("there is no such app")
        text, held = await metrics_text(asked)
        return Response(msgspec.json.encode(Page(life=life, held=held, text=text.decode())))

    app = Starlette(
        routes=[
            *(Mount(FLEET_PATH + name, _fleet_app(service, router)) for name, router in routers.items()),
            Route(VIEW_PATH, view, methods=["GET"]),
            Route(QUEUE_PATH + "{fleet}", queue, methods=["POST"]),
            Route(METRICS_PATH + "{app}", metrics, methods=["GET"]),
        ],
        exception_handlers={RollplaneError: on_rollplane_error},
    )

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        caller = dict(scope.get("headers", ())).get(PASSED_FOR)
        if caller is None:
            await app(scope, receive, send)
        else:
            host, _, port = caller.decode().rpartition(" ")
            await public({**scope, "client": (host, int(port))}, receive, send)

    return either


def _fleet_app(service: Service, router: CrewRouter) -> Starlette:
    """One fleet's requests of this process alone, for the other processes."""

    async def end_all(_: Request) -> Response:
        return Response(str(await router.abort_all_here()))

    app = Starlette(
        routes=[
            Route(GENERATE_PATH, hop_generate, methods=["POST"]),
            Route(ABORT_PATH, canonical("abort_request", AbortBody, abort), methods=["POST"]),
            Route(ABORT_ALL_PATH, end_all, methods=["POST"]),
        ],
        exception_handlers={RollplaneError: on_rollplane_error},
    )
    # Counted where the caller is, not here.
    app.state.service = dataclasses.replace(service, engine=router.here, admin=None, metrics=Metrics())
    return app


class PassOn:
    """Passes what is the owner's to it, on a follower.

    Args:
        routes: of the app.
        owners_port: the owner alone listens for administration, so it is not asked for here.
    """

    def __init__(self, app: ASGIApp, crew: Crew, *, routes: Sequence[ApiRoute], owners_port: bool) -> None:
        self._app = app
        self._crew = crew
        self._routes = [
            route for route in routes if route.path == "/metrics" or (route.access == "admin" and not owners_port)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and is_of(scope, self._routes):
            try:
                body = await read_body(
                    receive, limit_bytes=MAX_MANIFEST_BYTES, headers=Headers(scope=scope), timeout_s=BODY_S
                )
                with contextlib.suppress(Cancelled):  # by its own last byte, or a caller that hung up
                    await run_watched(self._pass(scope, body, send), receive)
            except RollplaneError as error:
                await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _pass(self, scope: Scope, body: bytes, send: Send) -> None:
        url = f"http://process-{OWNER}{scope['raw_path'].decode()}"
        if scope["query_string"]:
            url += f"?{scope['query_string'].decode()}"
        headers = [(k.decode(), v.decode("latin-1")) for k, v in scope["headers"] if k.decode() not in NOT_PASSED]
        host, port = scope.get("client") or ("unknown", 0)
        headers.append((PASSED_FOR.decode(), f"{host} {port}"))
        timeout = aiohttp.ClientTimeout(total=None)
        started = False
        try:
            async with self._crew.session(OWNER).request(
                scope["method"],
                url,
                headers=headers,
                data=body or None,
                timeout=timeout,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as answer:
                passed = [(k.lower(), v) for k, v in answer.raw_headers if k.lower().decode() not in NOT_PASSED]
                await send({"type": "http.response.start", "status": answer.status, "headers": passed})
                started = True
                async for part in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (aiohttp.ClientError, OSError) as error:
            if started:
                raise
            raise owner_gone(TransportError(repr(error))) from error


class Settled:
    """Answers administration once every follower knows what came of it; on the owner."""

    def __init__(self, app: ASGIApp, teller: Teller, *, routes: Sequence[ApiRoute]) -> None:
        self._app = app
        self._teller = teller
        self._routes = [route for route in routes if route.access == "admin"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""

        async def send_settled(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._teller.settled()
            await send(message)

        changes = scope["type"] == "http" and scope["method"] != "GET" and is_of(scope, self._routes)
        await self._app(scope, receive, send_settled if changes else send)


def is_of(scope: Scope, routes: Sequence[ApiRoute]) -> bool:
    """Whether a request is for one of these routes, also below a fleet's prefix."""
    path: str = scope["path"]
    if path.startswith(PREFIX):
        path = "/" + path.removeprefix(PREFIX).partition("/")[2]
    there = {**scope, "path": path, "root_path": ""}
    return any(route.matches(there)[0] is not Match.NONE for route in routes)
