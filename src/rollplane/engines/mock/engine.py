"""The mock engine: every promise of `engines.base`, no model. For tests, for load, and for laptops without torch."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rollplane.admission import check_request, resolve_max_tokens, wants_mask, wants_routes
from rollplane.engines.mock.controls import HONOURED, read_controls
from rollplane.engines.mock.core import Core
from rollplane.engines.mock.directories import read_adapter, read_weights
from rollplane.engines.mock.live import Live
from rollplane.engines.mock.native import MockSleep, MockTransfer
from rollplane.engines.mock.settings import Fault, MockSettings, Operation
from rollplane.engines.mock.step_clock import Clock, LoopClock
from rollplane.errors import Conflict, EngineDied, EngineFailed, InvalidRequest, NotFound, Unavailable
from rollplane.identity import identify
from rollplane.protocol.admin import AllowTensors, FlushReport, PauseMode, PauseReport, ResumeReport, StagedWeights
from rollplane.protocol.events import Event
from rollplane.protocol.info import Capabilities, EngineHealth, EngineInfo, EngineState, LoraCapability
from rollplane.protocol.kv_events import KvEvent
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.versions import check_version_name

_STRICTNESS: dict[PauseMode | None, int] = {None: 0, "keep": 1, "wait": 2, "abort": 3}


class MockEngine:
    """An `Engine`, `WeightReceiver`, `NativeControls`, `AdapterHost` and `KvEventSource` without a model; see `language` for its tokens.

    Tokens depend on the weights' content, the adapter's content, media, the whole prompt and the seed, never on salts,
    names or versions. A weight update does not drop the prefix cache by itself, as in vLLM: whoever isolates versions
    does it by salt or by flushing.

    Args:
        settings: size, speed, faults; the defaults are an instant dense text model.
        clock: whose seconds count; the event loop's when None.
    """

    def __init__(self, settings: MockSettings | None = None, *, clock: Clock | None = None) -> None:
        self.settings = settings or MockSettings()
        self.settings.check()
        self._clock = clock if clock is not None else LoopClock()
        self._core = Core(self.settings, self._clock, on_death=self._die)
        self._state: EngineState = "starting"
        self._reason: str | None = None
        self._arrivals = itertools.count()
        self._faults = list(self.settings.faults)
        self._calls: Counter[str] = Counter()
        self._subscribers: list[asyncio.Queue[list[KvEvent] | None]] = []
        self._core.on_kv_change = self._publish
        self._control = asyncio.Lock()
        self._info = _describe(self.settings)
        self.native = MockTransfer(self._core, backend=self.settings.transfer_backend, call=self._control_call)
        self.sleeping = MockSleep(self._core, offered=self.settings.sleep_mode, call=self._control_call)

    def __repr__(self) -> str:
        return f"<MockEngine {self.settings.model!r} {self._state}, {self._core!r}>"

    @property
    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return self._info

    @property
    def weights_digest(self) -> str:
        """Digest of the weights that make tokens now, 64 hex digits."""
        return self._core.weights_digest

    def add_fault(self, fault: Fault) -> None:
        """Script one more fault; `Fault.at` counts from the engine's start."""
        self._faults.append(fault)

    def calls(self, operation: Operation) -> int:
        """How often an operation was called."""
        return self._calls[operation]

    async def start(self) -> None:
        """See `Engine.start`."""
        if self._state == "starting":
            self._state = "ready"

    async def close(self, *, grace_s: float = 0.0) -> None:
        """See `Engine.close`."""
        if self._state == "stopped":
            return
        if self._state != "failed":
            self._state, self._reason = "stopped", "the engine was closed"
        if grace_s > 0 and self._core.busy:
            deadline = self._clock.call_later(grace_s, self._core.release_waiters)
            await self._core.idle()
            deadline.cancel()
        self._core.fail_all(lambda live: EngineDied("the engine was closed"))
        self._state = "stopped"
        self._end_subscriptions()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """See `Engine.generate`."""
        self._require_serving()
        if self.sleeping.asleep:
            raise Unavailable("the engine is asleep")
        fault = self._fault("generate", request.request_id)
        live = self._admit(request, fault)
        self._core.submit(live)
        try:
            while True:
                while live.events:
                    yield live.events.popleft()
                if live.error is not None:
                    raise live.error
                if live.ended:
                    return
                live.waiter = asyncio.get_running_loop().create_future()
                await live.waiter
        finally:
            self._core.forget(live)

    async def abort(self, request_id: str) -> int:
        """See `Engine.abort`."""
        found = list(self._core.live_named(request_id))
        for live in found:
            self._core.abort(live)
        return len(found)

    async def health(self) -> EngineHealth:
        """See `Engine.health`; `counters` has requests, prompt_tokens_computed, tokens, aborted, steps, cached_blocks."""
        core = self._core
        state = self._state
        if state == "ready" and core.paused is not None:
            state = "asleep" if self.sleeping.asleep else "pausing" if core.busy and not core.frozen else "paused"
        blocks = self.settings.cache_blocks
        return EngineHealth(
            alive=self._state not in ("failed", "stopped"),
            state=state,
            running=core.running,
            waiting=core.waiting,
            last_progress_s=core.stuck_s(),
            kv_usage=len(core.cache) / blocks if blocks else None,
            reason=self._reason,
            counters={**core.counters, "steps": core.steps.whole, "cached_blocks": len(core.cache)},
        )

    @property
    def policy_version(self) -> str:
        """See `WeightReceiver.policy_version`."""
        return self._core.version

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        """See `WeightReceiver.pause`. Requests that wait in the queue are kept by `wait`, ended by `abort`."""
        self._control_call("pause")
        core = self._core
        already = core.paused is not None
        kept = drained = aborted = 0
        if _STRICTNESS[mode] > _STRICTNESS[core.paused]:
            core.paused = mode
        if mode == "abort":
            if core.frozen:
                core.thaw()
            for live in list(core.live_named(None)):
                core.abort(live)
                aborted += 1
            core.freeze()
        elif mode == "wait":
            drained = core.running
            if core.frozen:
                core.thaw()
            await self._drained()
            core.freeze()
        elif already and not core.frozen:
            await self._drained()
        else:
            core.freeze()
            kept = core.running
        cleared = None
        if clear_cache:
            core.drop_cache(held_too=True)
            cleared = True
        return PauseReport(
            mode=mode, already_paused=already, kept=kept, aborted=aborted, drained=drained, cleared=cleared
        )

    async def resume(self) -> ResumeReport:
        """See `WeightReceiver.resume`."""
        self._control_call("resume")
        was = self._core.paused is not None
        if was:
            self._core.paused = None
            self._core.thaw()
            self._core.release_waiters()
        return ResumeReport(was_paused=was, policy_version=self._core.version)

    async def stage_weights(self, path: str, *, allow_tensors: Sequence[AllowTensors] = ()) -> StagedWeights:
        """See `WeightReceiver.stage_weights`: any directory of `*.safetensors`, or one with a `mock_weights.json`.

        No model holds their tensors to it; a `mock_weights.json` may list some as `missing` or `unexpected`.
        """
        self._control_call("stage_weights")
        staged = await asyncio.to_thread(read_weights, path, allow_tensors=allow_tensors)
        await self._take(self.settings.stage_s)
        return staged

    async def apply_weights(self, staged: StagedWeights, *, version: str) -> None:
        """See `WeightReceiver.apply_weights`.

        Raises:
            Conflict: not paused, or still draining.
        """
        check_version_name(version, param="version")
        async with self._control:
            self._control_call("apply_weights")
            if not self._core.frozen:
                raise Conflict(f"weights change only while paused and idle; this engine is {self!r}")
            await self._take(self.settings.apply_s)
            if not self._core.frozen:
                raise EngineFailed("the engine was resumed while weights were applied; the old weights serve")
            self._core.replace_weights(staged.digest, version)

    async def set_policy_version(self, version: str) -> None:
        """See `WeightReceiver.set_policy_version`."""
        self._require_serving()
        self._core.relabel(check_version_name(version, param="version"))

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """See `WeightReceiver.flush_cache`."""
        self._require_serving()
        freed, stayed, preempted = self._core.drop_cache(held_too=preempt)
        return FlushReport(
            reset=not stayed,
            blocks_freed=freed,
            preempted=preempted,
            reason=f"{stayed} blocks are held by running requests" if stayed else None,
        )

    async def load_adapter(self, engine_name: str, path: str) -> None:
        """See `AdapterHost.load_adapter`: a directory with `adapter_config.json`; its bytes are the adapter."""
        self._control_call("load_adapter")
        slots = self.settings.max_adapters
        digest = await asyncio.to_thread(read_adapter, path, max_rank=self.settings.max_adapter_rank)
        known = self._core.adapters.get(engine_name)
        if known is not None and known != digest:
            raise Conflict(f"adapter {engine_name!r} is loaded with other files; each loading needs its own name")
        if known is None and len(self._core.adapters) >= slots:
            raise Conflict(f"all {slots} adapter slots are taken", details={"loaded": sorted(self._core.adapters)})
        self._core.adapters[engine_name] = digest

    async def unload_adapter(self, engine_name: str) -> None:
        """See `AdapterHost.unload_adapter`.

        Raises:
            Conflict: a request uses it.
        """
        self._control_call("unload_adapter")
        users = [v.request.request_id for v in self._core.live_named(None) if v.request.adapter == engine_name]
        if users:
            raise Conflict(f"adapter {engine_name!r} is used by {len(users)} requests", details={"requests": users[:8]})
        self._core.adapters.pop(engine_name, None)

    async def loaded_adapters(self) -> list[str]:
        """See `AdapterHost.loaded_adapters`."""
        return sorted(self._core.adapters)

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """See `KvEventSource.kv_events`; ends when the engine does."""
        queue: asyncio.Queue[list[KvEvent] | None] = asyncio.Queue()
        self._publish()
        queue.put_nowait(self._core.cache.snapshot())
        self._subscribers.append(queue)
        try:
            while (batch := await queue.get()) is not None:
                yield batch
        finally:
            self._subscribers.remove(queue)

    def _admit(self, request: GenerateRequest, fault: Fault | None) -> Live:
        """The checked request as the core takes it."""
        check_request(request, self._info)
        if fault is not None and fault.kind == "refuse":
            raise InvalidRequest("scripted to refuse this request")
        for i, item in enumerate(request.features or ()):
            if item.kwargs is None:
                raise InvalidRequest(
                    f"features.kwargs_data of item {i} is null, but the mock engine caches no media",
                    param=f"features.kwargs_data.{item.modality}",
                )
        identify(request.features)
        if request.adapter is not None and request.adapter not in self._core.adapters:
            raise NotFound(f"adapter {request.adapter!r} is not loaded", param="model")
        mask = wants_mask(request, self._info)
        return Live(
            request=request,
            by=read_controls(request.sampling, self.settings, mask=mask, vocab=self._core.language.modulus),
            max_tokens=resolve_max_tokens(request, self._info),
            arrival=next(self._arrivals),
            want_routes=wants_routes(request, self._info),
            fault=fault,
        )

    async def _drained(self) -> None:
        await self._core.idle()
        self._require_serving()
        if self._core.paused is None:
            raise Conflict("the engine was resumed while it was pausing")

    def _require_serving(self) -> None:
        if self._state == "starting":
            raise Unavailable("the engine was not started")
        if self._state != "ready":
            raise EngineDied(self._reason or f"the engine is {self._state}")

    def _control_call(self, operation: Operation) -> None:
        """Count a control call, and let its scripted fault befall it."""
        self._require_serving()
        fault = self._fault(operation, None)
        if fault is None:
            return
        if fault.kind == "die":
            self._die(f"scripted to die in {operation}")
            raise EngineDied(self._reason or "")
        if fault.kind == "refuse":
            raise InvalidRequest(f"scripted to refuse {operation}")
        if fault.kind == "foreign_error":
            raise RuntimeError(f"scripted foreign error in {operation}")
        raise EngineFailed(f"scripted to fail in {operation}")

    def _fault(self, operation: Operation, request_id: str | None) -> Fault | None:
        self._calls[operation] += 1
        call = self._calls[operation]
        for fault in self._faults:
            if fault.operation != operation:
                continue
            if fault.request_id is not None:
                if fault.request_id == request_id:
                    return fault
            elif fault.at <= call < fault.at + fault.times:
                return fault
        return None

    def _die(self, reason: str) -> None:
        self._state, self._reason = "failed", reason
        self._core.fail_all(lambda live: EngineDied(reason))
        self._end_subscriptions()

    async def _take(self, seconds: float) -> None:
        """Let time pass on the engine's clock."""
        if seconds > 0:
            done = asyncio.get_running_loop().create_future()
            handle = self._clock.call_later(seconds, lambda: None if done.done() else done.set_result(None))
            try:
                await done
            finally:
                handle.cancel()

    def _publish(self) -> None:
        events = self._core.cache.take_events()
        if events:
            for queue in self._subscribers:
                queue.put_nowait(events)

    def _end_subscriptions(self) -> None:
        for queue in self._subscribers:
            queue.put_nowait(None)


