"""How the HTTP app runs an engine: its events taken in order, closed whatever happens, big work off the event loop."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, runtime_checkable

from starlette.types import Receive

from rollplane.engines.base import Engine, close_events
from rollplane.errors import RollplaneError, Unavailable
from rollplane.fold import Fold
from rollplane.protocol.events import ChoiceEvent, Event, PromptEvent
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.request import GenerateRequest, RequestHead, RequestOptions
from rollplane.protocol.response import Choice
from rollplane.server.service import Service
from rollplane.server.watch import run_unanswered, run_watched

BIG_BODY_BYTES: Final = 256 * 1024
BIG_NUMBERS: Final = 16_384
BIG_ROUTES_BYTES: Final = 1 << 20
"""From these sizes on, work moves to the pool: shorter work costs less than the hand-over."""


@runtime_checkable
class KnownLater(Protocol):
    """An engine that may not know yet what it serves: a router whose workers were not reached."""

    async def known(self, head: RequestHead) -> EngineInfo:
        """What serves a request's model, waited for up to its deadline or an abort."""
        ...


async def info_of(service: Service, receive: Receive, head: RequestHead, *, options: RequestOptions) -> EngineInfo:
    """The facts of what serves a request. A server that has just started waits for them as the request would wait for a
    worker; what that takes is taken off the deadline in `options`, the request's own.

    Raises:
        RollplaneError: they did not come in time, too many wait, the request was aborted, or the caller hung up.
    """
    try:
        return service.engine.info
    except Unavailable:
        engine: object = service.engine
        if not isinstance(engine, KnownLater):
            raise
    began = time.monotonic()
    with service.one_in_flight():
        info = await run_unanswered(engine.known(head), receive)
    if head.deadline_s is not None:
        options.deadline_s = max(head.deadline_s - (time.monotonic() - began), 0.001)
    return info


@asynccontextmanager
async def running(engine: Engine, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[Event], None]:
    """The events of one request; leaving the block stops the engine's work on it."""
    events = engine.generate(request)
    try:
        yield events
    finally:
        await close_events(events)


async def add_event(service: Service, fold: Fold, event: Event) -> Choice | None:
    """Take one event into a fold; the checks of a big one run in the pool."""
    return await service.in_pool(fold.add, event, big=is_big(event))


def any_big(events: Sequence[Event]) -> bool:
    """See `is_big`."""
    return any(map(is_big, events))


def is_big(event: Event) -> bool:
    """Whether the checks (or the text) of an event are too long for the event loop."""
    if isinstance(event, ChoiceEvent):
        numbers, logprobs, mask, routes = (
            event.token_ids.size,
            event.logprobs,
            event.sampling_mask,
            event.routed_experts,
        )
        if logprobs is not None and logprobs.alternatives is not None:
            numbers += logprobs.alternatives.ids.size
        if mask is not None:
            numbers += mask.ids.size
        return numbers > BIG_NUMBERS or (routes is not None and routes.array.nbytes > BIG_ROUTES_BYTES)
    if isinstance(event, PromptEvent):
        prompt = event.prompt_logprobs
        return prompt is not None and prompt.ids.size > BIG_NUMBERS
    return False


async def stream_answer(
    service: Service, serving: Coroutine[Any, Any, RollplaneError | None], receive: Receive, *, arrived: float
) -> RollplaneError | None:
    """Run the writing of one streamed answer, stopped when the reader hangs up, and count how it ended.

    Returns the error that ended the stream, the hang-up included; None for a whole stream.
    """
    with service.one_in_flight():
        try:
            error = await run_watched(serving, receive)
        except RollplaneError as hang_up:
            error = hang_up
    service.metrics.latency.labels(stream="true").observe(time.monotonic() - arrived)
    if error is not None:
        service.metrics.count_error(error, stream=True)
    else:
        service.metrics.requests.labels(outcome="ok", stream="true").inc()
    return error
