"""vLLM in this process: `AsyncLLM` behind the `Engine` protocol.

One vLLM request per choice; a unary choice comes as one final output, a stream as growing ones (see `convert`). The API
side of vLLM (input processing, output processing) runs on this event loop, its engine core in a process of its own.
"""

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from rollplane.admission import check_request
from rollplane.engines.kv_mirror import KvMirror
from rollplane.engines.vllm import convert, media, versions
from rollplane.engines.vllm.adapters import Adapters
from rollplane.engines.vllm.broadcast import Receiver, offered_backends
from rollplane.engines.vllm.core_reader import CoreReader
from rollplane.engines.vllm.facts import read_info, transfer_kinds
from rollplane.engines.vllm.features import MediaModel, engine_input, sample_model
from rollplane.engines.vllm.live import LiveChoice, LiveRequest
from rollplane.engines.vllm.media import check_urls, rendered
from rollplane.engines.vllm.native import NativeTransfer, Sleep
from rollplane.engines.vllm.outputs import stream_events, unary_events
from rollplane.engines.vllm.policy import Policy
from rollplane.engines.vllm.settings import VllmSettings
from rollplane.engines.vllm.start import follow_kv_events, read_loaded, start_engine
from rollplane.engines.vllm.step_stats import Progress, vllm_families
from rollplane.engines.vllm.versions import VllmApi
from rollplane.engines.zmq_kv_events import ZmqKvEvents
from rollplane.errors import Conflict, EngineDied, EngineFailed, InvalidRequest, RollplaneError, Unavailable
from rollplane.identity import engine_salt
from rollplane.protocol.admin import AllowTensors, FlushReport, PauseMode, PauseReport, ResumeReport, StagedWeights
from rollplane.protocol.broadcast import Manifest, TransferGroup
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.kv_events import KvEvent
from rollplane.protocol.rendered import RenderBody, Rendered
from rollplane.protocol.request import GenerateRequest


