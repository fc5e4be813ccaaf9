"""One engine replica as a whole server's worth of behaviour: it is an `Engine`, and it is a `PolicyAdmin`.

What a worker adds to its engine: the identity check of media, the adapter lease, version preconditions, holding while
paused, deadlines, ownership of live request ids, and the record of itself that frontends follow. Nothing here knows
HTTP.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, Final, Literal

import msgspec

from rollplane.admission import check_request, effective_sampling, request_warnings
from rollplane.engines.base import (
    AdapterHost,
    BroadcastReceiver,
    Engine,
    IsolatesVersions,
    KvEventSource,
    MediaRenderer,
    NativeControls,
    OutlivesWorker,
    WeightReceiver,
    close_events,
    whole_of,
)
from rollplane.engines.wrappers.key_book import KeyBook
from rollplane.engines.wrappers.live import KeepLimits, LiveRequests
from rollplane.errors import DeadlineExceeded, EngineProtocolError, InvalidRequest, NotFound, Unavailable
from rollplane.identity import engine_salt, identify
from rollplane.protocol.admin import AdapterRecord, WorkerRecord
from rollplane.protocol.events import EndEvent, Event
from rollplane.protocol.info import EngineHealth, EngineInfo, EngineState
from rollplane.protocol.kv_events import KvBatch
from rollplane.protocol.rendered import RenderBody, Rendered
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.state import HEARTBEAT_S, WorkerState
from rollplane.rl.adapters import AdapterTable
from rollplane.rl.broadcast import BroadcastControl
from rollplane.rl.native import NativeControl
from rollplane.rl.versions import VersionSequence, check_version_wanted
from rollplane.rl.weights import PolicyControl
from rollplane.rl.worker_admin import WorkerAdmin

_STATES: Final[dict[str, EngineState]] = {
    "ready": "ready",
    "pausing": "pausing",
    "paused": "paused",
    "receiving": "updating",
    "verifying": "updating",
    "failed": "failed",
    "asleep": "asleep",
}


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker behaves.

    `hold_limit_s`: how long a request without a deadline waits while the worker is paused. `isolate_by_version`: cached
    KV is scoped by policy version through the salt, for engines that do not see to that themselves. `keep`: limits of
    the answers kept for idempotency keys.
    """

    name: str = "worker"
    namespace: str = "rollplane"
    component: str = "worker"
    system_url: str = ""
    hold_limit_s: float = 600.0
    keep: KeepLimits = KeepLimits()
    isolate_by_version: bool = True


