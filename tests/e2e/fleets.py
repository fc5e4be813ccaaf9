"""Workers and frontends on real sockets in the test's own event loop, so that a test sees both ends of every hop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path

import uvicorn

from rollplane.config import ServerSettings
from rollplane.discovery.static import StaticDiscovery
from rollplane.engines.base import Engine
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.rl.fleet import Fleet, FleetSettings
from rollplane.rl.remote import RemoteWorker
from rollplane.router.policies import Policy
from rollplane.router.router import Router, RouterSettings
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.worker import Worker, WorkerSettings

WAIT_S = 20.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # signals belong to the test runner


class Served:
    """One app on a socket; `kill` drops every connection at once, as the end of a process does."""

    def __init__(self, service: Service, *, port: int = 0) -> None:
        self.service = service
        self._config = uvicorn.Config(create_app(service), lifespan="off", log_config=None, access_log=False, ws="none")
        self._config.host, self._config.port = "127.0.0.1", port
        self._server = _Server(self._config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(WAIT_S):
            while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for this
                await asyncio.sleep(0.005)

    async def kill(self) -> None:
        """End it now, with requests in flight."""
        if self._task is None:
            return
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self.service.lifecycle.stopping.set()
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait_for(self._task, WAIT_S)
        self._task = None


class MockWorker(Served):
    """A worker over the mock engine."""

    def __init__(self, settings: MockSettings | None = None, *, name: str = "worker", port: int = 0) -> None:
        self.engine = MockEngine(settings)
        self.worker = Worker(self.engine, settings=WorkerSettings(name=name))
        super().__init__(
            Service(
                role="worker",
                engine=self.worker,
                admin=self.worker,
                worker=self.worker,
                settings=ServerSettings(),
                keys=KeyRing(),
                metrics=Metrics(),
            ),
            port=port,
        )

    async def start(self) -> None:
        await self.worker.start()
        await super().start()

    async def kill(self) -> None:
        await super().kill()
        await self.worker.close()


def serve_frontend(router: Engine, fleet: Fleet) -> Served:
    """A frontend over a router."""
    return Served(
        Service(
            role="frontend",
            engine=router,
            admin=fleet,
            settings=ServerSettings(),
            keys=KeyRing(),
            metrics=Metrics(),
        )
    )


class FleetUnderTest:
    """Mock workers, a router over them and a frontend."""

    def __init__(self, workers: list[MockWorker], router: Router, fleet: Fleet, frontend: Served) -> None:
        self.workers = workers
        self.router = router
        self.fleet = fleet
        self.frontend = frontend

    def worker(self, url: str) -> MockWorker:
        return next(worker for worker in self.workers if worker.service.lifecycle and worker.url == url)

    async def until(self, condition: object) -> None:
        """Return once `condition()` holds, looking after every change of the fleet."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # type: ignore[operator]
                changed = self.fleet.changed
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), 0.05)


@contextlib.asynccontextmanager
async def fleet_of(
    settings: Sequence[MockSettings],
    *,
    policy: Policy | None = None,
    fleet_settings: FleetSettings | None = None,
    router_settings: RouterSettings | None = None,
) -> AsyncIterator[FleetUnderTest]:
    """One mock worker per settings record, all current, behind one frontend."""
    workers = [MockWorker(one, name=f"worker-{i}") for i, one in enumerate(settings)]
    for worker in workers:
        await worker.start()
    fleet = Fleet(settings=fleet_settings)
    router = Router(
        fleet,
        policy=policy,
        settings=router_settings,
        discovery=StaticDiscovery([worker.url for worker in workers]),
        make_worker=lambda url: RemoteWorker(url, poll_s=0.1),
    )
    await router.start()
    frontend = serve_frontend(router, fleet)
    await frontend.start()
    under_test = FleetUnderTest(workers, router, fleet, frontend)
    try:
        await under_test.until(lambda: len(fleet.members) == len(workers) and all(m.routable for m in fleet.members))
        yield under_test
    finally:
        await frontend.kill()
        await router.close()
        for worker in workers:
            await worker.kill()


def write_weights(root: Path, name: str, content: str | None = None) -> str:
    """A mock checkpoint directory; its content is its weights."""
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "mock_weights.json").write_text(f'{{"weights": "{content or name}"}}')
    return str(path)