def _describe(settings: MockSettings) -> EngineInfo:
    return EngineInfo(
        engine="mock",
        engine_version="1",
        model=settings.model,
        aliases=list(settings.aliases),
        max_model_len=settings.max_model_len,
        vocab_bound=settings.vocab_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_stop_token_ids=128,
        max_allowed_token_ids=1024,
        max_logit_bias=1024,
        block_tokens=settings.block_tokens if settings.cache_blocks else None,
        kv_blocks=settings.cache_blocks or None,
        moe=settings.moe,
        eos_token_ids=[settings.eos_token_id],
        capabilities=Capabilities(
            routed_experts=settings.moe is not None,
            sampling_mask=settings.sampling_mask,
            logprobs_mode="sampling",
            prompt_logprobs=True,
            priority=True,
            kv_events=settings.cache_blocks > 0,
            weight_transfer=["disk"],
            native_transfer=settings.transfer_backend,
            sleep=settings.sleep_mode,
            lora=LoraCapability(max=settings.max_adapters, rank=settings.max_adapter_rank)
            if settings.max_adapters
            else None,
            features=list(settings.features),
            sampling_fields=list(HONOURED),
        ),
    )


def _protocols(engine: MockEngine) -> tuple[Any, ...]:
    """Checked by the type checker only: the mock answers to every protocol."""
    from rollplane.engines import base

    as_engine: base.Engine = engine
    as_receiver: base.WeightReceiver = engine
    as_host: base.AdapterHost = engine
    as_source: base.KvEventSource = engine
    as_native: base.NativeControls = engine
    return as_engine, as_receiver, as_host, as_source, as_native
