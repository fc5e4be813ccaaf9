"""One request as calls on the wire: one call per choice, unary or streaming, and the events they make."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
import msgspec

from rollplane.engines.grpc.answers import AnswerReader
from rollplane.engines.grpc.channels import ChannelPool, Metadata
from rollplane.engines.grpc.spans import SpanTracker
from rollplane.errors import EngineDied, EngineProtocolError, RollplaneError
from rollplane.fold import concat_ids, concat_logprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, LogprobsMode, PromptEvent, ServedBy
from rollplane.protocol.request import GenerateRequest

Translate = Callable[[grpc.aio.AioRpcError, str], Awaitable[RollplaneError]]


def joined(ready: list[Event | Exception | None]) -> list[Event | Exception | None]:
    """What came since the last look: deltas of a choice that follow each other become one, the terminal one too.

    Everything after here costs per event, so a stream whose reader was busy costs less, not more.
    """
    if len(ready) == 1:
        return ready
    found: list[Event | Exception | None] = []
    open_parts: dict[int, list[ChoiceEvent]] = {}

    def close(parts: list[ChoiceEvent]) -> ChoiceEvent:
        last = parts[-1]
        if len(parts) == 1:
            return last
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        ids = concat_ids([part.token_ids for part in parts])
        return msgspec.structs.replace(last, token_ids=ids, logprobs=concat_logprobs(logprobs) if logprobs else None)

    for item in ready:
        if isinstance(item, ChoiceEvent):
            parts = open_parts.setdefault(item.index, [])
            parts.append(item)
            if item.finish_reason is not None:
                found.append(close(open_parts.pop(item.index)))
        else:
            # What came before an error or an end is told before it.
            found += [close(parts) for parts in open_parts.values()]
            open_parts.clear()
            found.append(item)
    return found + [close(parts) for parts in open_parts.values()]


class LiveCalls:
    """The calls of one live request.

    Args:
        request: what was asked.
        wires: one wire request per choice.
        pool: the connections.
        metadata, timeout_s: of every call.
        translate: makes our error of a failed call.
        version, born_paused: see `SpanTracker`.
        logprobs_mode: what the end says.
    """

    def __init__(
        self,
        request: GenerateRequest,
        wires: list[Any],
        *,
        pool: ChannelPool,
        metadata: Metadata,
        timeout_s: float,
        translate: Translate,
        version: str,
        born_paused: bool,
        logprobs_mode: LogprobsMode,
    ) -> None:
        self.request = request
        self.ids = [wire.request_id for wire in wires]
        self.streams = request.stream or bool(request.options.exact_spans)
        self.trackers = [SpanTracker(version, exact=self.streams, born_paused=born_paused) for _ in wires]
        self.done = asyncio.Event()
        self.aborted = False
        self.whole_read = False
        self._wires = wires
        self._readers = [AnswerReader(request, index=i) for i in range(len(wires))]
        self._pool = pool
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._translate = translate
        self._logprobs_mode = logprobs_mode
        self._tasks: list[asyncio.Task[Any]] = []
        self._only: grpc.aio.Call | None = None
        self._closed = False
        self._recomputed = 0
        self._warnings: list[str] = []
        self._prompt: PromptEvent | None = None

    def __repr__(self) -> str:
        kind = "stream" if self.streams else "unary"
        return f"<LiveCalls {self.request.request_id} {kind} {[tracker.tokens for tracker in self.trackers]}>"

    def resumed(self, version: str, *, cleared: bool) -> None:
        """The engine resumes with `version`; `cleared`: the KV of what it kept is computed again."""
        for tracker in self.trackers:
            if cleared and not tracker.idle:
                self._mark_recomputed(tracker)
            tracker.resumed(version)

    def end_with_engine(self) -> None:
        """The engine closes: every call ends with `EngineDied`."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._only is not None:
            self._only.cancel()

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of a request that streams, in order."""
        try:
            async for event in self._streamed():
                yield event
            self.whole_read = True
            yield self._end()
        finally:
            self._leave()

    async def whole(self) -> list[Event]:
        """The events of a request that does not stream, in order, once all are there."""
        try:
            events = [*await self._whole(), self._end()]
            self.whole_read = True
            return events
        finally:
            self._leave()

    def _leave(self) -> None:
        self.done.set()
        for task in self._tasks:
            task.cancel()

    # -- whole answers -----------------------------------------------------------------------------------------------

    async def _whole(self) -> list[Event]:
        call = self._counted if self.streams else self._unary
        try:
            if len(self._wires) == 1:
                choices = [await call(0)]
            else:
                self._tasks = [asyncio.create_task(call(i)) for i in range(len(self._wires))]
                choices = await asyncio.gather(*self._tasks)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise EngineDied("the engine was closed") from None
            raise
        return [*([] if self._prompt is None else [self._prompt]), *choices]

    async def _unary(self, i: int) -> ChoiceEvent:
        reader = self._readers[i]
        with self._pool.lane() as lane:
            call = lane.inference.Generate(self._wires[i], timeout=self._timeout_s, metadata=self._metadata)
            self._only = call if len(self._wires) == 1 else None
            try:
                answer = await call
            except grpc.aio.AioRpcError as error:
                raise await self._translate(error, f"request {self.ids[i]}") from None
        prompt, choice = reader.read(answer)
        reader.end()
        self._take_prompt(prompt)
        if choice is None:
            raise EngineProtocolError(f"request {self.ids[i]}: an answer without an output")
        return self._finish(i, choice)

    async def _counted(self, i: int) -> ChoiceEvent:
        """A whole answer over the streaming call, whose tokens are counted as they come."""
        parts = [event async for event in self._choice_events(i)]
        last = parts[-1]
        last.token_ids = concat_ids([part.token_ids for part in parts])
        if last.logprobs is not None:
            last.logprobs = concat_logprobs([part.logprobs for part in parts if part.logprobs is not None])
        return last

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _streamed(self) -> AsyncIterator[Event]:
        # Unbounded, so that tokens are counted when they arrive, however slow the reader: a choice is bounded itself.
        queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._pump(i, queue)) for i in range(len(self._wires))]
        left = len(self._tasks)
        announced = False
        while left:
            ready = [await queue.get()]
            while not queue.empty():
                ready.append(queue.get_nowait())
            for item in joined(ready):
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    if not announced and self._prompt is not None:
                        announced = True
                        yield self._prompt
                    yield item

    async def _pump(self, i: int, queue: asyncio.Queue[Event | Exception | None]) -> None:
        try:
            async for event in self._choice_events(i):
                queue.put_nowait(event)
            queue.put_nowait(None)
        except asyncio.CancelledError:
            queue.put_nowait(EngineDied("the engine was closed"))
            raise
        except Exception as error:
            queue.put_nowait(error)

    async def _choice_events(self, i: int) -> AsyncIterator[ChoiceEvent]:
        reader, tracker = self._readers[i], self.trackers[i]
        with self._pool.lane() as lane:
            call = lane.inference.GenerateStream(self._wires[i], timeout=self._timeout_s, metadata=self._metadata)
            self._only = call if len(self._wires) == 1 else None
            try:
                async for answer in call:
                    prompt, choice = reader.read(answer)
                    self._take_prompt(prompt)
                    tracker.tokens = reader.tokens
                    if choice is not None and choice.finish_reason is not None:
                        yield self._finish(i, choice)
                    elif choice is not None and choice.token_ids.size:
                        yield choice
            except grpc.aio.AioRpcError as error:
                raise await self._translate(error, f"request {self.ids[i]}") from None
            finally:
                call.cancel()
        reader.end()

    # ----------------------------------------------------------------------------------------------------------------

    def _take_prompt(self, prompt: PromptEvent | None) -> None:
        """Every call tells of the prompt; they tell the same."""
        if prompt is None:
            return
        if self._prompt is None:
            self._prompt = prompt
        elif self._prompt.prompt_tokens != prompt.prompt_tokens:
            raise EngineProtocolError(
                f"request {self.request.request_id}: one choice has a prompt of {self._prompt.prompt_tokens} tokens, "
                f"another of {prompt.prompt_tokens}"
            )

    def _finish(self, i: int, choice: ChoiceEvent) -> ChoiceEvent:
        tracker = self.trackers[i]
        tracker.tokens = self._readers[i].tokens
        choice.policy_versions = tracker.spans()
        return choice

    def _mark_recomputed(self, tracker: SpanTracker) -> None:
        if not tracker.exact:
            self._warnings = [
                "the cache was cleared while this request was kept: leading rows were computed again under newer "
                "weights, how many is not known without rollplane.exact_spans"
            ]
        elif tracker.tokens:
            prompt = self.request.prompt_tokens if self._prompt is None else self._prompt.prompt_tokens
            self._recomputed = max(self._recomputed, prompt + tracker.tokens - 1)

    def _end(self) -> EndEvent:
        first = self._readers[0]
        return EndEvent(
            served_by=ServedBy(
                logprobs_mode=self._logprobs_mode,
                floored_logprobs=sum(reader.floored for reader in self._readers),
                recomputed=[(0, self._recomputed)] if self._recomputed else [],
                warnings=self._warnings,
            ),
            kv_transfer_params=first.kv_transfer_params,
            ec_transfer_params=first.ec_transfer_params,
        )


class StreamProgress:
    """Whether tokens come, of streams alone: those of a unary call come at its end."""

    def __init__(self) -> None:
        self._seen: frozenset[tuple[int, int]] = frozenset()
        self._moved_at = 0.0

    def __repr__(self) -> str:
        return f"<StreamProgress of {len(self._seen)} choices>"

    def stands_still_s(self, live: Sequence[LiveCalls], *, runs: bool) -> float:
        """Seconds since a look first found the tokens that are there now; 0 where that tells nothing.

        Args:
            runs: the engine is to make tokens.
        """
        now = time.monotonic()
        seen = frozenset((id(tracker), tracker.tokens) for calls in live for tracker in calls.trackers)
        if seen != self._seen or not runs or not all(calls.streams for calls in live):
            self._seen, self._moved_at = seen, now
        return now - self._moved_at if live else 0.0
