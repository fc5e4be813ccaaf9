"""Probes, metrics and the list of models.

`/health`   is the engine alive and moving: 503 when it is gone, or had work without progress for longer than `server.stall_s`. Held
            work (paused, updating, asleep) is not a stall, so a paused worker is healthy.
`/liveness` should the process be restarted: 503 only when the engine is gone.
`/ready`    may requests be sent here: 200 also while paused or updating (requests are held, not refused), 503 while starting,
            asleep, failed, draining, stopped or stuck; the body says the state.
"""

import contextlib
from typing import Any, Protocol, runtime_checkable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rollplane.engines.base import MetricsSource
from rollplane.errors import NotFound, RollplaneError
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.server.error_responses import json_response
from rollplane.server.metrics import CONTENT_TYPE
from rollplane.server.routes import ApiRoute, Doc
from rollplane.server.service import Service

SERVING_STATES = ("ready", "pausing", "paused", "updating")


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """A moment's health. `reason`: why the status is 503, else null."""

    status: str
    state: str
    running: int
    waiting: int
    last_progress_s: float
    reason: str | None = None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One name that requests may use. `root`: the base model's name; `parent`: the base model of an adapter."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "rollplane"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The models, base model first."""

    data: list[ModelCard]
    object: str = "list"


async def health(request: Request) -> Response:
    """Whether the engine is alive and moving."""
    service: Service = request.app.state.service
    now = await service.health()
    return _report(now, reason=_trouble(service, now))


async def liveness(request: Request) -> Response:
    """Whether the process should live on."""
    service: Service = request.app.state.service
    now = await service.health()
    return _report(now, reason=None if now.alive else now.reason or f"the engine is {now.state}")


async def ready(request: Request) -> Response:
    """Whether requests may be sent here."""
    service: Service = request.app.state.service
    now = await service.health()
    if service.lifecycle.draining:
        now = msgspec.structs.replace(now, state="draining")
    reason = _trouble(service, now)
    if reason is None and now.state not in SERVING_STATES:
        reason = f"the engine is {now.state}"
    return _report(now, reason=reason)


def _trouble(service: Service, now: EngineHealth) -> str | None:
    if not now.alive or now.state == "failed":
        return now.reason or f"the engine is {now.state}"
    return service.stall(now)


def _report(now: EngineHealth, *, reason: str | None) -> Response:
    report = HealthReport(
        status="ok" if reason is None else "unavailable",
        state=now.state,
        running=now.running,
        waiting=now.waiting,
        last_progress_s=now.last_progress_s,
        reason=reason,
    )
    if reason is None:
        return json_response(report)
    return json_response(report, status=503, headers={"Retry-After": "1"})


async def metrics(request: Request) -> Response:
    """The Prometheus exposition; of all processes of this server, where there are several."""
    service: Service = request.app.state.service
    others = None if service.other_pages is None else await service.other_pages.collect()
    text, _ = await metrics_text(service, held_elsewhere=0 if others is None else others.held)
    return Response(text if others is None else others.merge(text), media_type=CONTENT_TYPE)


async def metrics_text(service: Service, *, held_elsewhere: int = 0) -> tuple[bytes, int]:
    """This process's exposition, and how many requests wait here for a worker.

    Args:
        held_elsewhere: requests that wait in other processes of this server.
    """
    version: str | None = None
    if service.admin is not None:
        try:
            version = await service.admin.policy_version()
        except RollplaneError:
            version = None  # a fleet whose workers disagree has no version; its own gauges say so
    info: EngineInfo | None = None
    with contextlib.suppress(RollplaneError):  # a frontend that has reached no worker yet
        info = service.engine.info
    health = await service.health()
    held = health.counters.get("held", 0)
    health = msgspec.structs.replace(health, waiting=health.waiting + held_elsewhere)
    service.metrics.read_health(health, info=info, version=version)
    families: list[Any] = []
    if service.worker is not None:
        service.metrics.worker_policy.read(service.worker)
        if isinstance(service.worker.engine, MetricsSource):
            families = service.worker.engine.metric_families()
    return service.metrics.text(families), held


@runtime_checkable
class KnowsModels(Protocol):
    """An engine that serves several models."""

    def known_models(self) -> list[tuple[EngineInfo, list[str]]]:
        """The facts of each model and its names."""
        ...


async def cards(service: Service) -> list[ModelCard]:
    """The base model, its aliases and the adapters that take requests."""
    created = int(service.lifecycle.started_at)
    engine: object = service.engine
    if isinstance(engine, KnowsModels):
        return [
            ModelCard(id=name, created=created, max_model_len=info.max_model_len, root=info.model)
            for info, names in engine.known_models()
            for name in names
        ]
    info = service.engine.info
    found = [
        ModelCard(id=name, created=created, max_model_len=info.max_model_len, root=info.model)
        for name in dict.fromkeys([info.model, *info.aliases])
    ]
    if service.admin is not None:
        names = {record.name for record in await service.admin.adapters() if record.state == "ready"}
        found += [
            ModelCard(id=name, created=created, max_model_len=info.max_model_len, root=info.model, parent=info.model)
            for name in sorted(names)
        ]
    return found


async def models(request: Request) -> Response:
    """Every name that a request may use."""
    return json_response(ModelList(data=await cards(request.app.state.service)))


async def model(request: Request) -> Response:
    """One card.

    Raises:
        NotFound: no such name.
    """
    name: str = request.path_params["name"]
    for card in await cards(request.app.state.service):
        if card.id == name:
            return json_response(card)
    raise NotFound(f"model {name!r} does not exist", param="model")


def health_routes() -> list[ApiRoute]:
    """Probes (open), metrics and models (data)."""
    probes: list[tuple[str, Any, str]] = [
        ("/health", health, "Whether the engine is alive and moving"),
        ("/liveness", liveness, "Whether the process should live on"),
        ("/ready", ready, "Whether requests may be sent here"),
    ]
    return [
        *(
            ApiRoute(
                path,
                handler,
                methods=["GET"],
                access="open",
                doc=Doc(summary=summary, tag="health", answer=HealthReport, errors=(503,)),
            )
            for path, handler, summary in probes
        ),
        ApiRoute(
            "/metrics",
            metrics,
            methods=["GET"],
            access="data",
            doc=Doc(summary="Prometheus metrics", tag="health", answer_type="text/plain"),
        ),
        ApiRoute(
            "/v1/models",
            models,
            methods=["GET"],
            access="data",
            doc=Doc(summary="Names that a request may use", tag="data", answer=ModelList, errors=(502, 503)),
        ),
        ApiRoute(
            "/v1/models/{name:path}",
            model,
            methods=["GET"],
            access="data",
            doc=Doc(summary="One model", tag="data", answer=ModelCard, errors=(404, 502, 503)),
        ),
    ]
