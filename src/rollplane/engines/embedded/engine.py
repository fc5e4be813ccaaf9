"""The embedded engine: plain Transformers models on a CPU, exact and with every side channel, for laptops and CI.

It is an `Engine`, a `WeightReceiver`, a `BroadcastReceiver` and an `AdapterHost`. The step loop runs in one thread of its own; nothing here
blocks the event loop. A unary request costs one message per choice.
"""

import asyncio
import contextlib
import importlib.metadata
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from rollplane.admission import check_request
from rollplane.engines.collective import backends
from rollplane.engines.embedded.adapter_reader import read_contents
from rollplane.engines.embedded.broadcast import Receiver
from rollplane.engines.embedded.convert import SAMPLING_FIELDS, to_generation
from rollplane.engines.embedded.core import Core, CoreSettings
from rollplane.engines.embedded.model import CausalModel, load_model
from rollplane.engines.embedded.results import Emission
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.embedded.step_thread import StepThread
from rollplane.engines.embedded.stops import load_tokenizer
from rollplane.engines.embedded.weights import LoadedCheckpoint
from rollplane.errors import Conflict, EngineDied, EngineFailed, RollplaneError
from rollplane.protocol.admin import AllowTensors, FlushReport, PauseMode, PauseReport, ResumeReport, StagedWeights
from rollplane.protocol.broadcast import Manifest, TransferGroup
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, FinishReason, PromptEvent, ServedBy
from rollplane.protocol.info import Capabilities, EngineHealth, EngineInfo, EngineState, LoraCapability, MoeShape
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.versions import check_version_name

_FINISH_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}


