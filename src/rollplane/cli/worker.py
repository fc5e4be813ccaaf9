"""`rollplane worker`: one engine replica as a whole server."""

import os
from typing import Final

import structlog

from rollplane import config, worker
from rollplane.cli import dynamo
from rollplane.cli.engines import build_engine
from rollplane.config import ServerSettings, Settings
from rollplane.dynamo.worker import DynamoWorker
from rollplane.server import ops
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing, check_binding
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.server.text import Texts, named_texts, text_directory

GRPC_EXPERIMENTS: Final = "GRPC_EXPERIMENTS"
"""gRPC's own environment variable: parts of its core that are switched on, or off with a minus."""
GRPC_THREADS_OFF: Final = "-event_engine_client"

log = structlog.get_logger("rollplane.worker")


async def run_worker(settings: Settings) -> None:
    """Start the engine, serve until told to stop.

    Raises:
        InvalidRequest: settings that nothing can be served with.
        EngineDied: the engine died.
    """
    server, about = settings.table(ServerSettings), settings.table(config.WorkerSettings)
    keys = KeyRing(server.data_key_file, server.admin_key_file)
    check_binding(server.host, keys)
    check_binding(server.admin_host or server.host, keys)
    ops.check_tls(server)
    ops.check_ready_file(server.ready_file)
    texts = named_texts(server.tokenizer)
    runtime = dynamo.runtime_of(settings) if about.runtime == "dynamo" else None
    if about.engine == "vllm-grpc":
        spare_grpc_threads()
    engine = build_engine(about)
    sock = ops.bind(server)
    admin_sock = ops.bind_admin(server)
    tls = server.tls_cert_file is not None
    # Frontends and trainers need the administration's address; it serves requests too.
    url = about.public_url or ops.url_of(admin_sock or sock, tls=tls)
    behaviour = worker.WorkerSettings(
        name=about.name or f"worker-{sock.getsockname()[1]}",
        namespace=about.namespace,
        component=about.component,
        system_url=url,
        hold_limit_s=about.max_hold_s,
        isolate_by_version=about.isolate_by_version is not False,
    )
    serving = (
        worker.Worker(engine, settings=behaviour)
        if runtime is None
        else DynamoWorker(engine, settings=behaviour, deployment=runtime)
    )
    log.info("engine_starting", engine=about.engine, model=about.model)
    try:
        await serving.start()
        texts = texts or Texts(text_directory(about.model, serving.info.model))
        await texts.start()
    except BaseException:
        sock.close()
        await serving.close()
        raise
    service = Service(
        role="worker",
        engine=serving,
        admin=serving,
        worker=serving,
        settings=server,
        keys=keys,
        metrics=Metrics(),
        texts=texts,
        admin_port=ops.port_of(admin_sock),
    )

    def ready() -> None:
        info = serving.info
        log.info(
            "ready", url=url, model=info.model, engine=info.engine, policy_version=serving.version, keys=repr(keys)
        )
        ops.say_ready(server, url=url, role="worker", model=info.model, worker=serving.settings.name)

    membership = (
        dynamo.Membership(runtime, serving, service, on_joined=ready)
        if runtime is not None and isinstance(serving, DynamoWorker)
        else None
    )
    try:
        await ops.run(
            create_app(service),
            service,
            sock,
            admin_sock=admin_sock,
            on_ready=ready if membership is None else membership.begin,
            exit_on_death=True,
        )
    finally:
        if membership is not None:
            await membership.end()


def main(settings: Settings) -> None:
    """Serve one engine: Generate, administration and discovery of itself."""
    from rollplane.cli.logs import run_logged

    run_logged(settings.table(ServerSettings), run_worker(settings))


def spare_grpc_threads() -> None:
    """Let gRPC's polling thread read its sockets itself instead of handing every answer through a pool of threads.

    That is an eighth of a sidecar's CPU per request (`docs/decisions/0009`). To be called before gRPC is imported; what is set
    already stays. A release of gRPC that no longer knows the switch says so in a line of its log, and goes on.
    """
    os.environ.setdefault(GRPC_EXPERIMENTS, GRPC_THREADS_OFF)
