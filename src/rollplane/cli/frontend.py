"""`rollplane frontend`: many workers served as one."""

import asyncio
import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any, Final

import aiohttp
import structlog

from rollplane.config import CrewSettings, FrontendSettings, ServerSettings, Settings, read_keys
from rollplane.discovery.base import Discovery
from rollplane.discovery.dynamo import DynamoDiscovery
from rollplane.discovery.file import FileDiscovery
from rollplane.discovery.static import StaticDiscovery
from rollplane.engines.remote import worker_session
from rollplane.errors import InvalidRequest
from rollplane.rl.control_record import RecordFile
from rollplane.rl.fleet import Fleet, FleetSettings
from rollplane.rl.fleet_update import Checkpoint
from rollplane.rl.followed import FollowedFleet
from rollplane.rl.members import FleetWorker
from rollplane.rl.remote import RemoteWorker
from rollplane.router.fair_queue import QueueSettings
from rollplane.router.models import Models
from rollplane.router.policies import make_policy
from rollplane.router.prefill_pace import PaceSettings
from rollplane.router.router import Router, RouterSettings
from rollplane.server import ops
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing, check_binding
from rollplane.server.crew import Crew
from rollplane.server.crew_app import ROOT_APP, in_crew
from rollplane.server.crew_metrics import OtherPages
from rollplane.server.crew_queue import OwnersQueue
from rollplane.server.crew_router import CrewRouter
from rollplane.server.fleets import FleetPaths, fleet_services
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.server.text import Texts, named_texts, text_directory

DEFAULT_FLEET: Final = "default"
"""The name of the first fleet, whose policy is trained."""

log = structlog.get_logger("rollplane.frontend")


async def run_frontend(settings: Settings) -> None:
    """Follow the workers and serve until told to stop.

    Raises:
        InvalidRequest: settings that nothing can be served with.
    """
    server, about = settings.table(ServerSettings), settings.table(FrontendSettings)
    keys = KeyRing(server.data_key_file, server.admin_key_file)
    check_binding(server.host, keys)
    check_binding(server.admin_host or server.host, keys)
    ops.check_tls(server)
    ops.check_ready_file(server.ready_file)
    texts = named_texts(server.tokenizer) or Texts(text_directory(about.initial_checkpoint))
    crew = crew_of(settings.table(CrewSettings))
    discovery = discovery_of(about)
    others = {name: StaticDiscovery(urls_of(name, text)) for name, text in about.fleet.items()}
    key = worker_key(about)
    session = worker_session()
    try:
        make = functools.partial(make_router, about, server, key=key, session=session, crew=crew)
        router = make(discovery)
        routers = {DEFAULT_FLEET: router, **{name: make(one, name=name) for name, one in others.items()}}
        engine: Router | Models = Models(routers) if others else router
        sock = ops.bind(server, shared=crew is not None)
        # One process administers; that port is its alone.
        admin_sock = ops.bind_admin(server) if crew is None or crew.owns else None
        url = ops.url_of(sock, tls=server.tls_cert_file is not None)
        await texts.start()
        await engine.start()
        service = Service(
            role="frontend",
            engine=engine,
            admin=router.fleet,
            settings=server,
            keys=keys,
            metrics=Metrics(),
            texts=texts,
            admin_port=server.admin_port if crew is not None else ops.port_of(admin_sock),
            other_pages=OtherPages(crew, ROOT_APP) if crew is not None and crew.owns else None,
        )
        fleets = fleet_services(service, engine) if isinstance(engine, Models) else {}
        if crew is not None and crew.owns:
            fleets = {
                name: dataclasses.replace(one, other_pages=OtherPages(crew, name)) for name, one in fleets.items()
            }
        app = create_app(service)
        served: Any = FleetPaths(app, {name: create_app(one) for name, one in fleets.items()}) if fleets else app
        announcing: list[asyncio.Task[None]] = []

        def ready() -> None:
            announcing.append(asyncio.create_task(announce(router, server, url=url, join_s=about.join_s)))

        async with contextlib.AsyncExitStack() as stack:
            if crew is not None:
                served = await stack.enter_async_context(
                    in_crew(crew, served, service, routers=routers, apps={ROOT_APP: service, **fleets})
                )
            await ops.run(served, service, sock, admin_sock=admin_sock, on_ready=ready)
        for task in announcing:
            task.cancel()
        await asyncio.gather(*announcing, return_exceptions=True)
    finally:
        await session.close()
        if crew is not None:
            await crew.close()


def crew_of(settings: CrewSettings) -> Crew | None:
    """The processes that this one belongs to, None where it is the only one."""
    if settings.directory is None:
        return None
    return Crew(Path(settings.directory), index=settings.index, count=settings.count)


