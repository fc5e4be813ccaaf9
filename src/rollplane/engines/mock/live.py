"""A request while the mock serves it."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from rollplane.engines.mock.controls import Controls
from rollplane.engines.mock.draws import Draws
from rollplane.engines.mock.settings import Fault
from rollplane.errors import RollplaneError
from rollplane.protocol.events import Event, FinishReason
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.versions import VersionSpans


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice.

    `draws`: its tokens, some of them not made yet; `planned_end`: it ends when `draws` are used up (else more are
    drawn). `started_at`: the step after which it had no token. `state`: rolling hash after `draws`.
    `segments`: (scope, first output index) per set of weights; `labels`: None before its
    first step.
    """

    live: "Live"
    index: int
    seed: int
    draws: Draws
    state: int
    planned_end: bool = False
    finish: FinishReason | None = None
    stop_reason: int | None = None
    started_at: int | None = None
    sent: int = 0
    done: bool = False
    segments: list[tuple[int, int]] = field(default_factory=list)
    labels: VersionSpans | None = None

    def __repr__(self) -> str:
        return f"<Sequence {self.live.request.request_id}/{self.index}: {len(self.draws)} planned>"

    def made(self, steps: int) -> int:
        """Tokens made after so many steps of the engine."""
        if self.started_at is None:
            return 0
        return min(steps - self.started_at, len(self.draws))


@dataclass(eq=False, slots=True)
class Live:
    """One request: its choices, and the events that wait for its reader."""

    request: GenerateRequest
    by: Controls
    max_tokens: int
    arrival: int
    want_routes: bool
    fault: Fault | None = None
    sequences: list[Sequence] = field(default_factory=list)
    block_keys: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    scope: int = 0
    prompt_state: int = 0
    announced: bool = False
    started: bool = False
    ended: bool = False
    mixed: bool = False
    recomputed_rows: int = 0
    floored: int = 0
    events: deque[Event] = field(default_factory=deque)
    error: RollplaneError | Exception | None = None
    waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        done = sum(s.done for s in self.sequences)
        return (
            f"<Live {self.request.request_id}: {done}/{len(self.sequences)} choices{', ended' if self.ended else ''}>"
        )

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self.ended or self.error is not None

    def push(self, event: Event) -> None:
        """Hand an event to the reader."""
        self.events.append(event)
        self.wake()

    def fail(self, error: RollplaneError | Exception) -> None:
        """End with an error, after what was handed on before."""
        self.error = error
        self.wake()

    def wake(self) -> None:
        """Let the reader look."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
