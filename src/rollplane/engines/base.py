"""The one interface: everything that makes tokens is an `Engine`.

The mock, the embedded engine, vLLM in process, vLLM over gRPC, a remote worker, the router and every wrapper answer to
it, so they nest freely and one HTTP app serves any of them. What only some can do is in the optional protocols below.
`rollplane.testing.check_engine` holds any implementation to the promises written here.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, runtime_checkable

from rollplane.protocol.admin import AllowTensors, FlushReport, PauseMode, PauseReport, ResumeReport, StagedWeights
from rollplane.protocol.broadcast import Manifest, TransferGroup
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.rendered import RenderBody, Rendered
from rollplane.protocol.request import GenerateRequest


@runtime_checkable
class Engine(Protocol):
    """Makes tokens.

    Promises: `generate` checks the request first and raises a typed error before any work; then yields
    `PromptEvent? ChoiceEvent* EndEvent` with one terminal event per choice. A request with `stream` false gets one
    (terminal) event per choice. Closing the iterator, or cancelling the task that reads it, stops the work within one
    step. Only errors from `rollplane.errors` leave it. It may be called from one event loop only.
    """

    @property
    def info(self) -> EngineInfo:
        """Facts that do not change; valid after `start`."""
        ...

    async def start(self) -> None:
        """Make ready to serve; raises `EngineDied` or `InvalidRequest` (bad settings) when it cannot."""
        ...

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Stop. Running requests may finish within `grace_s` seconds, then end with `EngineDied`. Idempotent."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Serve one request; see the class. Two live requests with one id are the caller's to prevent."""
        ...

    async def abort(self, request_id: str) -> int:
        """End a request with finish reason `abort`, keeping all tokens so far; how many live requests had the id.

        Unknown ids and repeats are no error and count 0.
        """
        ...

    async def health(self) -> EngineHealth:
        """A moment's health, without waiting for the engine's step."""
        ...


async def close_events(events: AsyncIterator[Any]) -> None:
    """Stop the work behind an iterator, where it can be closed."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


def whole_of(engine: Engine, request: GenerateRequest) -> Coroutine[Any, Any, list[Event]]:
    """Every event of one request that does not stream. Being cancelled stops the engine's work on it.

    An engine may have a method `whole` that gives them at once: iterators of iterators, at every depth, cost a small
    request a twentieth of its time. Whoever overrides `generate` of such an engine overrides `whole` too.
    """
    whole: Callable[[GenerateRequest], Coroutine[Any, Any, list[Event]]] | None = getattr(engine, "whole", None)
    return _gathered(engine, request) if whole is None else whole(request)


async def _gathered(engine: Engine, request: GenerateRequest) -> list[Event]:
    events = engine.generate(request)
    try:
        return [event async for event in events]
    finally:
        await close_events(events)


@runtime_checkable
class WeightReceiver(Protocol):
    """An engine whose policy can be paused and replaced in place.

    `rl.weights.PolicyControl` is the caller and owns the order: stage (any time), pause, apply, resume.
    """

    @property
    def policy_version(self) -> str:
        """The version of the weights that make tokens now."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        """Stop stepping; returns only when the engine is idle. New requests queue up in every mode.

        keep: running requests freeze and go on at resume. wait: they finish first. abort: they end with `abort`.
        `clear_cache`: drop all cached KV; kept requests get theirs recomputed at resume and are marked `recomputed`.
        Calling it while paused is fine: a stricter mode is applied to what is left.
        """
        ...

    async def resume(self) -> ResumeReport:
        """Step again. Not paused: nothing happens."""
        ...

    async def stage_weights(self, path: str, *, allow_tensors: Sequence[AllowTensors] = ()) -> StagedWeights:
        """Read and check a checkpoint without touching the model; generation goes on.

        Args:
            allow_tensors: `missing` ones keep what the model has when it is staged, `unexpected` ones are left unread;
                `ignored` says which there were. Neither is allowed by default.

        Raises:
            NotFound: no such directory or no safetensors in it.
            InvalidRequest: unexpected or missing tensors that are not allowed (or cannot be: it says why), other shapes or
                dtypes; by name.
        """
        ...

    async def apply_weights(self, staged: StagedWeights, *, version: str) -> None:
        """Put staged weights in place; only while paused. The version changes last, after success.

        Raises:
            EngineFailed: refused, the old weights still serve.
            EngineDied: the engine cannot serve any more.
        """
        ...

    async def set_policy_version(self, version: str) -> None:
        """Change the label only; touches no request."""
        ...

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """Drop cached KV, encoder and multimodal caches that no running request holds.

        `preempt`: running requests give theirs up too and recompute. `reset` is False when something was held.
        """
        ...


@runtime_checkable
class IsolatesVersions(Protocol):
    """An engine that scopes cached KV itself: a queued request may get another salt there at an update."""

    @property
    def salt_scope(self) -> str | None:
        """What scopes its salt now, see `identity.engine_salt`; None: nothing does, it drops what is cached instead."""
        ...


@runtime_checkable
class OutlivesWorker(Protocol):
    """An engine that was there before its worker, and may cache what other weights computed under the same names."""

    @property
    def cache_life(self) -> str:
        """New with every worker over an engine that has a history; "" where it is known to have none."""
        ...


@runtime_checkable
class BroadcastReceiver(Protocol):
    """An engine that takes weights from a trainer's collective broadcast into memory of their own.

    What it received goes into place by `WeightReceiver.apply_weights`, like a staged checkpoint; the model is untouched
    until then. `rl.broadcast.BroadcastControl` is the caller: one group at a time, one receive at a time.
    """

    async def join_group(self, group: TransferGroup, *, deadline_s: float) -> None:
        """Join with all ranks of this engine; returns when every rank of the group is there.

        Raises:
            InvalidRequest: a backend that does not work here. DeadlineExceeded, EngineFailed: not all came; nothing is left.
        """
        ...

    async def receive_weights(self, manifest: Manifest, *, deadline_s: float) -> StagedWeights:
        """Check the manifest against the model, then receive every bucket; generation goes on.

        Raises:
            InvalidRequest: unknown or missing tensors, other shapes or dtypes; nothing was received, the group stands.
            DeadlineExceeded, EngineFailed: the trainer is gone or late; the group is broken and must be left.
        """
        ...

    async def leave_group(self) -> None:
        """Leave; a receive under way ends with EngineFailed. Without a group nothing happens."""
        ...


class NativeTransfer(Protocol):
    """Weights by the engine's own transfer backend, part by part straight into the model; only while paused.

    `rl.native.NativeControl` is the caller and owns the order. A step that fails, or is cancelled, ends the update:
    EngineFailed says that the old weights are in place again, any other error that nobody knows what is.
    """

    @property
    def backend(self) -> str | None:
        """The backend's name; None: there is none here."""
        ...

    async def init(self, info: dict[str, Any]) -> None:
        """Join the trainer's group; `info` is the backend's own object. Touches no weights."""
        ...

    async def start(self) -> None:
        """Open an update."""
        ...

    async def update(self, info: dict[str, Any]) -> None:
        """Receive a part of the weights; `info` is the backend's own object."""
        ...

    async def finish(self, version: str) -> None:
        """Close the update; the version changes last, and no cache of the old weights serves a later request."""
        ...

    async def give_up(self, why: str) -> None:
        """End an update that its trainer left open; see the class for what it raises. It always raises."""
        ...