class _Live:
    """A request that is being served: what the thread reported and the reader has not taken yet."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self.open = request.sampling.choices
        self.reports: asyncio.Queue[Emission | RollplaneError] = asyncio.Queue()

    def fail(self, error: RollplaneError) -> None:
        """The reader raises this after what was reported before."""
        self.reports.put_nowait(error)


class EmbeddedEngine:
    """Serves one model from a directory.

    Args:
        settings: see `EmbeddedSettings`.
        model: a model that is in memory already, used instead of loading `settings.model`.
    """

    def __init__(self, settings: EmbeddedSettings, *, model: CausalModel | None = None) -> None:
        self.settings = settings
        self._given = model
        self._initial_version = settings.policy_version or Path(settings.model).name
        self._info: EngineInfo | None = None
        self._core: Core | None = None
        self._thread = StepThread(self._build, deliver=self._deliver, died=self._died)
        self._live: dict[str, _Live] = {}
        self._receiver = Receiver()
        self._empty = asyncio.Event()
        self._empty.set()
        self._keys = itertools.count()
        self._seeds = random.Random(settings.seed) if settings.seed is not None else None
        self._closed = False

    def __repr__(self) -> str:
        return f"<EmbeddedEngine {self.settings.model} {self._state}, {len(self._live)} live>"

    # Engine ----------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Facts that do not change; valid after `start`."""
        if self._info is None:
            raise EngineDied("the embedded engine was not started")
        return self._info

    async def start(self) -> None:
        """Load the model and start the step loop.

        Raises:
            InvalidRequest: a setting or a model that cannot be served; by name.
            NotFound: no model in the directory.
            EngineDied: anything else that went wrong.
        """
        self.settings.check()
        check_version_name(self._initial_version, param="policy_version")
        self._core = await self._thread.start()
        self._info = self._describe(self._core)

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Stop; running requests may finish within `grace_s` seconds, then end with `EngineDied`."""
        self._closed = True
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
        for live in self._live.values():
            live.fail(EngineDied("the embedded engine was closed"))
        await self._receiver.leave()
        await self._thread.stop()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Serve one request; see `Engine.generate`."""
        core = self._serving()
        check_request(request, self.info)
        key = f"{request.request_id}#{next(self._keys)}"
        generation = to_generation(
            request,
            self.info,
            key=key,
            seed=self._seeds.getrandbits(62) if self._seeds is not None else None,
            eos_token_ids=core.model.eos_token_ids,
        )
        live = self._live[key] = _Live(request)
        self._empty.clear()
        self._thread.post(lambda core: core.submit(generation), failed=live.fail)
        unfinished = request.sampling.choices
        prompt_told = False
        served_by = ServedBy(
            logprobs_mode="greedy" if generation.controls.temperature == 0 else "sampling",
            sampling_mask_mode=_mask_mode(generation.sampling_mask, generation.controls.temperature),
        )
        try:
            while unfinished:
                report = await live.reports.get()
                if isinstance(report, RollplaneError):
                    raise report
                if not prompt_told:
                    prompt_told = True
                    yield _prompt_event(request, report)
                event = _choice_event(report, served_by)
                unfinished -= event.finish_reason is not None
                yield event
            yield EndEvent(served_by=served_by)
        finally:
            del self._live[key]
            if not self._live:
                self._empty.set()
            if live.open:
                self._thread.post(lambda core: core.abort(key))

    async def abort(self, request_id: str) -> int:
        """End every live request of this id with finish reason `abort`; how many there were."""
        keys = [key for key, live in self._live.items() if live.request_id == request_id and live.open]
        if not keys:
            return 0

        def run(core: Core) -> None:
            for key in keys:
                self._thread.emit(core.abort(key))

        await self._thread.call(run)
        return len(keys)

    async def health(self) -> EngineHealth:
        """A moment's health, from what the thread last left."""
        core, state = self._core, self._state
        alive = state not in ("failed", "stopped", "starting")
        death = self._thread.death
        if core is None:
            return EngineHealth(alive=False, state=state, reason=death.message if death else None)
        stalled_s = time.monotonic() - self._thread.progress_at_s if alive and not core.idle else 0.0
        slots = core.scheduler
        return EngineHealth(
            alive=alive,
            state=state,
            running=len(slots.running) + slots.prefilling,
            waiting=slots.waiting,
            last_progress_s=stalled_s,
            kv_usage=len(slots.running) / slots.max_slots,
            reason=death.message if death else None,
            counters={"steps": core.steps, "generated_tokens": core.generated_tokens},
        )

    # WeightReceiver --------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> str:
        """The version of the weights that make tokens now."""
        return self._core.version if self._core is not None else self._initial_version

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        """Stop stepping; see `WeightReceiver.pause`. While paused, a stricter mode is applied to what is left."""

        def run(core: Core) -> PauseReport:
            before, already = core.scheduler.started, core.paused is not None
            live = len(core.scheduler.requests())
            stricter = core.stricter_mode(mode)
            self._thread.emit(core.pause(stricter))
            return PauseReport(
                mode=mode,
                already_paused=already,
                kept=before if stricter == "keep" else 0,
                aborted=live if stricter == "abort" else 0,
                drained=before if stricter == "wait" else 0,
            )

        report = await self._thread.call(run)
        await self._thread.wait_idle()
        if clear_cache:
            await self._thread.call(lambda core: core.clear_cache())
            report.cleared = True
        return report

    async def resume(self) -> ResumeReport:
        """Step again. Not paused: nothing happens."""

        def run(core: Core) -> bool:
            was_paused = core.paused is not None
            core.resume()
            return was_paused

        return ResumeReport(was_paused=await self._thread.call(run), policy_version=self.policy_version)

    async def stage_weights(self, path: str, *, allow_tensors: Sequence[AllowTensors] = ()) -> StagedWeights:
        """Read and check a checkpoint while generation goes on; see `WeightReceiver.stage_weights`."""
        checkpoint = await asyncio.to_thread(self._serving().layout.read, path, allow_tensors=allow_tensors)
        if checkpoint.ignored is not None and checkpoint.ignored.missing:
            missing = self._serving().layout.missing(checkpoint.tensors)
            kept = await self._thread.call(lambda core: core.layout.copies(missing))
            checkpoint = await asyncio.to_thread(checkpoint.with_kept, kept)
        return StagedWeights(
            path=path,
            digest=checkpoint.digest,
            tensors=len(checkpoint.tensors),
            bytes=checkpoint.bytes,
            ignored=checkpoint.ignored,
            handle=checkpoint,
        )

    async def apply_weights(self, staged: StagedWeights, *, version: str) -> None:
        """Put staged weights in place; see `WeightReceiver.apply_weights`."""
        check_version_name(version, param="version")
        checkpoint = staged.handle
        if not isinstance(checkpoint, LoadedCheckpoint):
            checkpoint = await asyncio.to_thread(self._serving().layout.read, staged.path)
            if checkpoint.digest != staged.digest:
                raise EngineFailed(
                    f"{staged.path} has digest {checkpoint.digest}, {staged.digest} was staged: the files changed"
                )
        ready: LoadedCheckpoint = checkpoint
        try:
            await self._thread.call(lambda core: core.apply_weights(ready, version=version))
        except Conflict as error:
            raise EngineFailed(error.message) from error

    async def set_policy_version(self, version: str) -> None:
        """Change the label only; touches no request."""
        check_version_name(version, param="version")

        def run(core: Core) -> None:
            core.version = version

        await self._thread.call(run)

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """There is no cache beyond the running requests' own; `preempt` makes them compute theirs again."""

        def run(core: Core) -> FlushReport:
            started = core.scheduler.started
            if started and not preempt:
                return FlushReport(reset=False, reason=f"{started} running request(s) hold their own KV")
            if started:
                core.clear_cache()
            return FlushReport(reset=True, preempted=started)

        return await self._thread.call(run)

    # BroadcastReceiver -----------------------------------------------------------------------------------------------

    async def join_group(self, group: TransferGroup, *, deadline_s: float) -> None:
        """Join a trainer's group; see `BroadcastReceiver.join_group`."""
        self._serving()
        await self._receiver.join(group, deadline_s=deadline_s)

    async def receive_weights(self, manifest: Manifest, *, deadline_s: float) -> StagedWeights:
        """Receive into memory of their own while generation goes on; see `BroadcastReceiver.receive_weights`."""
        checkpoint = await self._receiver.receive(manifest, self._serving().layout, deadline_s=deadline_s)
        return StagedWeights(
            path=str(checkpoint.path),
            digest=checkpoint.digest,
            tensors=len(checkpoint.tensors),
            bytes=checkpoint.bytes,
            handle=checkpoint,
        )

    async def leave_group(self) -> None:
        """Leave the group; see `BroadcastReceiver.leave_group`."""
        await self._receiver.leave()

    # AdapterHost -----------------------------------------------------------------------------------------------------

    async def load_adapter(self, engine_name: str, path: str) -> None:
        """Load an adapter's files beside those already there; see `AdapterHost.load_adapter`."""
        self._serving()
        contents = await asyncio.to_thread(read_contents, path)
        await self._thread.call_sliced(lambda core: core.load_adapter(engine_name, contents))

    async def unload_adapter(self, engine_name: str) -> None:
        """Drop an adapter; unknown names are no error.

        Raises:
            Conflict: a request still uses it.
        """
        await self._thread.call(lambda core: core.unload_adapter(engine_name))

    async def loaded_adapters(self) -> list[str]:
        """Engine-side names now loaded."""
        return await self._thread.call(lambda core: core.adapters.names)

    # Inside ----------------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> EngineState:
        if self._thread.death is not None and not self._closed:
            return "failed"
        if self._closed:
            return "stopped"
        if self._core is None:
            return "starting"
        return "paused" if self._core.paused is not None else "ready"

    def _serving(self) -> Core:
        """The core, if it can serve.

        Raises:
            EngineDied: not started, closed, or failed.
        """
        if self._thread.death is not None:
            raise self._thread.death
        if self._closed or self._core is None:
            raise EngineDied(f"the embedded engine is {self._state}")
        return self._core

    def _build(self) -> Core:
        """Load everything; runs in the step thread."""
        import torch

        settings = self.settings
        if settings.max_loras:
            import peft  # noqa: F401 - a first load beside running requests would import it, for a quarter of a second

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        model = self._given or load_model(
            settings.model, dtype=settings.dtype, max_context_tokens=settings.max_model_len
        )
        core_settings = CoreSettings(
            max_slots=settings.max_num_seqs,
            chunk_tokens=settings.chunk_tokens,
            max_adapters=settings.max_loras,
            max_adapter_rank=settings.max_lora_rank,
        )
        tokenizer = load_tokenizer(model.directory)
        return Core(model, core_settings, tokenizer=tokenizer, version=self._initial_version)

    def _describe(self, core: Core) -> EngineInfo:
        settings, shape = self.settings, core.model.shape
        names = settings.served_model_name or [Path(settings.model).name]
        moe = MoeShape(layers=shape.moe_layers, top_k=shape.experts_per_token, num_experts=shape.experts)
        versions = [f"{package} {importlib.metadata.version(package)}" for package in ("transformers", "torch")]
        return EngineInfo(
            engine="embedded",
            engine_version=", ".join(versions),
            model=names[0],
            aliases=names[1:],
            max_model_len=shape.context_tokens,
            vocab_bound=shape.vocab_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_logprobs=settings.max_logprobs,
            moe=moe if shape.moe_layers else None,
            dtype=str(core.model.dtype),
            eos_token_ids=sorted(core.model.eos_token_ids),
            capabilities=Capabilities(
                routed_experts=shape.moe_layers > 0,
                sampling_mask=True,
                logprobs_mode="sampling",
                prompt_logprobs=True,
                stop_strings=core.tokenizer is not None,
                priority=True,
                weight_transfer=["disk", *backends()],
                lora=LoraCapability(max=settings.max_loras, rank=settings.max_lora_rank)
                if settings.max_loras
                else None,
                sampling_fields=list(SAMPLING_FIELDS),
            ),
        )

    def _deliver(self, emissions: list[Emission]) -> None:
        """Hand a step's reports to the requests that still listen."""
        for emission in emissions:
            live = self._live.get(emission.sequence.request.request_id)
            if live is not None:
                live.open -= emission.ending is not None
                live.reports.put_nowait(emission)

    def _died(self, death: EngineDied) -> None:
        for live in self._live.values():
            live.fail(death)


