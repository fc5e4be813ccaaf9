"""A running vLLM server as an engine: `vllm.Inference` makes the tokens, `vllm.Control` the policy's life.

Unary requests use the unary call; streams, and requests with `exact_spans`, the streaming one. Pausing, labels and
adapters are the server's; replacing weights from a checkpoint directory is not among its services and is refused.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import msgspec

from rollplane.admission import check_request
from rollplane.engines.grpc.adapters import GrpcAdapters
from rollplane.engines.grpc.calls import LiveCalls, StreamProgress
from rollplane.engines.grpc.channels import ChannelPool
from rollplane.engines.grpc.control import ControlCalls
from rollplane.engines.grpc.convert import ConvertSettings, to_wire
from rollplane.engines.grpc.kv_events import follow_server
from rollplane.engines.grpc.media import MediaModel, check_features
from rollplane.engines.grpc.native import GrpcSleep, GrpcTransfer
from rollplane.engines.grpc.proto import control_pb2 as pb
from rollplane.engines.grpc.services import CONTROL, DATA_PARALLEL_RANK, INFERENCE
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.grpc.startup import probe, read_facts, wait_until_healthy
from rollplane.engines.grpc.status import error_from_rpc
from rollplane.engines.kv_mirror import KvMirror
from rollplane.engines.zmq_kv_events import ZmqKvEvents
from rollplane.errors import (
    EngineDied,
    EngineFailed,
    InvalidRequest,
    NotFound,
    RollplaneError,
    TransportError,
    Unavailable,
)
from rollplane.identity import identify
from rollplane.protocol.admin import AllowTensors, FlushReport, PauseMode, PauseReport, ResumeReport, StagedWeights
from rollplane.protocol.events import Event
from rollplane.protocol.features import MediaItem
from rollplane.protocol.info import EngineHealth, EngineInfo, EngineState
from rollplane.protocol.kv_events import KvEvent
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.versions import check_version_name

FIRST_LABEL: Final = "default"
"""What vLLM calls the weights that it started with."""
HEALTH_PERIOD_S: Final = 2.0
HEALTH_TIMEOUT_S: Final = 5.0
ABORT_REPEAT_S: Final = 0.1
QUIET_S: Final = 0.02
"""How long nothing may come from a paused engine before all that it made is taken to be here."""


class GrpcEngine:
    """An `Engine`, `WeightReceiver` and `AdapterHost` over one vLLM server.

    Args:
        settings: how the server is reached and what it does not say of itself.
    """

    def __init__(self, settings: GrpcSettings | None = None) -> None:
        self.settings = settings or GrpcSettings()
        self.settings.check()
        self._convert = ConvertSettings(
            media_hosts=self.settings.media_hosts, max_request_bytes=self.settings.max_request_bytes
        )
        self._pool: ChannelPool | None = None
        self._control: ControlCalls | None = None
        self._info: EngineInfo | None = None
        self._media = MediaModel()
        self._live: dict[str, list[LiveCalls]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._version = FIRST_LABEL
        self._life = ""
        self._paused = False
        self._held = False
        """Whether a caller's pause holds, or is on its way; a flush pauses for a moment without one."""
        self._switching = asyncio.Lock()
        """Held while the server is on its way to stepping again: a pause comes after that, never in between."""
        self._cleared = False  # since the pause began
        self._native = GrpcTransfer(self)
        self._sleep = GrpcSleep(self)
        self._mirror = KvMirror()
        self._kv_events: ZmqKvEvents | None = None
        self._closing = False
        self._trouble: str | None = None
        self._progress = StreamProgress()
        self._watcher: asyncio.Task[None] | None = None
        self._adapters = GrpcAdapters(self)

    def __repr__(self) -> str:
        live = sum(len(calls) for calls in self._live.values())
        return f"<GrpcEngine {self.settings.endpoint} {self._state()} at {self._version!r}, {live} live>"

    @property
    def info(self) -> EngineInfo:
        """See `Engine.info`.

        Raises:
            Unavailable: not started.
        """
        if self._info is None:
            raise Unavailable("the engine was not started")
        return self._info

    @property
    def control(self) -> ControlCalls:
        """The server's control service: native weight transfer, sleep, KV event sources.

        Raises:
            EngineDied: not started, or closed.
        """
        if self._control is None or self._closing:
            raise EngineDied("the engine is closed" if self._closing else "the engine was not started")
        return self._control

    # -- Engine ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait for the server's health, read its facts, and watch its health from then on.

        Raises:
            EngineDied: not healthy in time. InvalidRequest: it cannot be served as it is.
        """
        if self._info is not None:
            return
        pool = ChannelPool(self.settings)
        try:
            await wait_until_healthy(pool, timeout_s=self.settings.start_timeout_s)
            control = ControlCalls(pool, timeout_s=self.settings.control_timeout_s)
            info, self._media, directory = await read_facts(control, self.settings)
            await self._adapters.hold_to(directory)
            self._version = await control.weight_version()
            self._life = "" if self._version == FIRST_LABEL else uuid.uuid4().hex[:8]
            self._paused = self._held = await control.is_paused()
            with contextlib.suppress(RollplaneError):  # a server without sleep mode refuses to say
                self._sleep.asleep = await control.is_sleeping()
            kv_events = await follow_server(control, self._mirror, server=self.settings.endpoint)
        except BaseException:
            await pool.close()
            raise
        if kv_events is not None and info.block_tokens is not None:
            kv_events.start()
            self._kv_events = kv_events
            capabilities = msgspec.structs.replace(info.capabilities, kv_events=True)
            info = msgspec.structs.replace(info, capabilities=capabilities)
        self._pool, self._control, self._info = pool, control, info
        self._watcher = asyncio.create_task(self._watch(), name=f"health of {self.settings.endpoint}")

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Hang up; the server itself goes on. See `Engine.close`."""
        if self._closing:
            return
        self._closing = True
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    for calls in self._all_live():
                        await calls.done.wait()
        for calls in self._all_live():
            calls.end_with_engine()
        tasks = [*self._aborts, *([self._watcher] if self._watcher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._adapters.close()
        if self._kv_events is not None:
            await self._kv_events.close()
        self._mirror.end()
        if self._pool is not None:
            await self._pool.close()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """See `Engine.generate`."""
        calls = await self._calls(request)
        try:
            if request.stream:
                async with contextlib.aclosing(calls.events()) as events:
                    async for event in events:
                        yield event
            else:
                for event in await calls.whole():
                    yield event
        finally:
            self._forget(calls)

    async def whole(self, request: GenerateRequest) -> list[Event]:
        """As `generate`, for a request that does not stream."""
        calls = await self._calls(request)
        try:
            return await calls.whole()
        finally:
            self._forget(calls)

    async def _calls(self, request: GenerateRequest) -> LiveCalls:
        """The calls of a request, not begun yet; `_forget` is owed."""
        pool, info = self._serving(), self.info
        check_request(request, info)
        if request.features:
            await asyncio.to_thread(self._check_features, request.features)
        wires = to_wire(request, info, settings=self._convert)
        more = () if request.data_parallel_rank is None else ((DATA_PARALLEL_RANK, str(request.data_parallel_rank)),)
        calls = LiveCalls(
            request,
            wires,
            pool=pool,
            metadata=pool.metadata(*more),
            timeout_s=request.options.deadline_s or self.settings.call_timeout_s,
            translate=self._translate,
            version=self._version,
            born_paused=self._paused,
            logprobs_mode=info.capabilities.logprobs_mode,
        )
        self._live.setdefault(request.request_id, []).append(calls)
        return calls

    def _forget(self, calls: LiveCalls) -> None:
        request_id = calls.request.request_id
        same = self._live[request_id]
        same.remove(calls)
        if not same:
            del self._live[request_id]
        if calls.request.adapter is not None and not calls.whole_read and not self._closing:
            self._adapters.left(calls.ids)

    async def abort(self, request_id: str) -> int:
        """See `Engine.abort`. Repeated until the request ends: the server forgets an abort that comes before its request."""
        found = [calls for calls in self._live.get(request_id, ()) if not calls.aborted]
        if not found:
            return 0
        for calls in found:
            calls.aborted = True
        await self.control.abort([name for calls in found for name in calls.ids])
        for calls in found:
            task = asyncio.create_task(self._abort_again(calls), name=f"abort {request_id}")
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
        return len(found)

    async def health(self) -> EngineHealth:
        """The last health that was seen, at most `HEALTH_PERIOD_S` + `HEALTH_TIMEOUT_S` old.

        A server answers probes though the engine behind it hangs; what tells is that no token comes. It cannot be told
        while a unary call is open, whose tokens come at its end.
        """
        state = self._state()
        return EngineHealth(
            alive=state not in ("failed", "stopped", "starting"),
            state=state,
            running=sum(len(calls.ids) for calls in self._all_live()),
            last_progress_s=self._progress.stands_still_s(self._all_live(), runs=state == "ready"),
            reason=self._trouble,
            counters={"stuck_adapters": len(self._adapters.stuck)},
        )

    # -- WeightReceiver ----------------------------------------------------------------------------------------------

    @property
    def cache_life(self) -> str:
        """See `OutlivesWorker.cache_life`: a label that is not vLLM's first one was given before us."""
        return self._life

    @property
    def policy_version(self) -> str:
        """See `WeightReceiver.policy_version`."""
        return self._version

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        """See `WeightReceiver.pause`; `cleared` says that the server was asked and did not refuse."""
        was_held, self._held = self._held, True
        try:
            async with self._switching:
                pass  # a flush under way sees that the pause is to stay; a resume under way was before it
            return await self._pause(mode, clear_cache=clear_cache, already=self._paused and was_held)
        except BaseException:
            self._held = was_held
            raise

    async def _pause(self, mode: PauseMode, *, clear_cache: bool, already: bool) -> PauseReport:
        before = len(self._all_live())
        await self.control.pause(mode, clear_cache=clear_cache, timeout_s=self.settings.call_timeout_s)
        self._paused = True
        self._cleared = self._cleared or clear_cache
        if clear_cache:
            self._mirror.clear()  # an idle server tells that only with its next step
        await self._settle()
        return PauseReport(
            mode=mode,
            already_paused=already,
            kept=before if mode == "keep" else 0,
            aborted=before if mode == "abort" else 0,
            drained=before if mode == "wait" else 0,
            cleared=True if clear_cache else None,
        )

    async def resume(self) -> ResumeReport:
        """See `WeightReceiver.resume`."""
        async with self._switching:
            if self._paused:
                self._held = False
            return await self._resume()

    async def _resume(self) -> ResumeReport:
        was_paused = self._paused
        if was_paused:
            await self._settle()
            for calls in self._all_live():
                calls.resumed(self._version, cleared=self._cleared)
            await self.control.resume()
            self._paused = self._cleared = False
        return ResumeReport(was_paused=was_paused, policy_version=self._version)

    async def stage_weights(self, path: str, *, allow_tensors: Sequence[AllowTensors] = ()) -> StagedWeights:
        """Refused: no rpc of the server reads a checkpoint.

        Raises:
            NotFound: there is no such directory.
            InvalidRequest: there is; says what works instead.
        """
        if not await asyncio.to_thread(Path(path).is_dir):
            raise NotFound(f"there is no checkpoint directory {path}", param="model_path")
        backend = self.info.capabilities.native_transfer or "none was configured at its start"
        raise InvalidRequest(
            "update_weights_from_disk is not offered by a vLLM gRPC server: its services receive weights only through "
            f"their transfer backend ({backend})",
            param="model_path",
        )

    async def apply_weights(self, staged: StagedWeights, *, version: str) -> None:
        """Refused, see `stage_weights`.

        Raises:
            EngineFailed: always; nothing was touched.
        """
        raise EngineFailed(f"a vLLM gRPC server cannot load {staged.path}")

    async def set_policy_version(self, version: str) -> None:
        """See `WeightReceiver.set_policy_version`."""
        check_version_name(version, param="weight_version")
        await self.control.set_weight_version(version)
        self.take_version(version)

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """Drop caches. The server's only way is a pause that clears, which would preempt running requests."""
        running = len(self._all_live())
        if running and not preempt:
            return FlushReport(
                reset=False,
                reason=f"{running} requests hold cache; a vLLM gRPC server can only clear all of it (preempt)",
            )
        async with self._switching:
            if self._held and not self._paused:
                return FlushReport(reset=False, reason="a pause is on its way; flush once it is there")
            await self._pause("keep", clear_cache=True, already=self._paused)
            if not self._held:  # a caller that paused meanwhile keeps it
                await self._resume()
        return FlushReport(reset=True, preempted=running)

    # -- NativeControls ----------------------------------------------------------------------------------------------

    @property
    def native(self) -> GrpcTransfer:
        """See `NativeControls.native`."""
        return self._native

    @property
    def sleeping(self) -> GrpcSleep:
        """See `NativeControls.sleeping`."""
        return self._sleep

    async def clear_cache(self) -> None:
        """While paused: what was cached goes; kept requests compute theirs again, and are marked so."""
        await self.pause("keep", clear_cache=True)

    @property
    def paused(self) -> bool:
        """Whether the server was asked to stop stepping."""
        return self._paused

    def forget_cached(self) -> None:
        """The server caches nothing any more."""
        self._mirror.clear()

    def take_version(self, version: str) -> None:
        """While paused, live requests meet the new version when the engine resumes; else at an unknown token."""
        self._version = version
        if not self._paused:
            for calls in self._all_live():
                for tracker in calls.trackers:
                    tracker.relabelled(version)

    async def kv_event_sources(self) -> list[pb.KvEventSource]:
        """Where the server publishes KV events."""
        return await self.control.kv_event_sources()

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        """See `KvEventSource.kv_events`. Of a server that tells none (see `Capabilities.kv_events`) nothing ever comes."""
        return self._mirror.feed()

    # -- AdapterHost -------------------------------------------------------------------------------------------------

    async def load_adapter(self, engine_name: str, path: str) -> None:
        """See `AdapterHost.load_adapter`."""
        await self._adapters.load(engine_name, path)

    async def unload_adapter(self, engine_name: str) -> None:
        """See `AdapterHost.unload_adapter`."""
        await self._adapters.unload(engine_name)

    async def loaded_adapters(self) -> list[str]:
        """See `AdapterHost.loaded_adapters`."""
        return await self._adapters.loaded()

    # ----------------------------------------------------------------------------------------------------------------

    def _serving(self) -> ChannelPool:
        if self._closing or self._pool is None:
            raise EngineDied("the engine is closed" if self._closing else "the engine was not started")
        if self._sleep.asleep:
            raise Unavailable("the engine is asleep")
        return self._pool

    def _check_features(self, items: list[MediaItem]) -> None:
        """In a thread: it reads every byte."""
        identify(items)
        check_features(items, self._media)

    def _all_live(self) -> list[LiveCalls]:
        return [calls for same in self._live.values() for calls in same]

    def _state(self) -> EngineState:
        if self._closing:
            return "stopped"
        if self._info is None:
            return "starting"
        if self._trouble is not None:
            return "failed"
        if self._sleep.asleep:
            return "asleep"
        return "paused" if self._paused else "ready"

    async def _settle(self) -> None:
        """Return once the tokens that were made before the pause have been counted.

        The engine is idle, but a fast one is ahead of its readers: its answers are behind us when later calls on the
        same connections return and nothing more comes for a while.
        """
        counted = [calls for calls in self._all_live() if calls.streams]
        if not counted or self._pool is None:
            return
        pool, clock = self._pool, asyncio.get_running_loop().time
        quiet_since, ends = clock(), clock() + self.settings.control_timeout_s
        while clock() - quiet_since < QUIET_S and clock() < ends:
            before = [tracker.tokens for calls in counted for tracker in calls.trackers]
            request, metadata = pb.IsPausedRequest(), pool.metadata()
            asked = [
                lane.control.IsPaused(request, timeout=self.settings.control_timeout_s, metadata=metadata)
                for lane in pool.lanes
                if lane.calls
            ]
            await asyncio.gather(*asked, asyncio.sleep(QUIET_S / 4), return_exceptions=True)
            if before != [tracker.tokens for calls in counted for tracker in calls.trackers]:
                quiet_since = clock()

    async def _abort_again(self, calls: LiveCalls) -> None:
        while not calls.done.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_REPEAT_S):
                    await calls.done.wait()
                    return
            with contextlib.suppress(RollplaneError):
                await self.control.abort(calls.ids)

    async def _translate(self, error: grpc.aio.AioRpcError, what: str) -> RollplaneError:
        """Ours for a failed call; a lost connection is told apart from a lost engine by asking for its health."""
        ours = error_from_rpc(error, what=what)
        if isinstance(ours, EngineDied) and self._pool is not None and not self._closing:
            self._trouble = await probe(self._pool, INFERENCE.full_name, timeout_s=HEALTH_TIMEOUT_S)
            if self._trouble is None and error.code() is grpc.StatusCode.UNAVAILABLE:
                return TransportError(ours.message)
            self._trouble = self._trouble or ours.message
        return ours

    async def _watch(self) -> None:
        """Ask both services for their health, for as long as the engine lives."""
        pool = self._pool
        while pool is not None:
            await asyncio.sleep(HEALTH_PERIOD_S)
            self._trouble = await probe(pool, INFERENCE.full_name, timeout_s=HEALTH_TIMEOUT_S) or await probe(
                pool, CONTROL.full_name, timeout_s=HEALTH_TIMEOUT_S
            )
