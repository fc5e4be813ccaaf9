"""A streamed answer: server-sent events, deltas merged while the reader is slow, terminal chunks always.

    data: {"request_id", "model", "created", "choices": [{index, token_ids, logprobs, finish_reason: null}]}
    ...
    data: {..., "choices": [{index, token_ids, logprobs, finish_reason, stop_reason, routed_experts, sampling_mask,
                             policy_versions}]}
    data: {..., "choices": [], "rollplane": {...}, "usage"?: {...}}
    data: [DONE]

Tokens and logprobs are deltas; the rest rides on a choice's terminal chunk and covers the whole choice. The prompt's
final ids, if asked for, are in the first chunk. An error after the first byte is `data: {"error": ...}`, after which
nothing follows, so that only a whole stream ends with `[DONE]`.
"""

import asyncio
import time
from typing import Any, Final

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from rollplane.errors import EngineProtocolError, RollplaneError, TransportError
from rollplane.fold import Fold, FoldPlan, concat_ids, concat_logprobs
from rollplane.protocol.answer import choice_tree, ids_raw, logprobs_raw, served_by_tree, usage_tree
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent
from rollplane.protocol.pieces import Holes, Piece
from rollplane.protocol.request import Encoding, GenerateRequest
from rollplane.protocol.response import Choice, Usage
from rollplane.server.engine_calls import add_event, is_big, running, stream_answer
from rollplane.server.error_responses import as_rollplane_error, error_event, error_response
from rollplane.server.pieces import send_pieces
from rollplane.server.service import Service

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
log = structlog.get_logger("rollplane.server")
_encoder = msgspec.json.Encoder()


