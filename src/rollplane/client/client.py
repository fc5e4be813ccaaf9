"""The rollout client of a trainer: token ids in, token ids and everything for the replay out."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final, Self, Unpack

import aiohttp
import msgspec

from rollplane.client.body import GenerateBody, TokenIds, make_body
from rollplane.client.options import GenerateOptions
from rollplane.client.sse import StreamReader
from rollplane.client.transport import Connected, Transport
from rollplane.errors import EngineProtocolError, RollplaneError, TransportError
from rollplane.fold import Fold, check_again
from rollplane.protocol.answer import decode_msgpack
from rollplane.protocol.events import ChoiceEvent, Event
from rollplane.protocol.request import MSGPACK
from rollplane.protocol.response import GenerateResponse

GENERATE: Final = "/inference/v1/generate"
EVENT_STREAM: Final = "text/event-stream"


class Client(Connected):
    """Rollouts from one server: a worker or a frontend.

    A `generate` that met a lost connection, 429, 502 or 503 is sent again under the same request id: a first try that
    still runs is attached to, one that is gone is generated anew (another sample unless it is seeded; give an
    `idempotency_key` to get the first try's answer). A stream is repeated only while nothing of it arrived.

    Args:
        base_url: the server's address, with or without a trailing `/v1`.
        key: sent as a bearer token.
        timeout_s: limit of a call that has no `deadline_s` of its own, all tries together; None: no limit.
        attempts: how often a call is tried in all.
        connect_timeout_s: longest wait for a connection.

    Use it as an async context manager, in one event loop.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None = None,
        timeout_s: float | None = None,
        attempts: int = 4,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(Transport(base_url, key=key, attempts=attempts, connect_timeout_s=connect_timeout_s))
        self._timeout_s = timeout_s

    async def generate(self, token_ids: TokenIds, **options: Unpack[GenerateOptions]) -> GenerateResponse:
        """One whole answer, its arrays checked by the response contract again.

        Args:
            token_ids: the prompt, integers in [0, vocabulary).
            **options: see `GenerateOptions`.

        Raises:
            CallerError: the request is wrong; by field.
            ServiceError: the server cannot do it now, or the deadline passed.
            EngineProtocolError: the answer breaks the contract.
            PeerError: the engine or a connection failed, also after all tries.
        """
        body = make_body(token_ids, **options)

        async def once() -> GenerateResponse:
            headers = {**body.headers, "Accept": MSGPACK}
            async with self._transport.open(
                "POST", GENERATE, data=body.content, headers=headers, limit_s=self._limit(body)
            ) as answer:
                if answer.content_type != MSGPACK:
                    raise EngineProtocolError(
                        f"the server answered {answer.content_type!r} where {MSGPACK} was asked for"
                    )
                content = await answer.read()
            try:
                return decode_msgpack(content)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise EngineProtocolError(f"the answer cannot be read: {error}") from None

        response = await self._transport.repeated(once, limit_s=self._limit(body), retry=True)
        if response.request_id != body.request_id:
            raise EngineProtocolError(f"the answer is to request {response.request_id!r}, not {body.request_id!r}")
        check_again(response, body.plan)
        return response

    def stream(self, token_ids: TokenIds, **options: Unpack[GenerateOptions]) -> "GenerateStream":
        """The answer while it grows; arguments as `generate`'s.

            async with client.stream(prompt, sampling_params={...}) as stream:
                async for delta in stream:
                    ...
            stream.response

        Nothing is sent before the block is entered.
        """
        body = make_body(token_ids, stream=True, **options)
        return GenerateStream(self._transport, body, limit_s=self._limit(body))

    async def abort(self, request_id: str) -> int:
        """End a request, which then answers with what it has and finish reason `abort`; how many live ones had the id."""
        answer = await self._transport.json("POST", "/engine/abort_request", {"request_id": request_id}, limit_s=30.0)
        count = answer.get("aborted", 0) if isinstance(answer, dict) else 0
        return count if isinstance(count, int) else 0

    async def models(self) -> list[dict[str, Any]]:
        """The cards of every name that `model` may be: the base model, its aliases and adapters."""
        answer = await self._transport.json("GET", "/v1/models", limit_s=30.0)
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
            raise TransportError(f"{self._transport.base_url}/v1/models answered something else than a list of models")
        cards: list[dict[str, Any]] = answer["data"]
        return cards

    async def health(self) -> bool:
        """Whether the server is there and says that it is well."""
        try:
            await self._transport.json("GET", "/health", limit_s=10.0, retry=False)
        except RollplaneError:
            return False
        return True

    def _limit(self, body: GenerateBody) -> float | None:
        return self._timeout_s if body.deadline_s is None else body.deadline_s


class GenerateStream:
    """One streamed answer: an async context manager and an async iterator of `ChoiceEvent`s (deltas).

    `response` is the folded answer, the same as `generate` gives; it is there once the iterator has ended.
    """

    def __init__(self, transport: Transport, body: GenerateBody, *, limit_s: float | None) -> None:
        self.request_id = body.request_id
        self._transport = transport
        self._body = body
        self._limit_s = limit_s
        self._fold = Fold(body.plan)
        self._reader = StreamReader(routes_start=body.plan.routes_start or 0)
        self._opened: Any = None
        self._answer: aiohttp.ClientResponse | None = None
        self._response: GenerateResponse | None = None

    def __repr__(self) -> str:
        state = "ended" if self._response is not None else "not open" if self._answer is None else "open"
        return f"<GenerateStream {self.request_id} {state} {self._fold.completion_tokens} tokens>"

    @property
    def response(self) -> GenerateResponse:
        """The whole answer.

        Raises:
            EngineProtocolError: the stream has not ended, or ended early.
        """
        if self._response is None:
            self._response = msgspec.structs.replace(self._fold.response(), model=self._reader.model)
        return self._response

    async def __aenter__(self) -> Self:
        async def once() -> tuple[Any, aiohttp.ClientResponse]:
            opened = self._transport.open(
                "POST",
                GENERATE,
                data=self._body.content,
                headers={**self._body.headers, "Accept": EVENT_STREAM},
                limit_s=self._limit_s,
            )
            return opened, await opened.__aenter__()

        self._opened, self._answer = await self._transport.repeated(once, limit_s=self._limit_s, retry=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            # The error, if any, is the caller's own: the connection is only closed, which aborts the request.
            await opened.__aexit__(None, None, None)

    async def __aiter__(self) -> AsyncIterator[ChoiceEvent]:
        async for event in self.events():
            if isinstance(event, ChoiceEvent):
                yield event

    async def events(self) -> AsyncIterator[Event]:
        """Every event, also the prompt's and the end.

        Raises:
            RollplaneError: the typed error that ended the stream; TransportError where it broke off.
        """
        if self._answer is None:
            raise TransportError("the stream is not open: use `async with client.stream(...)`")
        if self._answer.content_type != EVENT_STREAM:
            raise EngineProtocolError(
                f"the server answered {self._answer.content_type!r} where {EVENT_STREAM} was asked for"
            )
        try:
            async for data in self._answer.content.iter_any():
                for event in self._reader.feed(data):
                    self._fold.add(event)
                    yield event
        except (aiohttp.ClientError, OSError) as error:
            raise TransportError(
                f"the stream of {self.request_id} broke off: {type(error).__name__}: {error}"
            ) from error
        if not self._reader.done:
            raise TransportError(f"the stream of {self.request_id} ended before [DONE]")
