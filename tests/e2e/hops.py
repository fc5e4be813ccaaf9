"""One engine behind every chain of hops that a request can take, each hop on a real socket.

`HOPS` names them; a promise about answers is shown through all of them, for a proxy is where side channels get lost.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from tests.contract.grpc_over_mock import GrpcOverMock
from tests.e2e.server_support import Served, eventually, serving

from rollplane.discovery.static import StaticDiscovery
from rollplane.engines.base import Engine
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.rl.fleet import Fleet
from rollplane.router.router import Router
from rollplane.worker import Worker, WorkerSettings

WORKER: Final = "worker"
FRONTEND: Final = "frontend"
SIDECAR: Final = "sidecar"
FRONTEND_SIDECAR: Final = "frontend-sidecar"

HOPS: Final = (WORKER, FRONTEND, SIDECAR, FRONTEND_SIDECAR)
"""client > worker; client > frontend > worker; the same two with a worker that speaks gRPC to its engine."""

FULL_HOPS: Final = (WORKER, FRONTEND)
"""Those that carry routed experts and sampling masks: vLLM's gRPC wire cannot."""


@dataclass(frozen=True)
class Chain:
    """`edge` is what a client talks to; `engine` makes the tokens."""

    edge: Served
    engine: Engine


@contextlib.asynccontextmanager
async def chain(hops: str, engine: Engine | MockSettings, *, sndbuf: int | None = None) -> AsyncIterator[Chain]:
    """Serve an engine, or a mock with these settings, through `hops`; `sndbuf`: bytes of the edge's send buffers."""
    if hops in (SIDECAR, FRONTEND_SIDECAR):
        if not isinstance(engine, MockSettings):
            raise TypeError("the mock gRPC server serves a mock engine")
        made: Engine = GrpcOverMock(engine, tokens_per_message=1)
    else:
        made = MockEngine(engine) if isinstance(engine, MockSettings) else engine
    async with contextlib.AsyncExitStack() as stack:
        own = Worker(made, settings=WorkerSettings(name="worker-0"))
        worker = await stack.enter_async_context(serving(own, sndbuf=sndbuf))
        edge = worker
        if hops in (FRONTEND, FRONTEND_SIDECAR):
            fleet = Fleet()
            router = Router(fleet, discovery=StaticDiscovery([worker.url]))
            edge = await stack.enter_async_context(serving(router, role="frontend", admin=fleet, sndbuf=sndbuf))

            async def joined() -> bool:
                return bool(fleet.members) and all(member.routable for member in fleet.members)

            await eventually(joined)
        yield Chain(edge, made)