def _prompt_event(request: GenerateRequest, first: Emission) -> PromptEvent:
    return PromptEvent(
        prompt_tokens=request.prompt_tokens,
        cached_tokens=0,
        prompt_token_ids=request.token_ids if request.return_token_ids else None,
        prompt_logprobs=first.prompt_logprobs,
    )


def _choice_event(emission: Emission, served_by: ServedBy) -> ChoiceEvent:
    """The event of one emission; what it says of the whole request is added to `served_by`.

    Raises:
        EngineFailed: the sample is unusable.
    """
    served_by.floored_logprobs += emission.floored
    ending = emission.ending
    if ending is None:
        return ChoiceEvent(index=emission.sequence.index, token_ids=emission.token_ids, logprobs=emission.logprobs)
    if ending.error is not None:
        raise EngineFailed(f"choice {emission.sequence.index} is unusable: {ending.error}")
    if ending.recomputed_rows:
        rows = max([ending.recomputed_rows, *(end for _, end in served_by.recomputed)])
        served_by.recomputed = [(0, rows)]
    return ChoiceEvent(
        index=emission.sequence.index,
        token_ids=emission.token_ids,
        logprobs=emission.logprobs,
        finish_reason=_FINISH_REASONS[ending.finish_reason],
        stop_reason=ending.stop_reason,
        routed_experts=ending.routes,
        sampling_mask=ending.mask,
        policy_versions=list(ending.spans),
    )


def _mask_mode(mask: bool, temperature: float) -> str | None:
    """How a sampling mask is to be read: `greedy` rows hold the argmax only, `sampling` rows the support."""
    if not mask:
        return None
    return "greedy" if temperature == 0 else "sampling"
