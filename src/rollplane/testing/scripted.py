"""An engine that does what a script says: for tests of servers, routers and wrappers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rollplane.errors import RollplaneError
from rollplane.protocol.artifacts import RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, FinishReason, PromptEvent, ServedBy
from rollplane.protocol.info import Capabilities, EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.versions import PolicySpan

Step = Event | Exception | asyncio.Event
"""One step of a script: an event to hand on, an error to raise, or something to wait for."""
Script = Iterable[Step]


class ScriptedEngine:
    """Plays scripts, one per request, in the order of the requests; the last one again and again.

    It checks nothing: the script may break any promise. A request that is aborted while its script waits goes on with a
    terminal `abort` event without tokens for every choice, then the end.

    Args:
        scripts: lists of steps, or functions that make one from the request. Without any, every request gets one
            choice of three tokens.
        info: facts it states; `scripted_info()` when None.
        health: what it says of itself; alive and ready when None.

    `requests` are those it got, `closed_early` the ids of those whose reader left before the script's end.
    """

    def __init__(
        self,
        *scripts: Script | Callable[[GenerateRequest], Script],
        info: EngineInfo | None = None,
        health: EngineHealth | None = None,
    ) -> None:
        self._scripts = list(scripts) or [lambda request: script_of([7, 8, 9], prompt_tokens=request.prompt_tokens)]
        self._scripts = [s if callable(s) else list(s) for s in self._scripts]
        self._info = info or scripted_info()
        self._health = health
        self._live: dict[asyncio.Event, GenerateRequest] = {}
        self.requests: list[GenerateRequest] = []
        self.closed_early: list[str] = []
        self.started = False
        self.closed = False

    def __repr__(self) -> str:
        return f"<ScriptedEngine {len(self.requests)} requests, {len(self._live)} live>"

    @property
    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return self._info

    async def start(self) -> None:
        """See `Engine.start`."""
        self.started = True

    async def close(self, *, grace_s: float = 0.0) -> None:
        """See `Engine.close`; live scripts are left to their readers."""
        self.closed = True

    def set_health(self, health: EngineHealth | None) -> None:
        """What `health` answers from now on."""
        self._health = health

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        return self._health or EngineHealth(alive=True, state="ready", running=len(self._live))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Play the next script."""
        source = self._scripts[min(len(self.requests), len(self._scripts) - 1)]
        self.requests.append(request)
        aborted = asyncio.Event()
        self._live[aborted] = request
        over = False
        try:
            for step in list(source(request) if callable(source) else source):
                if isinstance(step, asyncio.Event):
                    await _first_of(step, aborted)
                    if aborted.is_set():
                        for index in range(request.sampling.choices):
                            yield script_choice([], index=index, finish_reason="abort")
                        over = True
                        yield EndEvent()
                        return
                elif isinstance(step, Exception):
                    over = True
                    raise step
                else:
                    over = isinstance(step, EndEvent)
                    yield step
            over = True
        finally:
            self._live.pop(aborted, None)
            if not over:
                self.closed_early.append(request.request_id)

    async def abort(self, request_id: str) -> int:
        """See `Engine.abort`; scripts that wait end, the others go on."""
        found = [event for event, request in self._live.items() if request.request_id == request_id]
        for event in found:
            event.set()
        return len(found)


def scripted_info(**changes: Any) -> EngineInfo:
    """Facts of a small engine; give any field of `EngineInfo` to change it."""
    fields: dict[str, Any] = {
        "engine": "scripted",
        "model": "scripted",
        "max_model_len": 4096,
        "vocab_bound": 32_000,
        "max_num_seqs": 64,
        "capabilities": Capabilities(
            logprobs_mode="sampling",
            sampling_fields=["temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos"],
        ),
    }
    return EngineInfo(**{**fields, **changes})


def script_choice(
    token_ids: Sequence[int],
    *,
    index: int = 0,
    finish_reason: FinishReason | None = "length",
    logprobs: Sequence[float] | None = None,
    routed_experts: np.ndarray[Any, Any] | None = None,
    routes_start: int = 0,
    mask_rows: Sequence[Sequence[int]] | None = None,
    policy_versions: Sequence[PolicySpan] = (),
) -> ChoiceEvent:
    """A choice event from plain lists; `finish_reason` None makes a delta."""
    mask = None
    if mask_rows is not None:
        offsets = np.cumsum([0, *(len(row) for row in mask_rows)]).astype(np.int32)
        flat = [token_id for row in mask_rows for token_id in row]
        mask = SamplingMask(ids=np.array(flat, dtype=np.int32), offsets=offsets)
    return ChoiceEvent(
        index=index,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=None if logprobs is None else TokenLogprobs(values=np.array(logprobs, dtype=np.float32)),
        finish_reason=finish_reason,
        routed_experts=None if routed_experts is None else RoutedExperts(array=routed_experts, start=routes_start),
        sampling_mask=mask,
        policy_versions=list(policy_versions),
    )


def script_of(token_ids: Sequence[int], *, prompt_tokens: int = 3, served_by: ServedBy | None = None) -> list[Step]:
    """A whole unary answer of one choice without side channels."""
    return [
        PromptEvent(prompt_tokens=prompt_tokens),
        script_choice(token_ids, policy_versions=[("initial", 0)]),
        EndEvent(served_by=served_by or ServedBy(logprobs_mode="sampling")),
    ]


def script_error(error: RollplaneError, *, after: Sequence[int] = (), prompt_tokens: int = 3) -> list[Step]:
    """An answer that fails: at once, or as a stream after some tokens."""
    steps: list[Step] = [PromptEvent(prompt_tokens=prompt_tokens)] if after else []
    return [*steps, *(script_choice([token_id], finish_reason=None) for token_id in after), error]


async def _first_of(*events: asyncio.Event) -> None:
    """Wait for the first of some events."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
