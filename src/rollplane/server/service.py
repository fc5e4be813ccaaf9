"""What one HTTP app serves: the engine, its administration, and what the process knows about itself."""

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from rollplane.config import ServerSettings
from rollplane.engines.base import Engine
from rollplane.protocol.info import EngineHealth
from rollplane.protocol.request import RequestLimits
from rollplane.rl.base import PolicyAdmin
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.text import Texts
from rollplane.worker import Worker

HEALTH_TIMEOUT_S = 5.0
T = TypeVar("T")


class Lifecycle:
    """Whether the process is on its way out, and what it still has in flight. Owned by `server.ops`."""

    def __init__(self) -> None:
        self.draining = False
        self.in_flight = 0
        self.started_at = time.time()
        self.stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Lifecycle {'draining' if self.draining else 'serving'}, {self.in_flight} in flight>"

    def __enter__(self) -> None:
        self.in_flight += 1

    def __exit__(self, *exc: object) -> None:
        self.in_flight -= 1


class Others(Protocol):
    """The metrics of the other processes of this server, of one moment."""

    @property
    def held(self) -> int:
        """Requests that wait there for a worker."""
        ...

    def merge(self, own: bytes) -> bytes:
        """One page of theirs and ours."""
        ...


class OtherPages(Protocol):
    """Where the metrics of the other processes come from; `server.crew_metrics.OtherPages` is one."""

    async def collect(self) -> Others:
        """Ask them now."""
        ...


@dataclass(frozen=True, kw_only=True)
class Service:
    """Everything a route may use. `admin` None: no administration here, its routes answer 501.
    `worker`: the engine itself where it is a worker of ours, for the internal state route.
    `admin_port`: the only port that administration is served on; None: every one.
    `other_pages`: metrics of the other processes of this server; None: there are none, or they are asked for elsewhere.
    """

    role: Literal["worker", "frontend"]
    engine: Engine
    settings: ServerSettings
    keys: KeyRing
    metrics: Metrics
    admin: PolicyAdmin | None = None
    worker: Worker | None = None
    admin_port: int | None = None
    other_pages: OtherPages | None = None
    texts: Texts = field(default_factory=lambda: Texts(None))
    """The tokenizer of the evaluation routes; without one they refuse."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="rollplane-big"))
    """Where bodies and answers too big for the event loop are read, checked and written."""

    def __post_init__(self) -> None:
        lifecycle = self.lifecycle
        self.metrics.in_flight.set_function(lambda: lifecycle.in_flight)

    @functools.cached_property
    def limits(self) -> RequestLimits:
        """What is let in, whatever the engine."""
        return RequestLimits(
            max_prompt_tokens=self.settings.max_prompt_tokens,
            max_feature_bytes=self.settings.max_feature_bytes,
            drop_unknown_sampling=self.settings.drop_unknown_sampling,
        )

    def one_in_flight(self) -> Lifecycle:
        """Counts a request for as long as a block with it lasts."""
        return self.lifecycle

    async def in_pool(self, work: Callable[..., T], *args: Any, big: bool = True) -> T:
        """The result of `work`, in the pool when it is big, else here and now."""
        if not big:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)

    async def health(self) -> EngineHealth:
        """The engine's health; an engine that does not say within `HEALTH_TIMEOUT_S` is reported as not alive."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await self.engine.health()
        except TimeoutError:
            return EngineHealth(
                alive=False, state="failed", reason=f"the engine did not say how it is within {HEALTH_TIMEOUT_S:g} s"
            )

    def stall(self, health: EngineHealth) -> str | None:
        """Why the engine counts as stuck, or None. Work that is held by a pause or an update is not stuck."""
        if health.state in ("paused", "pausing", "asleep", "updating"):
            return None
        if health.running + health.waiting > 0 and health.last_progress_s > self.settings.stall_s:
            return (
                f"{health.running} running and {health.waiting} waiting requests without progress for "
                f"{health.last_progress_s:.1f} s; the limit is {self.settings.stall_s:g} s"
            )
        return None
