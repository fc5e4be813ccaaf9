"""One request of Dynamo's: read, run, folded here, answered in one terminal chunk per choice; completions in deltas.

The frontend tells of a caller who went away through the request's context only, so each wait looks at both.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import structlog

from rollplane.dynamo.chunks import PartialRollouts, delta_chunk, generate_chunks
from rollplane.dynamo.completions import read_completion
from rollplane.dynamo.envelope import is_generate, read_generate
from rollplane.errors import Cancelled, RollplaneError, Unavailable
from rollplane.fold import Fold
from rollplane.protocol.answer import usage_tree
from rollplane.protocol.events import ChoiceEvent
from rollplane.protocol.request import GenerateRequest, RequestLimits
from rollplane.server.engine_calls import BIG_NUMBERS, add_event, is_big, running
from rollplane.server.error_responses import as_rollplane_error
from rollplane.server.generate import plan_for
from rollplane.server.service import Service

log = structlog.get_logger("rollplane.dynamo")


class RequestContext(Protocol):
    """What a request's context is asked; Dynamo's own class is one."""

    def id(self) -> str:
        """The request's id."""
        ...

    def async_killed_or_stopped(self) -> Awaitable[bool]:
        """Done when the caller has gone away or the frontend wants no more."""
        ...


class Endpoint:
    """The handler of the generate endpoint.

    Args:
        service: the worker and its limits.
        partial: what becomes of a rollout that was aborted; see `dynamo.chunks`.
        as_dynamo: an error of ours as the exception that Dynamo's frontend understands.
    """

    def __init__(
        self,
        service: Service,
        *,
        partial: PartialRollouts,
        as_dynamo: Callable[[RollplaneError], BaseException],
    ) -> None:
        self._service = service
        self._partial = partial
        self._as_dynamo = as_dynamo

    def __repr__(self) -> str:
        return f"<Endpoint of {self._service.engine!r}>"

    async def generate(
        self, message: Mapping[str, Any], context: RequestContext
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Serve one message.

        Raises:
            BaseException: Dynamo's, for an error of ours.
        """
        arrived = time.monotonic()
        service = self._service
        gone = asyncio.ensure_future(context.async_killed_or_stopped())
        streams = False
        try:
            if service.lifecycle.draining:
                raise Unavailable("this worker is on its way out")
            request = self._read(message, request_id=context.id())
            streams = request.stream
            with service.one_in_flight():
                chunks = (
                    self._deltas(request) if request.stream else self._whole(request, generate=is_generate(message))
                )
                async with aclosing(_until(gone, chunks)) as answer:
                    async for chunk in answer:
                        yield chunk
            stopped = gone.done()
        except Exception as error:
            found = as_rollplane_error(error)
            service.metrics.count_error(found, stream=streams)
            log.info("request_refused", request_id=context.id(), code=found.code, reason=found.message)
            raise self._as_dynamo(found) from error
        finally:
            gone.cancel()
        if stopped:
            service.metrics.count_error(Cancelled("the caller went away"), stream=streams)
            return
        service.metrics.requests.labels(outcome="ok", stream=str(streams).lower()).inc()
        service.metrics.latency.labels(stream=str(streams).lower()).observe(time.monotonic() - arrived)

    def _read(self, message: Mapping[str, Any], *, request_id: str) -> GenerateRequest:
        settings = self._service.settings
        limits = RequestLimits(
            max_prompt_tokens=settings.max_prompt_tokens,
            max_feature_bytes=settings.max_feature_bytes,
            drop_unknown_sampling=settings.drop_unknown_sampling,
        )
        read = read_generate if is_generate(message) else read_completion
        return read(message, request_id=request_id, limits=limits, base_model=self._service.engine.info.model)

    async def _whole(self, request: GenerateRequest, *, generate: bool) -> AsyncGenerator[dict[str, Any], None]:
        fold = Fold(plan_for(request, self._service.engine.info))
        big = False
        async with running(self._service.engine, request) as events:
            async for event in events:
                big = big or is_big(event)
                await add_event(self._service, fold, event)
        response = fold.response()
        self._service.metrics.count_response(response)
        chunks = await self._service.in_pool(
            lambda: generate_chunks(response, partial=self._partial if generate else "length"),
            big=big or response.usage.completion_tokens > BIG_NUMBERS,
        )
        if not generate:
            chunks[-1]["completion_usage"] = usage_tree(response.usage)
        for chunk in chunks:
            yield chunk

    async def _deltas(self, request: GenerateRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Deltas; the last terminal chunk waits for the end, and carries the usage."""
        fold = Fold(plan_for(request, self._service.engine.info))
        held: dict[str, Any] | None = None
        async with running(self._service.engine, request) as events:
            async for event in events:
                await add_event(self._service, fold, event)
                if isinstance(event, ChoiceEvent):
                    if held is not None:
                        yield held
                        held = None
                    chunk = delta_chunk(event)
                    if event.finish_reason is None:
                        yield chunk
                    else:
                        held = chunk
        response = fold.response()
        self._service.metrics.count_response(response)
        if held is not None:
            yield {**held, "completion_usage": usage_tree(response.usage)}


async def _until(
    gone: asyncio.Future[bool], chunks: AsyncGenerator[dict[str, Any], None]
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks until the caller is gone; then the work is stopped and nothing more comes."""
    try:
        while True:
            step: asyncio.Future[dict[str, Any] | None] = asyncio.ensure_future(anext(chunks, None))
            waits: set[asyncio.Future[Any]] = {gone, step}
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not step.done():
                    step.cancel()
                    await asyncio.gather(step, return_exceptions=True)
            if step.cancelled():
                return
            chunk = step.result()
            if chunk is None:
                return
            yield chunk
    finally:
        await chunks.aclose()
