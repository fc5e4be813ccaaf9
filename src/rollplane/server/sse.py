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

import time
from typing import Any

import msgspec
from starlette.types import Send

from rollplane.errors import EngineProtocolError
from rollplane.fold import Fold, FoldPlan, concat_ids, concat_logprobs
from rollplane.protocol.answer import choice_tree, ids_raw, logprobs_raw, served_by_tree, usage_tree
from rollplane.protocol.events import ChoiceEvent, EndEvent
from rollplane.protocol.pieces import Holes, Piece
from rollplane.protocol.request import Encoding, GenerateRequest
from rollplane.protocol.response import Usage
from rollplane.server.engine_calls import add_event, running
from rollplane.server.pieces import send_pieces
from rollplane.server.service import Service
from rollplane.server.streamed import StreamedAnswer, Taken

_encoder = msgspec.json.Encoder()


def delta_trees(taken: Taken, *, routes: Encoding, logprobs: bool, holes: Holes | None = None) -> list[dict[str, Any]]:
    """The choices of a chunk as JSON trees, ordered by index; see `choice_tree`."""
    found = []
    for index, (parts, numbers) in sorted(taken.parts.items()):
        ids = concat_ids(parts)
        joined = concat_logprobs(numbers) if logprobs else None
        whole = taken.finished.get(index)
        if whole is not None:
            delta = msgspec.structs.replace(whole, token_ids=ids, logprobs=joined)
            found.append(choice_tree(delta, routes=routes, holes=holes))
        else:
            written = {"token_ids": ids_raw(ids, holes), "logprobs": logprobs_raw(ids, joined, holes)}
            found.append({"index": index, **written, "finish_reason": None})
    return found


class EventStream(StreamedAnswer):
    """The ASGI answer of one streamed request."""

    def __init__(
        self, service: Service, request: GenerateRequest, plan: FoldPlan, *, routes: Encoding, arrived: float
    ) -> None:
        super().__init__(service, plan.request_id, arrived=arrived)
        self._request = request
        self._plan = plan
        self._routes = routes
        self._fold = Fold(plan)
        self._head: dict[str, Any] = {"request_id": plan.request_id, "model": plan.model, "created": int(time.time())}
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._prompt_sent = False
        self._tokens = 0

    def __repr__(self) -> str:
        return f"<EventStream {self._plan.request_id} {self._fold!r}>"

    async def _read(self) -> None:
        async with running(self._service.engine, self._request) as events:
            async for event in events:
                whole = await add_event(self._service, self._fold, event)
                if isinstance(event, ChoiceEvent):
                    self._tokens += int(event.token_ids.size)
                    self._time_first_token(event)
                    self._deltas.add(event, whole)
        if self._fold.end is None:
            raise EngineProtocolError(f"the engine stopped before the end of request {self._plan.request_id}")

    async def _write_chunk(self, send: Send, taken: Taken) -> None:
        head = self._chunk_head()
        if taken.big:
            chunk = await self._service.in_pool(self._chunk_pieces, taken, head)
            await send_pieces(send, chunk, stall_s=self._service.settings.write_stall_s, more=True)
        else:
            await self._send(send, self._chunk(taken, head))

    def _close(self) -> bytes:
        self._service.metrics.count_response(self._fold.response())
        return self._last(self._fold.end or EndEvent())

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
        tree = {**head, "choices": delta_trees(taken, routes=self._routes, logprobs=self._plan.logprobs)}
        return b"data: " + _encoder.encode(tree) + b"\n\n"

    def _chunk_pieces(self, taken: Taken, head: dict[str, Any]) -> list[Piece]:
        holes = Holes()
        tree = {**head, "choices": delta_trees(taken, routes=self._routes, logprobs=self._plan.logprobs, holes=holes)}
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
