"""A streamed answer read back into events: server-sent chunks in, `PromptEvent`, `ChoiceEvent` and `EndEvent` out."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from rollplane.client.json_choice import JsonChoice, mask_of, routes_of, token_logprobs
from rollplane.errors import TransportError, error_from_body
from rollplane.protocol.arrays import Int32Array, dec_hook
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, PromptEvent, ServedBy

MAX_LINE_BYTES: Final = 1 << 30


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    model: str | None = None
    choices: list[JsonChoice] = msgspec.field(default_factory=list)
    error: dict[str, Any] | None = None
    usage: _Usage | None = None
    rollplane: ServedBy | None = None
    prompt_token_ids: Int32Array | None = None
    mm_placeholders: dict[str, list[dict[str, Any]]] | None = None
    metrics: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Chunk, dec_hook=dec_hook)


class StreamReader:
    """Cuts server-sent bytes into events; feed it what arrives.

    `routes_start`: the start that was asked for, which the `npy` encoding cannot state.
    """

    def __init__(self, *, routes_start: int = 0) -> None:
        self._routes_start = routes_start
        self._buffer = bytearray()
        self._prompt_seen = False
        self._prompt_ids: Int32Array | None = None
        self._placeholders: dict[str, list[dict[str, Any]]] | None = None
        self._end = EndEvent()
        self.model = ""
        """The model that answers, once a chunk came."""
        self.done = False
        """Whether `[DONE]` came."""

    def __repr__(self) -> str:
        return f"<StreamReader {'done' if self.done else f'{len(self._buffer)} bytes waiting'}>"

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events of every chunk that is now whole; the `EndEvent` comes with `[DONE]`.

        Raises:
            RollplaneError: the typed error that the stream carries.
            TransportError: a chunk that cannot be read.
        """
        self._buffer += data
        # Only what is new can end a line, so a long chunk is not searched again at every piece.
        at, start = 0, max(len(self._buffer) - len(data), 0)
        while (end := self._buffer.find(b"\n", max(at, start))) >= 0:
            line = bytes(self._buffer[at:end]).rstrip(b"\r")
            at = end + 1
            if line.startswith(b"data:"):
                yield from self._take(line[5:].strip())
        del self._buffer[:at]
        if len(self._buffer) > MAX_LINE_BYTES:
            raise TransportError(f"a chunk is over the limit of {MAX_LINE_BYTES} bytes")

    def _take(self, data: bytes) -> Iterator[Event]:
        if data == b"[DONE]":
            self.done = True
            yield self._end
            return
        try:
            chunk = _decoder.decode(data)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransportError(f"a chunk cannot be read: {error}") from None
        if chunk.error is not None:
            raise error_from_body(chunk.error)
        self.model = chunk.model or self.model
        for name in ("metrics", "kv_transfer_params", "ec_transfer_params"):
            if (value := getattr(chunk, name)) is not None:
                setattr(self._end, name, value)
        if chunk.rollplane is not None:
            self._end.served_by = chunk.rollplane
        if chunk.prompt_token_ids is not None:
            self._prompt_ids = chunk.prompt_token_ids
        if chunk.mm_placeholders is not None:
            self._placeholders = chunk.mm_placeholders
        if not self._prompt_seen and chunk.usage is not None:
            self._prompt_seen = True
            details = chunk.usage.prompt_tokens_details
            yield PromptEvent(
                prompt_tokens=chunk.usage.prompt_tokens,
                cached_tokens=None if details is None else details.cached_tokens,
                prompt_token_ids=self._prompt_ids,
                mm_placeholders=self._placeholders,
            )
        for choice in chunk.choices:
            yield self._event(choice)

    def _event(self, choice: JsonChoice) -> ChoiceEvent:
        return ChoiceEvent(
            index=choice.index,
            token_ids=choice.token_ids,
            logprobs=None if choice.logprobs is None else token_logprobs(choice.logprobs.content),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            routed_experts=routes_of(choice, start=self._routes_start),
            sampling_mask=None if choice.sampling_mask is None else mask_of(choice.sampling_mask),
            policy_versions=choice.policy_versions or [],
        )
