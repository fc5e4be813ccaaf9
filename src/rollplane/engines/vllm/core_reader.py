"""Reads what vLLM's engine core sends, in place of `AsyncLLM`'s two tasks that do it.

Theirs wake up several times per step through ZMQ's asyncio layer, build every token's arrays and walk through the output
processor for each. Here one callback takes whatever has arrived; a plain token of a folded request (`folded`) costs one
small decode, and everything else (first and last tokens, streams, text, stop strings, events) goes through vLLM's own
decoder and output processor, so that it means what vLLM says. vLLM's stat loggers hear of every step (`step_stats`).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog
import zmq

from rollplane.engines.vllm.folded import FoldedRequest
from rollplane.engines.vllm.step_stats import StepStats

log = structlog.get_logger("rollplane.engine")

BUDGET_S: Final = 0.005
"""How long one callback may read before others on the event loop get their turn."""

_NIL: Final = msgspec.Raw(b"\xc0")
_EVENTS: Final = int(zmq.EVENTS)  # as plain integers: pyzmq's enumerations cost more than the call they are for
_POLLIN: Final = int(zmq.POLLIN)
_MORE: Final = int(zmq.RCVMORE)
_NOBLOCK: Final = int(zmq.NOBLOCK)


@dataclass(frozen=True)
class CoreApi:
    """vLLM's names that the wire of the engine core is read with.

    `output_fields`, `outputs_fields`: names on the wire, in order. `output_defaults`: those of an output's last fields.
    """

    Output: Any
    Outputs: Any
    SchedulerStats: Any
    IterationStats: Any
    Decoder: Any
    DeadError: type[Exception]
    dead_message: bytes
    finish_utility: Callable[[Any, Any], None]


class _Output(msgspec.Struct, array_like=True, gc=False):
    """The head of vLLM's `EngineCoreOutput`; `rest` is what follows (`Wire` declares as many fields as there are)."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: msgspec.Raw


class Wire:
    """Decoders of one release's messages.

    Raises:
        ValueError: the messages of this release have other fields; naming the first that differs.
    """

    def __init__(self, api: CoreApi) -> None:
        self._check(api.Output, ("request_id", "new_token_ids", "new_logprobs"))
        self._check(api.Outputs, ("engine_index", "outputs", "scheduler_stats", "timestamp", "utility_output"))
        rest = api.Output.__struct_fields__[3:]
        defaults = tuple(api.Output.__struct_defaults__)[-len(rest) :]
        output = msgspec.defstruct(
            "PlainOutput",
            [(name, Any, default) for name, default in zip(rest, defaults, strict=True)],
            bases=(_Output,),
            array_like=True,
            gc=False,
        )
        self.plain: Final = defaults
        """What the fields past the log-probabilities of a plain token say: nothing."""
        stats = api.SchedulerStats | None
        self.step = msgspec.msgpack.Decoder(_step_type("PlainStep", list[output], stats))  # type: ignore[valid-type]
        self.pieces = msgspec.msgpack.Decoder(_step_type("Pieces", list[msgspec.Raw], msgspec.Raw))
        self.whole = api.Decoder(api.Outputs)
        self.one = api.Decoder(api.Output)

    @staticmethod
    def _check(kind: Any, wanted: tuple[str, ...]) -> None:
        found = tuple(kind.__struct_fields__[: len(wanted)])
        for name, there in zip(wanted, found, strict=False):
            if name != there:
                raise ValueError(f"{kind.__name__}.{name} (there is {there} in its place)")
        if len(found) < len(wanted):
            raise ValueError(f"{kind.__name__}.{wanted[len(found)]}")


def _step_type(name: str, outputs: Any, stats: Any) -> Any:
    fields: list[Any] = [
        ("engine_index", int, 0),
        ("outputs", outputs, msgspec.field(default_factory=list)),
        ("scheduler_stats", stats, None),
        ("timestamp", float, 0.0),
        ("utility_output", Any, None),
    ]
    return msgspec.defstruct(name, fields, array_like=True)