class SleepControl(Protocol):
    """Giving the device's memory back and taking it again."""

    @property
    def offered(self) -> bool:
        """Whether it frees anything here."""
        ...

    @property
    def asleep(self) -> bool:
        """Whether not all of the memory is back."""
        ...

    async def sleep(self, *, level: int = 1) -> None:
        """Free the memory; only while paused, and what was cached is gone. Asleep already: nothing happens."""
        ...

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory back: all of it, or what the tags name; still paused then. Awake: nothing happens."""
        ...


@runtime_checkable
class NativeControls(Protocol):
    """An engine that may have a transfer backend and a sleep of its own."""

    @property
    def native(self) -> NativeTransfer:
        """Its transfer; `backend` None where it was started without one."""
        ...

    @property
    def sleeping(self) -> SleepControl:
        """Its sleep; `offered` False where it has none."""
        ...


@runtime_checkable
class AdapterHost(Protocol):
    """An engine that holds LoRA adapters under engine-side names; `rl.adapters` owns names, generations and leases."""

    async def load_adapter(self, engine_name: str, path: str) -> None:
        """Load an adapter's files beside those already there.

        Raises:
            NotFound: no such directory. InvalidRequest: rank, target modules or shapes do not fit. Conflict: no slot.
        """
        ...

    async def unload_adapter(self, engine_name: str) -> None:
        """Drop an adapter that no request uses; unknown names are no error."""
        ...

    async def loaded_adapters(self) -> list[str]:
        """Engine-side names now loaded."""
        ...


@runtime_checkable
class KvEventSource(Protocol):
    """An engine that says which KV blocks it stores and drops; the router's prefix index follows it."""

    def kv_events(self) -> AsyncIterator[Any]:
        """Batches of `protocol.kv_events.KvEvent`, first a snapshot of what is stored, then changes."""
        ...


@runtime_checkable
class MediaRenderer(Protocol):
    """An engine that turns raw media into the features that Generate takes, without generating."""

    async def render_media(self, body: RenderBody) -> Rendered:
        """Process the media of one prompt.

        Raises:
            InvalidRequest: media that cannot be processed, or that the prompt has no place for.
        """
        ...


@runtime_checkable
class MetricsSource(Protocol):
    """An engine that counts by itself; its metrics stand on the worker's page beside ours."""

    def metric_families(self) -> list[Any]:
        """Prometheus' metric families (`prometheus_client.core.Metric`) as they are now, under the engine's own names."""
        ...