class Worker(WorkerAdmin):
    """An engine with everything a trainer needs around it.

    Args:
        engine: what makes tokens. Weight updates work when it is a `WeightReceiver`, adapters when an `AdapterHost`.
    """

    def __init__(self, engine: Engine, *, settings: WorkerSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or WorkerSettings()
        self.engine = engine
        self.instance_id = uuid.uuid4().hex[:16]
        self.keys = KeyBook()
        self._isolating: IsolatesVersions | None = None
        self._live = LiveRequests(_Admitted(self), keep=self.settings.keep)
        self._sequence = VersionSequence("default")
        self._changed = asyncio.Event()
        self._closing = False
        self._held = 0

    def __repr__(self) -> str:
        return f"<Worker {self.settings.name} {self.state} at {self.version!r}, {self._live.count} live, {self._held} held>"

    @property
    def info(self) -> EngineInfo:
        """The engine's facts."""
        return self.engine.info

    @property
    def state(self) -> EngineState:
        """Where this worker is; `draining` once it closes."""
        if self._closing:
            return "draining"
        return _STATES[self.policy.state] if self.policy is not None else "ready"

    @property
    def state_age_s(self) -> float:
        """Seconds since the policy state was entered; 0 for an engine that has none."""
        return self.policy.state_age_s if self.policy is not None else 0.0

    @property
    def salt_scope(self) -> str | None:
        """What scopes the engine's salt now, here or in the engine (see `identity.engine_salt`); None: nothing does."""
        if self._isolating is not None:
            return self._isolating.salt_scope
        if not self.settings.isolate_by_version:
            return None
        return self.policy.scope.current if self.policy is not None else self.version

    @property
    def says_kv_events(self) -> bool:
        """Whether `kv_feed` works here."""
        return isinstance(self.engine, KvEventSource) and self.engine.info.capabilities.kv_events

    @property
    def live_requests(self) -> int:
        """Requests that are held, queued or running."""
        return self._live.count

    @property
    def held_requests(self) -> int:
        """Requests that wait for the worker to be ready."""
        return self._held

    async def start(self) -> None:
        """Start the engine and take charge of its policy and adapters."""
        await self.engine.start()
        if isinstance(self.engine, IsolatesVersions):
            self._isolating = self.engine
        if isinstance(self.engine, WeightReceiver):
            life = self.engine.cache_life if isinstance(self.engine, OutlivesWorker) else ""
            state = (await self.engine.health()).state
            found: Literal["ready", "paused", "asleep"] = "ready"
            if state == "paused" or state == "asleep":
                found = state
            self.policy = PolicyControl(self.engine, life=life, found=found, on_change=self._tell)
            if isinstance(self.engine, NativeControls):
                self.native = NativeControl(self.engine, self.policy, info=self.info)
            by_broadcast = set(self.engine.info.capabilities.weight_transfer) - {"disk"}
            if isinstance(self.engine, BroadcastReceiver) and by_broadcast:
                self.broadcast = BroadcastControl(self.engine, self.policy, info=self.engine.info, on_change=self._tell)
        capability = self.engine.info.capabilities.lora
        if capability is not None and isinstance(self.engine, AdapterHost):
            self.adapter_table = AdapterTable(self.engine, capability=capability, on_change=self._tell)
        self._tell()

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish within `grace_s`, then stop the engine."""
        self._closing = True
        self._tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._live.count and grace_s > 0:
                    await self._changed.wait()
        if self.native is not None:
            await self.native.close()
        if self.policy is not None:
            await self.policy.close()
        if self.broadcast is not None:
            await self.broadcast.close()
        if self.adapter_table is not None:
            await self.adapter_table.close()
        await self.engine.close(grace_s=0.0)

    async def health(self) -> EngineHealth:
        """The engine's health with this worker's state in place of its own."""
        health = await self.engine.health()
        state: EngineState = self.state if health.alive else "failed"
        return msgspec.structs.replace(health, state=state, waiting=health.waiting + self._held)

    async def abort(self, request_id: str) -> int:
        """End a live request with finish reason `abort`; how many there were."""
        return await self.engine.abort(request_id)

    async def abort_all(self) -> int:
        """End every live request with finish reason `abort`; how many there were."""
        return sum(await asyncio.gather(*(self.abort(request_id) for request_id in self._live.ids)))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve one request; see `Engine.generate`. Deadlines count from here.

        Raises:
            DeadlineExceeded: its own deadline passed.
            Unavailable: the worker is draining, or was paused for longer than the hold limit.
            PreconditionFailed: another policy version or adapter generation is current.
        """
        deadline_s, ends = self._begin(request)
        events = self._live.generate(request)
        try:
            while True:
                try:
                    if ends is None:
                        event = await anext(events)
                    else:
                        async with asyncio.timeout(ends - time.monotonic()):
                            event = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise _too_late(deadline_s) from None
                yield event
        finally:
            await events.aclose()
            self._tell_if_closing()

    async def whole(self, request: GenerateRequest) -> list[Event]:
        """As `generate`, for a request that does not stream."""
        deadline_s, ends = self._begin(request)
        try:
            if ends is None:
                return await self._live.whole(request)
            async with asyncio.timeout(ends - time.monotonic()):
                return await self._live.whole(request)
        except TimeoutError:
            raise _too_late(deadline_s) from None
        finally:
            self._tell_if_closing()

    def _begin(self, request: GenerateRequest) -> tuple[float | None, float | None]:
        """The request's deadline in seconds from now, and as a moment."""
        if self._closing:
            raise Unavailable("this worker is draining", retry_after_s=1.0)
        identify(request.features)
        deadline_s = request.options.deadline_s
        return deadline_s, None if deadline_s is None else time.monotonic() + deadline_s

    async def admitted(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve a request that owns its id: hold, check the version, lease the adapter, run, sign the end."""
        adapter_name = await self._let_in(request)
        async with self._lease(adapter_name) as record:
            request = await self._for_engine(request, record)
            events = self.engine.generate(request)
            try:
                async for event in events:
                    if isinstance(event, EndEvent):
                        self._sign(event, request, record)
                    yield event
            finally:
                await close_events(events)

    async def admitted_whole(self, request: GenerateRequest) -> list[Event]:
        """As `admitted`, for a request that does not stream."""
        adapter_name = await self._let_in(request)
        async with self._lease(adapter_name) as record:
            request = await self._for_engine(request, record)
            events = await whole_of(self.engine, request)
            for event in events:
                if isinstance(event, EndEvent):
                    self._sign(event, request, record)
            return events

    async def _let_in(self, request: GenerateRequest) -> str | None:
        """Check a request and hold it while the worker is not ready; the adapter that it needs."""
        check_request(request, self.info)
        adapter_name = self._adapter_of(request)
        await self._hold()
        return adapter_name

    async def _for_engine(self, request: GenerateRequest, record: AdapterRecord | None) -> GenerateRequest:
        """The request as the engine gets it: under the adapter's own name, scoped by the version."""
        if record is not None:
            request = msgspec.structs.replace(request, adapter=record.engine_name)
            await self._hold()  # the lease may have waited for a swap
        check_version_wanted(request, self.version, self._versions())
        if self.settings.isolate_by_version and self._isolating is None:
            salt = engine_salt(request.cache_salt, scope=self.salt_scope)
            request = msgspec.structs.replace(request, cache_salt=salt)
        return request

    def record(self) -> WorkerRecord:
        """This worker as discovery shows it, now."""
        info = self.info
        return WorkerRecord(
            namespace=self.settings.namespace,
            component=self.settings.component,
            endpoint="rl",
            instance_id=self.instance_id,
            transport={"http": self.settings.system_url},
            request_plane_url=self.settings.system_url,
            system_url=self.settings.system_url,
            admin_base_url=self.settings.system_url or None,
            model=info.model,
            routes=self.routes(),
            world_size=info.world_size,
            capabilities=info.capabilities,
            policy_version=self.version,
            policy_digest=self.policy.digest if self.policy is not None else None,
            state=self.state,
            adapters=self.adapter_table.records() if self.adapter_table is not None else [],
        )

    def routes(self) -> list[str]:
        """The canonical admin routes that work here, sorted."""
        names = ["abort_request", "get_weight_version", "get_world_size", "liveness_probe"]
        if self.policy is not None:
            names += ["flush_cache", "pause_generation", "resume_generation", "set_weight_version"]
            if "disk" in self.info.capabilities.weight_transfer:
                names += ["stage_weights", "update_weights_from_disk"]
            if "disk" in self.info.capabilities.weight_transfer or self.broadcast is not None:
                names += ["apply_staged_weights"]
        if self.broadcast is not None:
            names += ["init_weights_update_group", "update_weights_from_distributed", "destroy_weights_update_group"]
            names += ["stage_weights_from_distributed"]
        capable = self.info.capabilities
        if capable.native_transfer is not None and capable.data_parallel_size == 1:
            names += ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
        if capable.sleep:
            names += ["sleep", "wake_up", "is_sleeping"]
        if self.adapter_table is not None:
            names += ["list_loras", "load_lora", "unload_lora"]
        return sorted(names)

    async def snapshot(self, *, health: EngineHealth | None = None) -> WorkerState:
        """This worker as the internal state endpoint shows it, now; `health` where it was just asked for."""
        return WorkerState(
            worker=self.settings.name,
            instance=self.instance_id,
            info=self.info,
            health=health if health is not None else await self.health(),
            policy_version=self.version,
            policy_digest=self.policy.digest if self.policy is not None else None,
            epoch=self.epoch,
            paused=self.policy is not None and self.policy.paused_by_caller,
            adapters=await self.adapters(),
            routes=self.routes(),
            cache_generation=self.cache_generation,
            salt_scope=self.salt_scope,
        )

    async def kv_feed(self) -> AsyncGenerator[KvBatch, None]:
        """What the engine caches: first all of it, then every change; ends with the engine.

        Raises:
            NotFound: the engine says no KV events.
        """
        if not self.says_kv_events or not isinstance(self.engine, KvEventSource):
            raise NotFound(f"the {self.info.engine} engine says no KV events here")
        batches = self.engine.kv_events()
        try:
            async for events in batches:
                yield KvBatch(instance=self.instance_id, generation=self.cache_generation, events=events)
        finally:
            await close_events(batches)

    async def watch(self) -> AsyncGenerator[WorkerState, None]:
        """The state now, after every change, and every `HEARTBEAT_S` seconds, until this worker closes."""
        while True:
            changed = self._changed
            yield await self.snapshot()
            if self._closing:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await changed.wait()

    async def render_media(self, body: RenderBody) -> Rendered:
        """See `MediaRenderer.render_media`.

        Raises:
            InvalidRequest: this engine makes no features.
        """
        if not isinstance(self.engine, MediaRenderer):
            says = f"the {self.info.engine} engine makes no features of raw media; render them elsewhere"
            raise InvalidRequest(says, param="messages")
        return await self.engine.render_media(body)

    # -----------------------------------------------------------------------------------------------------------------

    def _versions(self) -> VersionSequence:
        return self.policy.sequence if self.policy is not None else self._sequence

    def _adapter_of(self, request: GenerateRequest) -> str | None:
        name = request.model
        if name is None or self.info.serves(name):
            return None
        if self.adapter_table is None or not self.adapter_table.serves(name):
            raise NotFound(
                f"model {name!r} does not exist: it is neither the base model nor a loaded adapter", param="model"
            )
        return name

    def _lease(self, name: str | None) -> contextlib.AbstractAsyncContextManager[AdapterRecord | None]:
        if name is None:
            return contextlib.nullcontext()
        if self.adapter_table is None:
            raise NotFound(f"model {name!r} does not exist", param="model")
        return self.adapter_table.lease(name)

    async def _hold(self) -> None:
        if self.policy is None or self.policy.state == "ready":
            return
        self._held += 1
        try:
            async with asyncio.timeout(self.settings.hold_limit_s):
                await self.policy.wait_ready()
        except TimeoutError:
            raise Unavailable(
                f"the worker has been {self.state} for {self.state_age_s:.0f} s; requests are held for at most "
                f"{self.settings.hold_limit_s:g} s"
            ) from None
        finally:
            self._held -= 1

    def _sign(self, end: EndEvent, request: GenerateRequest, adapter: AdapterRecord | None) -> None:
        served_by = end.served_by
        if served_by.logprobs_mode == "unknown" and self.info.capabilities.logprobs_mode != "unknown":
            raise EngineProtocolError("the engine did not say which logprobs it returned")
        served_by.worker = self.settings.name
        served_by.instance = self.instance_id
        served_by.epoch = self.epoch
        served_by.attempt = request.attempt
        served_by.adapter_generation = None if adapter is None else adapter.generation
        served_by.warnings = [*served_by.warnings, *request_warnings(request, self.info)]
        if request.options.echo_sampling:
            served_by.effective_sampling = effective_sampling(request, self.info)

    def _tell_if_closing(self) -> None:
        """`close` waits for the last request; nobody else needs to hear of each one."""
        if self._closing:
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _too_late(deadline_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the request did not finish within its deadline of {deadline_s:g} s", param="rollplane.deadline_s"
    )


class _Admitted:
    """The engine that `LiveRequests` runs for a worker: the worker's own path past the id check."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def info(self) -> EngineInfo:
        return self._worker.engine.info

    async def start(self) -> None:
        await self._worker.engine.start()

    async def close(self, *, grace_s: float = 0.0) -> None:
        await self._worker.engine.close(grace_s=grace_s)

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        return self._worker.admitted(request)

    def whole(self, request: GenerateRequest) -> Coroutine[Any, Any, list[Event]]:
        return self._worker.admitted_whole(request)

    async def abort(self, request_id: str) -> int:
        return await self._worker.engine.abort(request_id)

    async def health(self) -> EngineHealth:
        return await self._worker.engine.health()
