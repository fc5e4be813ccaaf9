"""What a check needs: the engine under test, what goes with it, and ways to watch a request."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rollplane.engines.base import AdapterHost, Engine, WeightReceiver
from rollplane.fold import Fold
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.response import GenerateResponse
from rollplane.testing.requests import plan_of

T = TypeVar("T")

PATIENCE_S = 30.0
"""Longest wait for anything that has to happen."""
LOGPROB_TOLERANCE = 1e-3
"""Nats by which two computations of one logprob may differ: batches of other sizes round otherwise."""
STOP_S = 2.0
"""How soon work stops that nobody waits for: a step of a large model, and a busy machine."""
QUIET_S = 0.05
"""How long nothing may happen where nothing must."""


class CheckFailed(AssertionError):
    """An engine broke a promise."""


class NotApplicable(Exception):
    """The engine does not promise this; the message says what it lacks."""


class MomentMissed(NotApplicable):
    """The engine was done before the check could look; another try may be in time."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An engine under test, started by whoever runs the checks.

    `weights`: checkpoint directories that it can take, other weights than it started with and than each other.
    `adapters`: LoRA directories that it can load, with different content.
    `transfer`: for an engine with a weight transfer of its own: what it joins with, and the parts of other weights.
    `long_tokens`: how many tokens a request has that shall still run when a check pauses or aborts it.
    """

    engine: Engine
    weights: Sequence[str] = ()
    adapters: Sequence[str] = ()
    transfer: tuple[dict[str, Any], Sequence[dict[str, Any]]] | None = None
    long_tokens: int = 1024

    def receiver(self) -> WeightReceiver:
        """The engine as a `WeightReceiver`."""
        if not isinstance(self.engine, WeightReceiver):
            raise NotApplicable("it is not a WeightReceiver")
        return self.engine

    def adapter_host(self) -> AdapterHost:
        """The engine as an `AdapterHost` with adapters to load."""
        if not isinstance(self.engine, AdapterHost) or self.engine.info.capabilities.lora is None:
            raise NotApplicable("it holds no LoRA adapters")
        if not self.adapters:
            raise NotApplicable("no adapter directories were given for it")
        return self.engine

    def checkpoint(self, i: int = 0) -> str:
        """A checkpoint directory."""
        if len(self.weights) <= i:
            raise NotApplicable(f"it was given {len(self.weights)} checkpoint directories")
        return self.weights[i]

    def honours(self, *names: str) -> None:
        """Skip the check unless the engine honours these sampling parameters."""
        for name in names:
            if name not in self.engine.info.capabilities.sampling_fields:
                raise NotApplicable(f"it does not honour {name}")

    def prompt(self, length: int = 6, *, variant: int = 0) -> list[int]:
        """A prompt inside its vocabulary, away from low ids, which tend to be special."""
        room = self.engine.info.vocab_bound - 16
        return [16 + (variant * 7919 + i * 31 + i * i) % room for i in range(length)]

    def long(self, prompt_tokens: int = 6) -> int:
        """A number of tokens that takes an engine some time."""
        return min(self.long_tokens, self.engine.info.max_model_len - prompt_tokens)


class Watch:
    """A request whose events are read by a task of its own; `tokens`, `events`, `error` tell how far it is."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self.request = request
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._engine = engine
        self._changed = asyncio.Condition()
        self._over = False
        self.task = asyncio.create_task(self._read())

    def __repr__(self) -> str:
        return f"<Watch {self.request.request_id}: {len(self.events)} events{', over' if self._over else ''}>"

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return sum(int(e.token_ids.size) for e in self.events if isinstance(e, ChoiceEvent))

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self._over

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition on what was read.

        Raises:
            CheckFailed: it did not come in time, or the request ended first.
        """

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: condition() or self._over)

        await within(wait(), f"{what} ({self!r})")
        if not condition():
            raise CheckFailed(f"{self!r} ended ({self.error!r}) before {what}")

    async def until_tokens(self, count: int) -> None:
        """Wait for so many tokens."""
        await self.until(lambda: self.tokens >= count, f"token {count}")

    async def answer(self) -> GenerateResponse:
        """Wait for the end; the validated answer."""
        await within(asyncio.wait([self.task]), f"the end of {self!r}")
        if self.error is not None:
            raise self.error
        fold = Fold(plan_of(self.request, self._engine.info))
        for event in self.events:
            fold.add(event)
        return fold.response(created=0)

    async def leave(self) -> None:
        """Cancel the reader."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def _read(self) -> None:
        try:
            async for event in self._engine.generate(self.request):
                async with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
        except Exception as error:
            self.error = error
        finally:
            self._over = True
            with contextlib.suppress(asyncio.CancelledError):
                async with self._changed:
                    self._changed.notify_all()


