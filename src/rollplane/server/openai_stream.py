"""A streamed evaluation answer: server-sent events in OpenAI's shapes, texts whole at the end.

Text is decoded as tokens come; what could still turn out to be part of a stop string is held back. The last chunk of a choice
completes it to exactly the text of the unary answer. Deltas of a slow reader are merged, as on Generate.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from rollplane.errors import EngineProtocolError
from rollplane.fold import Fold, concat_ids, concat_logprobs
from rollplane.protocol.answer import ids_raw, served_by_tree, usage_tree
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import TokenLogprobs
from rollplane.protocol.events import ChoiceEvent
from rollplane.protocol.openai import in_callers_words
from rollplane.protocol.request import GenerateRequest, StreamOptions
from rollplane.protocol.response import Choice
from rollplane.protocol.tool_calls import OPEN
from rollplane.server.engine_calls import add_event, running
from rollplane.server.error_responses import as_rollplane_error
from rollplane.server.generate import plan_for
from rollplane.server.openai_answers import Style, content_of, encode, ending, logprobs_tree, text_of, total_usage
from rollplane.server.service import Service
from rollplane.server.streamed import StreamedAnswer, Taken
from rollplane.server.text import TextModel


class ChoiceText:
    """The text of one choice so far, and how much of it was sent."""

    def __init__(self, style: Style, texts: TextModel) -> None:
        self._style = style
        self._texts = texts
        self._stream = texts.stream(skip_special=style.skips_special)
        keep = bool(style.sampling.get("include_stop_str_in_output", False))
        stops = [] if keep else style.sampling.stop_strings
        if style.reads_tools:
            stops = [*stops, OPEN]
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._text = ""
        self.sent = 0
        self.characters = 0
        self.opened = False

    def __repr__(self) -> str:
        return f"<ChoiceText {self.sent}/{len(self._text)} characters sent>"

    def grow(self, ids: Int32Array) -> str:
        """What may be sent after these tokens."""
        self._text += self._stream.feed(ids)
        ready = max(self.sent, len(self._text) - self._held)
        if self._style.reads_tools and (at := self._text.find(OPEN)) >= 0:
            ready = min(ready, at)  # what follows may be a call, which is told from text at its end
        piece, self.sent = self._text[self.sent : ready], ready
        return piece

    def finish(self, choice: Choice, *, index: int) -> tuple[str, list[dict[str, Any]]]:
        """What is missing of the whole content, and the tool calls."""
        whole, calls = content_of(text_of(choice, self._style, self._texts), self._style, index=index)
        return whole[self.sent :] if whole.startswith(self._text[: self.sent]) else "", calls


class ChunkStream(StreamedAnswer):
    """The ASGI answer of one streamed body of one or more prompts."""

    def __init__(
        self,
        service: Service,
        requests: list[GenerateRequest],
        style: Style,
        texts: TextModel,
        *,
        options: StreamOptions | None,
        field: str,
        names: Mapping[str, str],
        arrived: float,
    ) -> None:
        super().__init__(service, style.response_id, arrived=arrived)
        self._requests = requests
        self._style = style
        self._texts = texts
        self._field = field
        self._names = names
        self._usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._folds = [Fold(plan_for(each, service.engine.info, exact=service.role == "worker")) for each in requests]
        self._choices: dict[int, ChoiceText] = {}

    def __repr__(self) -> str:
        return f"<ChunkStream {self._style.response_id}, {len(self._requests)} prompts>"

    async def _read(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for i in range(len(self._requests)):
                    group.create_task(self._read_one(i))
        except BaseExceptionGroup as errors:
            raise in_callers_words(
                as_rollplane_error(errors.exceptions[0]), prompt=self._field, names=self._names
            ) from None

    async def _read_one(self, which: int) -> None:
        """The events of one prompt."""
        request, fold = self._requests[which], self._folds[which]
        first = which * request.sampling.choices
        async with running(self._service.engine, request) as events:
            async for event in events:
                whole = await add_event(self._service, fold, event)
                if isinstance(event, ChoiceEvent):
                    self._time_first_token(event)
                    self._deltas.add(event, whole, index=first + event.index)
        if fold.end is None:
            raise EngineProtocolError(f"the engine stopped before the end of request {request.request_id}")

    async def _write_chunk(self, send: Send, taken: Taken) -> None:
        found = [self._choice(i, *taken.parts[i], taken.finished.get(i)) for i in sorted(taken.parts)]
        choices = [tree for tree in found if tree is not None]
        if choices:
            await self._send(send, self._chunk(choices))

    def _close(self) -> bytes:
        for fold in self._folds:
            self._service.metrics.count_response(fold.response())
        return self._last()

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        tree = self._style.head(chunk=True) | {"choices": choices}
        if self._usage_always:
            tree["usage"] = usage_tree(total_usage([fold.usage for fold in self._folds]))
        return b"data: " + encode(tree) + b"\n\n"

    def _last(self) -> bytes:
        if not (self._usage or self._usage_always):
            return b""
        tree = self._style.head(chunk=True) | {"choices": []}
        tree["usage"] = usage_tree(total_usage([fold.usage for fold in self._folds]))
        end = self._folds[0].end
        if end is not None:
            tree["rollplane"] = served_by_tree(end.served_by)
        return b"data: " + encode(tree) + b"\n\n"

    def _choice(
        self, index: int, parts: list[Int32Array], logprobs: list[TokenLogprobs], whole: Choice | None
    ) -> dict[str, Any] | None:
        """One choice of a chunk; None while there is nothing to say."""
        style = self._style
        text = self._choices.setdefault(index, ChoiceText(style, self._texts))
        ids = concat_ids(parts)
        piece, calls = (text.grow(ids), []) if whole is None else text.finish(whole, index=index)
        asked = style.sampling.get("logprobs") is not None
        if whole is None and not piece and not asked and not style.token_ids and text.opened:
            return None
        numbers = None
        if asked:
            joined = concat_logprobs(logprobs) if logprobs else None
            numbers = logprobs_tree(ids, joined, style, self._texts, offset=text.characters)
            if numbers is not None and not style.chat:
                text.characters += sum(len(name) for name in numbers["tokens"])
        tree: dict[str, Any] = {"index": index}
        if style.chat:
            tree["delta"] = {"content": piece} if text.opened else {"role": "assistant", "content": piece}
            if calls:
                tree["delta"]["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        else:
            tree["text"] = piece
        tree["logprobs"] = numbers
        tree |= {"finish_reason": None} if whole is None else ending(whole, style, called=bool(calls))
        if style.token_ids:
            tree["token_ids"] = ids_raw(ids)
            if not text.opened:
                tree["prompt_token_ids"] = ids_raw(self._requests[index // style.sampling.choices].token_ids)
        text.opened = True
        return tree