class CoreReader:
    """The one reader of an engine core's outputs, from `start` to its end.

    Args:
        engine: the `AsyncLLM`, of which nothing has begun to read yet.
        socket: a plain (not asyncio) ZMQ socket of its outputs. stats: where steps are counted.
        on_end: called once when nothing will be read any more: the engine is gone, or it was stopped.
    """

    def __init__(self, engine: Any, socket: Any, api: CoreApi, *, stats: StepStats, on_end: Callable[[], None]) -> None:
        self._engine = engine
        self._socket = socket
        self._api = api
        self._wire = Wire(api)
        self.stats = stats
        self._on_end = on_end
        self._processor = engine.output_processor
        self._states: dict[str, Any] = self._processor.request_states
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._task: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._aborts: set[asyncio.Task[None]] = set()
        self.steps = 0

    def __repr__(self) -> str:
        state = "not started" if self._task is None else "ended" if self._task.done() else "reading"
        return f"<CoreReader {state}, {self.steps} steps>"

    def start(self) -> asyncio.Task[None]:
        """Begin; the task ends when the reading does, and cancelling it ends the reading."""
        self._task = self._loop.create_task(self._read(), name="vLLM engine core outputs")
        return self._task

    async def stop(self) -> None:
        """End; the socket is the caller's again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        self._loop.add_reader(self._descriptor, self.drain)
        self._loop.call_soon(self.drain)  # ZMQ says once that there is something, perhaps before we listened
        try:
            await self._failed
        except asyncio.CancelledError:
            self._processor.propagate_error(self._api.DeadError())
            raise
        except Exception as error:
            log.error("vllm_output_failed", error=f"{type(error).__name__}: {error}")
            self._processor.propagate_error(error)
        finally:
            self._loop.remove_reader(self._descriptor)
            self._on_end()

    def drain(self) -> None:
        """Process every message that has arrived; in turns with the rest of the event loop where that takes long."""
        if self._task is None or self._task.done() or self._failed.done():
            return
        began = time.perf_counter()
        try:
            while self._socket.get(_EVENTS) & _POLLIN:
                frames = [self._socket.recv(_NOBLOCK)]
                while self._socket.get(_MORE):
                    # Arrays beside the message are not copied: vLLM's decoder makes tensors over them.
                    frames.append(self._socket.recv(_NOBLOCK, copy=False))
                self.take(frames)
                if time.perf_counter() - began > BUDGET_S:
                    self._loop.call_soon(self.drain)
                    return
        except (
            Exception
        ) as error:  # as for vLLM's own handler: whatever it is, no request will hear of its end otherwise
            if not self._failed.done():
                self._failed.set_exception(error)

    def take(self, frames: list[Any]) -> None:
        """Process one message: its bytes, and buffers of arrays that lie beside it.

        Raises:
            DeadError: the engine core said that it ends.
        """
        wire = self._wire
        if len(frames) == 1 and frames[0] == self._api.dead_message:
            self._engine.engine_core.resources.engine_dead = True
            raise self._api.DeadError()
        step = wire.step.decode(frames[0])
        if step.utility_output is not None:
            answer = wire.whole.decode(frames).utility_output
            if answer.call_id in self._engine.engine_core.utility_results:
                self._api.finish_utility(answer, self._engine.engine_core.utility_results)
            return
        if not step.outputs and step.scheduler_stats is None:
            return
        self.steps += 1
        stats = self.stats.begin() if step.outputs else None
        others = self._take_plain(step, stats, alone=len(frames) == 1)
        if others:
            pieces = wire.pieces.decode(frames[0]).outputs
            decoded = [wire.one.decode([pieces[i], *frames[1:]]) for i in others]
            self._process(decoded, step.timestamp, stats)
        self._processor.update_scheduler_stats(step.scheduler_stats)
        self.stats.end(step.scheduler_stats, outputs=bool(step.outputs), engine_index=step.engine_index)

    def _take_plain(self, step: Any, stats: Any, *, alone: bool) -> list[int]:
        """Take the plain tokens of folded requests; the places of all other outputs.

        Args:
            alone: the message is all in one frame; arrays of a plain token could lie in another one.
        """
        states, plain, now = self._states, self._wire.plain, step.timestamp
        others: list[int] = []
        for i, output in enumerate(step.outputs):
            state = states.get(output.request_id)
            if state is None:
                continue  # it was aborted
            kept = state.logprobs_processor
            if (
                type(kept) is not FoldedRequest
                or not alone
                or state.is_prefilling
                or msgspec.structs.astuple(output)[3:] != plain
            ):
                others.append(i)
                continue
            ids = output.new_token_ids
            kept.take_ids(ids)
            if output.new_logprobs != _NIL:
                kept.take_row(output.new_logprobs)
            # What `IterationStats.update_from_output` does for such a token.
            times = state.stats
            stats.num_generation_tokens += len(ids)
            times.num_generation_tokens += len(ids)
            stats.inter_token_latencies_iter.append(now - times.last_token_ts)
            times.last_token_ts = now
        return others

    def _process(self, outputs: list[Any], timestamp: float, stats: Any) -> None:
        """As vLLM's own handler does."""
        done = self._processor.process_outputs(outputs, timestamp, stats)
        cache = self._engine.renderer.mm_processor_cache
        if cache is not None:
            for output in outputs:
                for missing in output.mm_cache_miss_hashes or ():
                    cache.invalidate(missing)
        if done.reqs_to_abort:  # ended by a stop string, of which the engine core knows nothing
            task = self._loop.create_task(self._abort(done.reqs_to_abort))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(self._api.DeadError):
            await self._engine.engine_core.abort_requests_async(request_ids)