class Deltas:
    """What came since the last chunk, merged per choice; what a slow reader has not taken costs one chunk, not many."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.ended = False
        self.error: RollplaneError | None = None
        self._parts: dict[int, tuple[list[Int32Array], list[TokenLogprobs]]] = {}
        self._finished: dict[int, Choice] = {}
        self.big = False

    def __repr__(self) -> str:
        return f"<Deltas of {len(self._parts)} choices{', ended' if self.ended else ''}>"

    def add(self, event: ChoiceEvent, whole: Choice | None) -> None:
        """Take one event; `whole` is the checked choice when the event ended it."""
        ids, logprobs = self._parts.setdefault(event.index, ([], []))
        ids.append(event.token_ids)
        if event.logprobs is not None:
            logprobs.append(event.logprobs)
        if whole is not None:
            self._finished[event.index] = whole
            self.big = self.big or is_big(event)
        self.arrived.set()

    def end(self, error: RollplaneError | None = None) -> None:
        """Nothing more will come."""
        self.ended, self.error = True, error
        self.arrived.set()

    @property
    def waiting(self) -> bool:
        """Whether there is something to write."""
        return bool(self._parts)

    def take(self) -> "Taken":
        """What is there, out of the way of what comes next."""
        taken = Taken(self._parts, self._finished, big=self.big)
        self._parts, self._finished, self.big = {}, {}, False
        return taken


class Taken:
    """The choices of one chunk, not yet written."""

    def __init__(
        self, parts: dict[int, tuple[list[Int32Array], list[TokenLogprobs]]], finished: dict[int, Choice], *, big: bool
    ) -> None:
        self._parts = parts
        self._finished = finished
        self.big = big

    def __repr__(self) -> str:
        return f"<Taken {sorted(self._parts)}, finished {sorted(self._finished)}>"

    def trees(self, *, routes: Encoding, logprobs: bool, holes: Holes | None = None) -> list[dict[str, Any]]:
        """The choices as JSON trees, ordered by index; see `choice_tree`."""
        found = []
        for index in sorted(self._parts):
            ids = concat_ids(self._parts[index][0])
            numbers = concat_logprobs(self._parts[index][1]) if logprobs else None
            whole = self._finished.get(index)
            if whole is not None:
                delta = msgspec.structs.replace(whole, token_ids=ids, logprobs=numbers)
                found.append(choice_tree(delta, routes=routes, holes=holes))
            else:
                written = {"token_ids": ids_raw(ids, holes), "logprobs": logprobs_raw(ids, numbers, holes)}
                delta_tree = {"index": index, **written}
                found.append({**delta_tree, "finish_reason": None})
        return found


class EventStream:
    """The ASGI answer of one streamed request."""

    def __init__(
        self, service: Service, request: GenerateRequest, plan: FoldPlan, *, routes: Encoding, arrived: float
    ) -> None:
        self._service = service
        self._request = request
        self._plan = plan
        self._routes = routes
        self._arrived = arrived
        self._fold = Fold(plan)
        self._deltas = Deltas()
        self._head: dict[str, Any] = {"request_id": plan.request_id, "model": plan.model, "created": int(time.time())}
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._prompt_sent = False
        self._first_token_seen = False
        self._tokens = 0

    def __repr__(self) -> str:
        return f"<EventStream {self._plan.request_id} {self._fold!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the answer; hanging up stops the engine's work."""
        serving = self._serve(scope, receive, send)
        error = await stream_answer(self._service, serving, receive, arrived=self._arrived)
        if error is not None:
            log.info("stream_failed", request_id=self._plan.request_id, code=error.code, reason=error.message)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> RollplaneError | None:
        """Write the whole stream; the error that ended it, if one did."""
        reader = asyncio.create_task(self._read(), name=f"events of {self._plan.request_id}")
        try:
            await self._deltas.arrived.wait()
            if self._deltas.error is not None and not self._deltas.waiting:
                await error_response(self._deltas.error)(scope, receive, send)
                return self._deltas.error
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            try:
                await self._write(send)
            except Exception as error:
                self._deltas.error = as_rollplane_error(error)
            if self._deltas.error is not None:
                await self._send(send, b"data: " + error_event(self._deltas.error) + b"\n\n", more=False)
            return self._deltas.error
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self) -> None:
        """The engine's events into `Deltas`, at the engine's pace whatever the reader's is."""
        try:
            async with running(self._service.engine, self._request) as events:
                async for event in events:
                    whole = await add_event(self._service, self._fold, event)
                    if isinstance(event, ChoiceEvent):
                        self._note(event)
                        self._deltas.add(event, whole)
            if self._fold.end is None:
                raise EngineProtocolError(f"the engine stopped before the end of request {self._plan.request_id}")
        except Exception as error:
            self._deltas.end(as_rollplane_error(error))
        else:
            self._deltas.end()

    async def _write(self, send: Send) -> None:
        """Chunks until the events end; then, unless an error ended them, the last chunk."""
        while True:
            await self._deltas.arrived.wait()
            self._deltas.arrived.clear()
            if self._deltas.waiting:
                taken = self._deltas.take()
                head = self._chunk_head()
                if taken.big:
                    chunk = await self._service.in_pool(self._chunk_pieces, taken, head)
                    await send_pieces(send, chunk, stall_s=self._service.settings.write_stall_s, more=True)
                else:
                    await self._send(send, self._chunk(taken, head))
            if self._deltas.ended and not self._deltas.waiting:
                break
        if self._deltas.error is None:
            self._service.metrics.count_response(self._fold.response())
            await self._send(send, self._last(self._fold.end or EndEvent()) + DONE, more=False)

    def _chunk_head(self) -> dict[str, Any]:
        tree = dict(self._head)
        prompt = self._fold.prompt
        if not self._prompt_sent and prompt is not None:
            if prompt.prompt_token_ids is not None:
                tree["prompt_token_ids"] = ids_raw(prompt.prompt_token_ids)
            if prompt.mm_placeholders is not None:
                tree["mm_placeholders"] = prompt.mm_placeholders
        self._prompt_sent = True
        prompt_tokens = self._plan.prompt_tokens if prompt is None else prompt.prompt_tokens
        if self._usage_always and prompt_tokens is not None:
            cached = None if prompt is None else prompt.cached_tokens
            usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=self._tokens, cached_tokens=cached)
            tree["usage"] = usage_tree(usage)
        return tree

    def _chunk(self, taken: Taken, head: dict[str, Any]) -> bytes:
        tree = {**head, "choices": taken.trees(routes=self._routes, logprobs=self._plan.logprobs)}
        return b"data: " + _encoder.encode(tree) + b"\n\n"

    def _chunk_pieces(self, taken: Taken, head: dict[str, Any]) -> list[Piece]:
        holes = Holes()
        tree = {**head, "choices": taken.trees(routes=self._routes, logprobs=self._plan.logprobs, holes=holes)}
        return holes.fill(b"data: " + _encoder.encode(tree) + b"\n\n")

    def _last(self, end: EndEvent) -> bytes:
        tree = {**self._head, "choices": [], "rollplane": served_by_tree(end.served_by)}
        for name in ("metrics", "kv_transfer_params", "ec_transfer_params"):
            value = getattr(end, name)
            if value is not None:
                tree[name] = value
        if self._usage or self._usage_always:
            tree["usage"] = usage_tree(self._fold.usage)
        return b"data: " + _encoder.encode(tree) + b"\n\n"

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Write; the server waits here while the reader is slow, up to the setting's limit.

        Raises:
            TransportError: the reader took nothing for too long.
        """
        limit_s = self._service.settings.write_stall_s
        try:
            async with asyncio.timeout(limit_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise TransportError(f"the reader took nothing for {limit_s:g} s") from None

    def _note(self, event: ChoiceEvent) -> None:
        self._tokens += int(event.token_ids.size)
        if not self._first_token_seen and event.token_ids.size:
            self._first_token_seen = True
            self._service.metrics.first_token.observe(time.monotonic() - self._arrived)