def make_router(
    about: FrontendSettings,
    server: ServerSettings,
    discovery: Discovery,
    *,
    name: str | None = None,
    key: str | None,
    session: aiohttp.ClientSession,
    crew: Crew | None = None,
) -> Router:
    """The router of one fleet; `name` None: the first, whose policy is trained. `crew`: it shares the fleet with others."""
    record = None
    follows = crew is not None and not crew.owns
    if about.control_record is not None and not follows:
        record = RecordFile(Path(about.control_record if name is None else f"{about.control_record}.{name}"))
    initial = initial_of(about) if name is None else None

    def ours(url: str) -> RemoteWorker:
        return RemoteWorker(url, key=key, frontend="frontend", silent_s=about.silent_s, session=session)

    def make_worker(url: str) -> FleetWorker:
        return discovery.make_worker(url, ours=ours) if isinstance(discovery, DynamoDiscovery) else ours(url)

    fleet_settings = FleetSettings(initial=initial, stall_s=server.stall_s)
    fleet = FollowedFleet(settings=fleet_settings) if follows else Fleet(settings=fleet_settings, record=record)
    known_as = name or DEFAULT_FLEET
    kind = Router if crew is None else functools.partial(CrewRouter, crew=crew, name=known_as)
    router = kind(
        fleet,
        policy=make_policy(about.router),
        settings=RouterSettings(
            hold_limit_s=about.max_hold_s,
            max_attempts=about.max_attempts,
            prefill=PaceSettings(window_tokens=about.prefill_window),
            queue=QueueSettings(
                max_running=about.max_running,
                max_running_per_key=about.max_running_per_key,
                max_waiting=about.max_waiting,
                max_waiting_per_key=about.max_waiting_per_key,
                shares=about.share,
            ),
        ),
        discovery=discovery,
        make_worker=make_worker,
        name=name or DEFAULT_FLEET,
    )
    limits = router.settings.queue
    if crew is not None and follows and (limits.max_running, limits.max_running_per_key) != (None, None):
        router.queue = OwnersQueue(crew, known_as, limits, wait_limit_s=about.max_hold_s)
    return router


def urls_of(name: str, text: str) -> list[str]:
    """The workers of a further fleet.

    Raises:
        InvalidRequest: a name that is no path segment, or no address.
    """
    urls = text.replace(",", " ").split()
    if not urls or not name or not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
        raise InvalidRequest(
            f"frontend.fleet: {name[:64]!r} must be letters, digits, - and _, with at least one worker's URL",
            param="frontend.fleet",
        )
    return urls


async def announce(router: Router, server: ServerSettings, *, url: str, join_s: float) -> None:
    """Say ready once every worker takes requests, or after `join_s` with those that do; requests wait for them anyway."""
    try:
        async with asyncio.timeout(join_s):
            while not (router.fleet.members and all(member.routable for member in router.fleet.members)):
                await router.fleet.changed.wait()
    except TimeoutError:
        log.warning("workers_missing", router=repr(router), waited_s=join_s)
    log.info("ready", url=url, router=repr(router))
    ops.say_ready(server, url=url, role="frontend", workers=[member.url for member in router.fleet.members])


def discovery_of(about: FrontendSettings) -> Discovery:
    """Who the workers are.

    Raises:
        InvalidRequest: no source of workers, or two.
    """
    if sum(map(bool, (about.workers, about.workers_file, about.dynamo_rl_url))) != 1:
        raise InvalidRequest(
            "a frontend needs its workers: set one of frontend.workers, frontend.workers_file and frontend.dynamo_rl_url",
            param="frontend.workers",
        )
    if about.dynamo_rl_url is not None:
        return DynamoDiscovery(about.dynamo_rl_url)
    if about.workers_file is not None:
        return FileDiscovery(Path(about.workers_file))
    return StaticDiscovery(about.workers)


def worker_key(about: FrontendSettings) -> str | None:
    """The key that is sent to the workers.

    Raises:
        InvalidRequest: the file holds none.
    """
    if about.worker_key_file is None:
        return None
    keys = read_keys(about.worker_key_file)
    if not keys:
        raise InvalidRequest(f"no key in {about.worker_key_file}", param="frontend.worker_key_file")
    return keys[0]


def initial_of(about: FrontendSettings) -> Checkpoint | None:
    """The checkpoint that workers start with."""
    if about.initial_checkpoint is None:
        return None
    return Checkpoint(
        path=about.initial_checkpoint, version=about.initial_version or Path(about.initial_checkpoint).name
    )


def main(settings: Settings) -> None:
    """Serve many workers as one: routing, fleet administration and discovery."""
    from rollplane.cli.logs import run_logged

    if settings.table(FrontendSettings).processes > 1 and settings.table(CrewSettings).directory is None:
        from rollplane.cli.supervisor import serve_processes

        serve_processes(settings)
        return
    run_logged(settings.table(ServerSettings), run_frontend(settings))
