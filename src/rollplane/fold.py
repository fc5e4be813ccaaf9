"""Engine events -> one validated response. Pure; a breach of the contract is an `EngineProtocolError`.

The same `Fold` watches a stream: it keeps what went by and checks each choice when it ends, so that a stream folds to
the answer that the unary call gives.
"""

import time
from collections.abc import Iterable

import msgspec
import numpy as np

from rollplane.errors import EngineProtocolError
from rollplane.protocol.arrays import Int32Array, empty_int32
from rollplane.protocol.artifacts import Alternatives, TokenLogprobs, concat_offsets
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, PromptEvent
from rollplane.protocol.invariants import check_choice, check_prompt, check_response, check_token_ids, ended_unstarted
from rollplane.protocol.response import Choice, GenerateResponse, Usage


class FoldPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the request asked for, as far as the answer's shape depends on it.

    `prompt_tokens` None: media expand the prompt, the engine says its length. `routes` and `mask`: True must be there,
    False must not, None may. `routes_start`: the start asked for.
    """

    request_id: str
    model: str
    choices: int
    prompt_tokens: int | None
    logprobs: bool
    routes: bool | None = None
    mask: bool | None = None
    prompt_logprobs: bool = False
    routes_start: int | None = None


class _Open:
    """The deltas of one choice while it grows."""

    __slots__ = ("ids", "logprobs")

    def __init__(self) -> None:
        self.ids: list[Int32Array] = []
        self.logprobs: list[TokenLogprobs] = []

    def add(self, ids: Int32Array, logprobs: TokenLogprobs | None) -> None:
        self.ids.append(ids)
        if logprobs is not None:
            self.logprobs.append(logprobs)


class Fold:
    """Takes the events of one request in order; `response()` after the `EndEvent`."""

    def __init__(self, plan: FoldPlan) -> None:
        self.plan = plan
        self._open: dict[int, _Open] = {}
        self._done: dict[int, Choice] = {}
        self._tokens = 0
        self._prompt: PromptEvent | None = None
        self._end: EndEvent | None = None

    def __repr__(self) -> str:
        return f"<Fold {self.plan.request_id}: {len(self._done)}/{self.plan.choices} choices{', ended' if self._end else ''}>"

    @property
    def completion_tokens(self) -> int:
        """Tokens so far, over all choices."""
        return self._tokens

    @property
    def prompt(self) -> PromptEvent | None:
        """The prompt event, once it came."""
        return self._prompt

    @property
    def end(self) -> EndEvent | None:
        """The end event, once it came."""
        return self._end

    def add(self, event: Event) -> Choice | None:
        """Take one event; the whole, checked choice when the event ended one.

        Raises:
            EngineProtocolError: an event out of order, or a choice that breaks the contract.
        """
        if self._end is not None:
            raise EngineProtocolError(f"{type(event).__name__} after the end of request {self.plan.request_id}")
        if isinstance(event, ChoiceEvent):
            return self._add_choice(event)
        if isinstance(event, PromptEvent):
            if self._prompt is not None:
                raise EngineProtocolError("the prompt was announced twice")
            if self.plan.prompt_tokens is not None and event.prompt_tokens != self.plan.prompt_tokens:
                raise EngineProtocolError(
                    f"the prompt has {self.plan.prompt_tokens} tokens, the engine says {event.prompt_tokens}"
                )
            if event.prompt_tokens < 0 or (event.cached_tokens or 0) < 0:
                raise EngineProtocolError(
                    f"the engine says that the prompt has {event.prompt_tokens} tokens, {event.cached_tokens} of them cached"
                )
            if self._done:
                raise EngineProtocolError(f"the prompt was announced after the choices {sorted(self._done)} ended")
            check_prompt(event.prompt_token_ids, event.prompt_logprobs, prompt_tokens=event.prompt_tokens)
            self._prompt = event
            return None
        if not isinstance(event, EndEvent):
            raise EngineProtocolError(f"{type(event).__name__} is no event of a request")
        choices = self.plan.choices
        if len(self._done) < choices:
            missing = [i for i in range(choices) if i not in self._done]
            raise EngineProtocolError(f"the request ended without a terminal event for the choices {missing}")
        if choices > 1:
            lacking = [i for i, choice in sorted(self._done.items()) if choice.routed_experts is None]
            if 0 < len(lacking) < choices:
                raise EngineProtocolError(f"choices {lacking} lack routed experts, the others have them")
        if event.served_by.floored_logprobs < 0:
            raise EngineProtocolError(f"the engine says that it floored {event.served_by.floored_logprobs} logprobs")
        self._end = event
        return None

    def _add_choice(self, event: ChoiceEvent) -> Choice | None:
        index, plan, ids, logprobs = event.index, self.plan, event.token_ids, event.logprobs
        if not 0 <= index < plan.choices:
            raise EngineProtocolError(f"choice {index} of a request for {plan.choices}")
        if index in self._done:
            raise EngineProtocolError(f"choice {index} has an event after its terminal one")
        deltas = self._open.get(index)
        if event.finish_reason is None or deltas is not None:  # one that comes whole is checked as a whole
            check_token_ids(ids, where=f"choice {index}")
        size = int(ids.size)
        if logprobs is not None and logprobs.values.shape != ids.shape:
            raise EngineProtocolError(f"choice {index}: {logprobs.values.size} logprobs for {size} tokens")
        if plan.logprobs and logprobs is None and size:
            raise EngineProtocolError(f"choice {index}: {size} tokens without logprobs")
        self._tokens += size
        if event.finish_reason is None:
            if event.routed_experts is not None or event.sampling_mask is not None or event.policy_versions:
                raise EngineProtocolError(f"choice {index}: a side channel before the terminal event")
            if deltas is None:
                deltas = self._open[index] = _Open()
            deltas.add(ids, logprobs)
            return None
        if deltas is not None:
            deltas.add(ids, logprobs)
            ids = concat_ids(deltas.ids)
            if plan.logprobs:
                logprobs = concat_logprobs(deltas.logprobs)
        elif not size:
            ids = concat_ids([])
            logprobs = logprobs if logprobs is not None else concat_logprobs([])
        folded = Choice(
            index=index,
            token_ids=ids,
            finish_reason=event.finish_reason,
            logprobs=logprobs if plan.logprobs else None,
            stop_reason=event.stop_reason,
            routed_experts=event.routed_experts,
            sampling_mask=event.sampling_mask,
            policy_versions=event.policy_versions,
        )
        check_choice(
            folded,
            prompt_tokens=self.prompt_tokens,
            logprobs=plan.logprobs,
            mask=plan.mask,
            routes_start=plan.routes_start,
        )
        if plan.routes is not None and (event.routed_experts is not None) is not plan.routes:
            raise EngineProtocolError(
                f"choice {index}: routed experts were {'asked for and are missing' if plan.routes else 'not asked for'}"
            )
        if plan.mask is False and event.sampling_mask is not None:
            raise EngineProtocolError(f"choice {index}: a sampling mask was not asked for")
        self._done[index] = folded
        return folded

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length: as the engine said, else as sent.

        Raises:
            EngineProtocolError: media expand the prompt and the engine did not say how far.
        """
        if self._prompt is not None:
            return self._prompt.prompt_tokens
        if self.plan.prompt_tokens is None:
            raise EngineProtocolError("the engine expanded media and did not say the prompt's length")
        return self.plan.prompt_tokens

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self._prompt.cached_tokens if self._prompt is not None else None,
        )

    def response(self, *, created: int | None = None) -> GenerateResponse:
        """The whole answer.

        Raises:
            EngineProtocolError: the end never came, or something asked for is missing.
        """
        if self._end is None:
            raise EngineProtocolError(f"the engine stopped before the end of request {self.plan.request_id}")
        prompt, end = self._prompt, self._end
        response = GenerateResponse(
            request_id=self.plan.request_id,
            model=self.plan.model,
            created=int(time.time()) if created is None else created,
            choices=[self._done[i] for i in range(self.plan.choices)],
            usage=self.usage,
            prompt_logprobs=prompt.prompt_logprobs if prompt is not None else None,
            prompt_token_id_logprobs=prompt.prompt_token_id_logprobs if prompt is not None else None,
            prompt_token_ids=prompt.prompt_token_ids if prompt is not None else None,
            mm_placeholders=prompt.mm_placeholders if prompt is not None else None,
            kv_transfer_params=end.kv_transfer_params,
            ec_transfer_params=end.ec_transfer_params,
            metrics=end.metrics,
            served_by=end.served_by,
        )
        if self.plan.prompt_logprobs and response.prompt_logprobs is None and not ended_unstarted(response):
            raise EngineProtocolError("prompt logprobs were asked for and are missing")
        return response