@asynccontextmanager
async def watching(engine: Engine, *requests: GenerateRequest) -> AsyncIterator[list[Watch]]:
    """Watch requests, and leave those that still run at the end."""
    watches = [Watch(engine, request) for request in requests]
    try:
        yield watches
    finally:
        for watch in watches:
            if not watch.task.done():
                await watch.leave()


async def within(awaitable: Awaitable[T], what: str, *, seconds: float = PATIENCE_S) -> T:
    """Wait for something that has to happen.

    Raises:
        CheckFailed: it did not within `seconds`.
    """
    try:
        return await asyncio.wait_for(awaitable, seconds)
    except TimeoutError:
        raise CheckFailed(f"waited {seconds:g} s for {what}") from None


def same(a: np.ndarray[tuple[int, ...], np.dtype[np.generic]], b: object, what: str) -> None:
    """Two arrays are byte-equal.

    Raises:
        CheckFailed: they are not.
    """
    if not isinstance(b, np.ndarray) or a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
        raise CheckFailed(f"{what} differ: {_short(a)} and {_short(b)}")


def same_answer(a: GenerateResponse, b: GenerateResponse, what: str) -> None:
    """Two answers have the same choices: tokens, routes, masks and finish reasons, byte for byte; logprobs nearly.

    Raises:
        CheckFailed: they do not.
    """
    if len(a.choices) != len(b.choices):
        raise CheckFailed(f"{what}: {len(a.choices)} and {len(b.choices)} choices")
    for x, y in zip(a.choices, b.choices, strict=True):
        where = f"{what}: choice {x.index}"
        same(x.token_ids, y.token_ids, f"{where}: token ids")
        if x.finish_reason != y.finish_reason or x.stop_reason != y.stop_reason:
            raise CheckFailed(
                f"{where}: ended with {x.finish_reason} ({x.stop_reason}) and {y.finish_reason} ({y.stop_reason})"
            )
        for name in ("logprobs", "routed_experts", "sampling_mask"):
            left, right = getattr(x, name), getattr(y, name)
            if (left is None) is not (right is None):
                raise CheckFailed(f"{where}: only one has {name}")
        if x.logprobs is not None and y.logprobs is not None:
            gap = float(np.abs(x.logprobs.values - y.logprobs.values).max(initial=0.0))
            must(gap <= LOGPROB_TOLERANCE, f"{where}: logprobs are {gap:g} nats apart")
        if x.routed_experts is not None and y.routed_experts is not None:
            same(x.routed_experts.array, y.routed_experts.array, f"{where}: routed experts")
        if x.sampling_mask is not None and y.sampling_mask is not None:
            same(x.sampling_mask.ids, y.sampling_mask.ids, f"{where}: mask ids")
            same(x.sampling_mask.offsets, y.sampling_mask.offsets, f"{where}: mask offsets")


def must(condition: bool, says: str) -> None:
    """Hold the engine to something.

    Raises:
        CheckFailed: it is not so.
    """
    if not condition:
        raise CheckFailed(says)


async def refusal(engine: Engine, request: GenerateRequest) -> BaseException | None:
    """What a request is refused with; None if it was served. No event may come before the refusal."""
    events = []
    try:
        async for event in engine.generate(request):
            events.append(event)
    except Exception as error:
        if events:
            raise CheckFailed(f"{len(events)} events came before the refusal {error!r}") from error
        return error
    return None


async def until_idle(engine: Engine) -> None:
    """Wait until the engine says that nothing runs or waits.

    Raises:
        CheckFailed: it kept on.
    """

    async def wait() -> None:
        while True:
            health = await engine.health()
            if health.running == 0 and health.waiting == 0:
                return
            await asyncio.sleep(0.002)

    await within(wait(), "the engine to stop working on a request that nobody reads", seconds=STOP_S)


def ended(watch: Watch) -> bool:
    """Whether the end event came."""
    return bool(watch.events) and isinstance(watch.events[-1], EndEvent)


def _short(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    flat = value.reshape(-1)
    return f"{value.dtype.name}{list(value.shape)} {flat[:12].tolist()}{'...' if flat.size > 12 else ''}"