class VllmEngine:
    """An `Engine`, `WeightReceiver`, `BroadcastReceiver`, `AdapterHost`, `KvEventSource` and `MetricsSource` over vLLM's `AsyncLLM`."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self._api: VllmApi | None = None
        self._engine: Any = None
        self._reader: CoreReader | None = None
        self._info: EngineInfo | None = None
        self._policy: Policy | None = None
        self._receiver: Receiver | None = None
        self._native: NativeTransfer | None = None
        self._sleep: Sleep | None = None
        self._adapters: Adapters | None = None
        self._media_model: MediaModel | None = None
        self._media: Any = None
        self._progress = Progress(moved_at=time.monotonic())
        self._mirror = KvMirror()
        self._kv_events: ZmqKvEvents | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._live: dict[str, list[LiveRequest]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False
        self._serial = itertools.count()
        self._closed = False

    def __repr__(self) -> str:
        version = self._api.version if self._api is not None else "not started"
        return f"<VllmEngine {version}, {sum(map(len, self._live.values()))} live, {self._policy!r}>"

    # Engine ----------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        if self._info is None:
            raise Conflict("the vLLM engine is not started")
        return self._info

    async def start(self) -> None:
        """Load vLLM and the model; some twenty seconds.

        Raises:
            InvalidRequest: no vLLM, one that was not tried, or arguments it cannot have. EngineDied: it did not start.
            Conflict: it was started before.
        """
        if self._api is not None:
            raise Conflict("the vLLM engine was started before; make another one")
        settings = self.settings
        api = self._api = versions.load_api(allow_untested=settings.allow_untested_vllm)
        sockets = self._sockets = tempfile.TemporaryDirectory(prefix="rollplane-kv-")
        engine = self._engine = await asyncio.to_thread(start_engine, settings, api, kv_events_at=sockets.name)
        try:
            self._reader = versions.watch(engine, api.version, self._progress, self._on_death)
            await engine.get_supported_tasks()
            loaded = await asyncio.to_thread(read_loaded, engine)
            config = engine.vllm_config.model_config
            if config.is_multimodal_model and engine.tokenizer is not None:
                self._media = versions.media_api()
                self._media_model = await asyncio.to_thread(sample_model, engine, self._media)
            self._info = read_info(settings, api, engine, loaded=loaded, media=self._media_model)
            backends = await offered_backends(engine) if loaded is not None else []
            self._info.capabilities.weight_transfer.extend(backends)
            if self._info.capabilities.lora is not None:
                self._adapters = Adapters(engine, api, self._info.capabilities.lora, loaded)
                await self._adapters.prepare()
            self._policy = Policy(
                engine,
                api,
                version=settings.policy_version or Path(settings.model).name,
                loaded=loaded,
                tied=bool(getattr(config.hf_text_config, "tie_word_embeddings", False)),
                adapters=self._adapters,
                isolate=settings.isolate_by_version,
                live=self._live_requests,
                resubmit=self._submit,
                on_cleared=self._mirror.clear,
            )
            self._native = NativeTransfer(engine, self._policy, backend=self._info.capabilities.native_transfer)
            self._sleep = Sleep(engine, self._policy, offered=self._info.capabilities.sleep)
            self._receiver = Receiver(engine, self._policy, backends=backends, root=settings.received_weights_dir)
            self._kv_events = follow_kv_events(engine, self._mirror)
            if self._kv_events is not None:
                self._kv_events.start()
        except BaseException:
            await versions.shut_down(engine, self._reader)
            raise

    async def close(self, *, grace_s: float = 0.0) -> None:
        """See `Engine.close`."""
        self._closing = True
        if self._engine is None or self._closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        self._closed = True
        self._policy_side().running.set()
        for live in self._live_requests():
            for choice in live.open_choices:
                choice.fail(EngineDied("the engine was closed"))
                versions.fail_collector(choice.collector, EngineDied("the engine was closed"))
        if self._kv_events is not None:
            await self._kv_events.close()
        self._mirror.end()
        await versions.shut_down(self._engine, self._reader)
        if self._receiver is not None:
            await self._receiver.close()
        if self._sockets is not None:
            self._sockets.cleanup()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """See `Engine.generate`."""
        self._check_alive()
        check_request(request, self.info)
        convert.check_for_vllm(request, self.info)
        convert.check_transfer(request, kinds=transfer_kinds(self._engine.vllm_config))
        live = LiveRequest(request, convert.plan_choices(request, self.info))
        if request.adapter is not None:
            live.lora = self._adapter_side().request(request.adapter)
        self._live.setdefault(request.request_id, []).append(live)
        self._idle.clear()
        try:
            await self._prepare(live)
            await self._admit(live)
            events = stream_events if request.stream else unary_events
            async for event in events(live, logprobs_mode=self.info.capabilities.logprobs_mode):
                yield event
        except RollplaneError:
            raise
        except Exception as error:  # only our errors leave an engine
            raise self._translate(error) from error
        finally:
            await self._leave(live)

    async def abort(self, request_id: str) -> int:
        """See `Engine.abort`."""
        ended = 0
        for live in self._live.get(request_id, []):
            if live.aborted.is_set():
                continue
            live.aborted.set()
            ended += 1
            for choice in live.open_choices:
                await versions.abort(self._engine, choice.collector)
        return ended

    async def health(self) -> EngineHealth:
        """See `Engine.health`; what vLLM's last step said."""
        engine, policy = self._engine, self._policy
        if engine is None or policy is None:
            return EngineHealth(alive=False, state="starting")
        if self._closing:
            return EngineHealth(alive=not self._closed, state="stopped" if self._closed else "draining")
        if engine.errored:
            return EngineHealth(alive=False, state="failed", reason="the vLLM engine is gone")
        if policy.broken is not None:
            return EngineHealth(alive=False, state="failed", reason=f"the weights are broken: {policy.broken}")
        if self.sleeping.asleep:
            return EngineHealth(alive=True, state="asleep")
        progress, busy = self._progress, bool(self._live) and not policy.paused
        began = max([progress.moved_at, *(live.began for live in self._live_requests())]) if busy else 0.0
        held = sum(not live.choices for live in self._live_requests())
        return EngineHealth(
            alive=True,
            state="paused" if policy.paused else "ready",
            running=progress.running if self._live else 0,
            waiting=(progress.waiting if self._live else 0) + held,
            last_progress_s=max(0.0, time.monotonic() - began) if busy else 0.0,
            kv_usage=progress.kv_usage,
            counters={"preemptions": progress.preemptions},
        )

    def metric_families(self) -> list[Any]:
        """See `MetricsSource.metric_families`: all that vLLM counts, to the last step."""
        if self._reader is None:
            return []
        self._reader.stats.tell()
        return list(vllm_families())

    # WeightReceiver --------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> str:
        """See `WeightReceiver.policy_version`."""
        return self._policy_side().version

    @property
    def salt_scope(self) -> str | None:
        """See `IsolatesVersions.salt_scope`."""
        return self._policy_side().salt_scope

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        """See `WeightReceiver.pause`."""
        return await self._policy_side().pause(mode, clear_cache=clear_cache)

    async def resume(self) -> ResumeReport:
        """See `WeightReceiver.resume`."""
        return await self._policy_side().resume()

    async def stage_weights(self, path: str, *, allow_tensors: Sequence[AllowTensors] = ()) -> StagedWeights:
        """See `WeightReceiver.stage_weights`."""
        return await self._policy_side().stage(path, allow_tensors=allow_tensors)

    async def apply_weights(self, staged: StagedWeights, *, version: str) -> None:
        """See `WeightReceiver.apply_weights`."""
        await self._policy_side().apply(staged, version=version)
        await self._receiver_side().forget()

    async def set_policy_version(self, version: str) -> None:
        """See `WeightReceiver.set_policy_version`."""
        self._policy_side().relabel(version)

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """See `WeightReceiver.flush_cache`."""
        return await self._policy_side().flush(preempt=preempt)

    # BroadcastReceiver -----------------------------------------------------------------------------------------------

    async def join_group(self, group: TransferGroup, *, deadline_s: float) -> None:
        """See `BroadcastReceiver.join_group`."""
        await self._receiver_side().join(group, deadline_s=deadline_s)

    async def receive_weights(self, manifest: Manifest, *, deadline_s: float) -> StagedWeights:
        """See `BroadcastReceiver.receive_weights`."""
        return await self._receiver_side().receive(manifest, deadline_s=deadline_s)

    async def leave_group(self) -> None:
        """See `BroadcastReceiver.leave_group`."""
        await self._receiver_side().leave()

    # vLLM's own weight transfer and sleep ------------------------------------------------------------------------------

    @property
    def native(self) -> NativeTransfer:
        """Weights by vLLM's own transfer backend, where it was started with one."""
        if self._native is None:
            raise Conflict("the vLLM engine is not started")
        return self._native

    @property
    def sleeping(self) -> Sleep:
        """Sleep and waking up, where vLLM was started with sleep mode."""
        if self._sleep is None:
            raise Conflict("the vLLM engine is not started")
        return self._sleep

    # AdapterHost -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, engine_name: str, path: str) -> None:
        """See `AdapterHost.load_adapter`."""
        await self._adapter_side().load(engine_name, path)

    async def unload_adapter(self, engine_name: str) -> None:
        """See `AdapterHost.unload_adapter`."""
        await self._adapter_side().unload(engine_name)

    async def loaded_adapters(self) -> list[str]:
        """See `AdapterHost.loaded_adapters`."""
        return self._adapters.names() if self._adapters is not None else []

    # KvEventSource ---------------------------------------------------------------------------------------------------

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        """See `KvEventSource.kv_events`. Where vLLM was started without telling what it caches, nothing ever comes."""
        return self._mirror.feed()

    async def render_media(self, body: RenderBody) -> Rendered:
        """See `MediaRenderer.render_media`."""
        self._vllm()
        hosts = self._engine.vllm_config.model_config.allowed_media_domains
        return await media.render(self._engine, body, allowed_hosts=hosts)

    # One request -----------------------------------------------------------------------------------------------------

    async def _prepare(self, live: LiveRequest) -> None:
        """vLLM's input of the prompt, all but its salt, and one sampling record per choice."""
        request, api = live.request, self._vllm()
        vocab_tokens = int(self._engine.vllm_config.model_config.get_vocab_size())
        token_ids = request.token_ids.tolist()
        if request.features is not None and self._media_model is not None:
            live.prompt = await asyncio.to_thread(
                engine_input,
                token_ids,
                request.features,
                salt=None,
                model=self._media_model,
                media=self._media,
                mm_input=api.mm_input,
            )
        elif request.content_parts is not None:
            config = self._engine.vllm_config.model_config
            check_urls(request.content_parts, allowed_hosts=config.allowed_media_domains)
            live.prompt = await rendered(self._engine, token_ids, request.content_parts)
        else:
            live.prompt = api.tokens_input(token_ids)
        live.prompt_tokens = len(live.prompt["prompt_token_ids"])
        version = self._policy_side().version
        for index in range(request.sampling.choices):
            fields = convert.sampling_fields(request, self.info, index=index, vocab_tokens=vocab_tokens)
            live.choices.append(LiveChoice(index, versions.make_sampling_params(api, fields), version))

    async def _admit(self, live: LiveRequest) -> None:
        """Hand each choice to vLLM once nothing is paused; choices of an aborted request stay out."""
        policy = self._policy_side()
        for choice in live.choices:
            while policy.paused and not live.aborted.is_set():
                await _first(policy.running.wait(), live.aborted.wait())
            if live.aborted.is_set():
                choice.ended = True
                continue
            await self._submit(live, choice)

    async def _submit(self, live: LiveRequest, choice: LiveChoice) -> None:
        """One vLLM request for a choice, under the present version: nothing is awaited before it is registered."""
        policy, request = self._policy_side(), live.request
        self._check_alive()
        choice.spans.change(policy.version, made=0)
        salt = engine_salt(request.cache_salt, scope=policy.salt_scope)
        prompt = dict(live.prompt)
        if salt is not None:
            prompt["cache_salt"] = salt
        options: dict[str, Any] = {"lora_request": live.lora, "priority": request.priority}
        if request.traceparent is not None:
            options["trace_headers"] = {"traceparent": request.traceparent}
        if request.options.session_id is not None:
            options["session_id"] = request.options.session_id
        name = f"{request.request_id}#{next(self._serial)}"
        try:
            choice.settle(await versions.submit(self._engine, name, prompt, choice.params, **options))
        except Exception as error:  # vLLM raises many kinds for a request that is wrong
            raise self._translate(error) from error
        if live.aborted.is_set():
            await versions.abort(self._engine, choice.collector)

    async def _leave(self, live: LiveRequest) -> None:
        """Forget a request; what vLLM still runs of it is ended within its next step."""
        lives = self._live.get(live.request.request_id, [])
        if live in lives:
            lives.remove(live)
        if not lives:
            self._live.pop(live.request.request_id, None)
        if not self._live:
            self._idle.set()
        for choice in live.open_choices:
            choice.ended = True
            with contextlib.suppress(Exception):  # the engine may be gone, and the request with it
                await versions.abort(self._engine, choice.collector)

    def _translate(self, error: Exception) -> RollplaneError:
        """Our error for one of vLLM's: the request's fault, this request's failure, or the engine's end."""
        api = self._vllm()
        if isinstance(error, RollplaneError):
            return error
        if isinstance(error, api.DeadError) or self._engine.errored:
            return EngineDied("the vLLM engine is gone")
        if isinstance(error, (api.ClientError, ValueError)):
            return versions.refused(error)
        return EngineFailed(f"vLLM failed on the request: {type(error).__name__}: {error}")

    def _check_alive(self) -> None:
        if self._closing or self._engine is None:
            raise EngineDied("the engine is closed")
        if self._sleep is not None and self._sleep.asleep:
            raise Unavailable("the engine is asleep")
        if self._engine.errored:
            raise EngineDied("the vLLM engine is gone")

    def _on_death(self) -> None:
        """Requests that wait before vLLM go on, and find that it is gone."""
        if self._policy is not None:
            self._policy.running.set()

    def _live_requests(self) -> list[LiveRequest]:
        return [live for lives in self._live.values() for live in lives]

    def _vllm(self) -> VllmApi:
        if self._api is None:
            raise Conflict("the vLLM engine is not started")
        return self._api

    def _policy_side(self) -> Policy:
        if self._policy is None:
            raise Conflict("the vLLM engine is not started")
        return self._policy

    def _receiver_side(self) -> Receiver:
        if self._receiver is None:
            raise Conflict("the vLLM engine is not started")
        return self._receiver

    def _adapter_side(self) -> Adapters:
        if self._adapters is None:
            raise InvalidRequest("the vLLM engine was started without LoRA; start it with --enable-lora", param="model")
        return self._adapters


async def _first(*waits: Any) -> None:
    """Return when the first of these has."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