def folded(events: Iterable[Event], plan: FoldPlan, *, created: int | None = None) -> GenerateResponse:
    """The whole, checked answer that events make.

    Raises:
        EngineProtocolError: they break the contract.
    """
    fold = Fold(plan)
    for event in events:
        fold.add(event)
    return fold.response(created=created)


def check_again(response: GenerateResponse, plan: FoldPlan) -> None:
    """The client's own check of an answer that crossed a wire.

    Raises:
        EngineProtocolError: with the numbers.
    """
    check_response(
        response,
        choices=plan.choices,
        prompt_tokens=plan.prompt_tokens,
        logprobs=plan.logprobs,
        routes=plan.routes,
        mask=plan.mask,
        prompt_logprobs=plan.prompt_logprobs,
        routes_start=plan.routes_start,
    )


def concat_ids(parts: list[Int32Array]) -> Int32Array:
    """One int32 array; the single part itself where there is only one (no copy)."""
    full = [part for part in parts if part.size]
    if len(full) == 1:
        return full[0]
    return np.concatenate(full) if full else empty_int32()


def concat_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """The logprobs of concatenated deltas; CSR offsets of alternatives are rebased.

    Raises:
        EngineProtocolError: some deltas have ranks or alternatives and others have not, or a delta's do not fit its
            tokens (which errors of opposite sign in two deltas would hide in the whole).
    """
    full = [part for part in parts if part.values.size]
    if len(full) == 1:
        return full[0]
    if not full:
        return parts[0] if parts else TokenLogprobs(values=np.empty(0, dtype=np.float32))
    with_ranks = [part.ranks for part in full if part.ranks is not None]
    with_top = [part.alternatives for part in full if part.alternatives is not None]
    if len(with_ranks) not in (0, len(full)) or len(with_top) not in (0, len(full)):
        raise EngineProtocolError("some deltas carry ranks or alternatives and others do not")
    for part in full:
        top, rows = part.alternatives, part.values.size
        if part.ranks is not None and part.ranks.size != rows:
            raise EngineProtocolError(f"a delta of {rows} tokens has {part.ranks.size} ranks")
        if top is not None and (
            top.offsets.size != rows + 1
            or top.offsets[0] != 0
            or not top.offsets[-1] == top.ids.size == top.values.size
        ):
            raise EngineProtocolError(
                f"a delta of {rows} tokens has {top.offsets.size} offsets, {top.ids.size} ids, {top.values.size} values"
            )
    return TokenLogprobs(
        values=np.concatenate([part.values for part in full]),
        ranks=np.concatenate(with_ranks) if with_ranks else None,
        alternatives=Alternatives(
            ids=np.concatenate([top.ids for top in with_top]),
            values=np.concatenate([top.values for top in with_top]),
            ranks=np.concatenate([top.ranks for top in with_top]),
            offsets=concat_offsets([top.offsets for top in with_top]),
        )
        if with_top
        else None,
    )
