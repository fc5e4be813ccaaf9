"""The mock's scheduler: who waits, who runs, and what is said when.

One callback on the event loop, `turn`, re-derives everything and then asks to be called again at the next moment at
which anything changes: a prompt is computed, a choice ends, a stream has a token. A running unary choice costs one
wake-up however long it is. Tokens are drawn ahead, all at once; time only decides how many of them exist.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from rollplane.engines.mock.draws import Draws
from rollplane.engines.mock.events import delta_event, end_event, ending_event, prompt_event
from rollplane.engines.mock.hashing import key_of
from rollplane.engines.mock.language import Language
from rollplane.engines.mock.live import Live, Sequence
from rollplane.engines.mock.prefix_cache import PrefixCache
from rollplane.engines.mock.routes import Router
from rollplane.engines.mock.settings import BREACHES, MockSettings
from rollplane.engines.mock.spoil import spoil_choice
from rollplane.engines.mock.step_clock import Clock, Handle, StepClock
from rollplane.errors import EngineFailed, RollplaneError
from rollplane.identity import block_keys, routing_tokens
from rollplane.protocol.admin import PauseMode
from rollplane.protocol.events import FinishReason
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.versions import VersionSpans

_DRAW_AHEAD_TOKENS = 4096
_STARTS_PER_TURN = 64


class Core:
    """Everything between a request's admission and its last event. Lives on one event loop.

    Args:
        settings: see `MockSettings`.
        clock: whose seconds count.
        on_death: called with the reason when a fault kills the engine.
    """

    def __init__(self, settings: MockSettings, clock: Clock, *, on_death: Callable[[str], None]) -> None:
        self.settings = settings
        self.clock = clock
        self.on_death = on_death
        self.version = settings.policy_version
        self.weights_digest = f"{key_of('mock weights', settings.weights):016x}" * 4
        self.adapters: dict[str, str] = {}
        self.paused: PauseMode | None = None
        self.frozen = False
        self.language = Language(
            vocab_tokens=settings.vocab_tokens,
            max_positions=settings.max_model_len,
            eos_token_id=settings.eos_token_id,
            ending_rate=settings.ending_rate,
        )
        self.router = Router(settings.moe) if settings.moe is not None else None
        self.cache = PrefixCache(block_tokens=settings.block_tokens, capacity_blocks=settings.cache_blocks)
        self.steps = StepClock(step_s=settings.step_s, step_per_sequence_s=settings.step_per_sequence_s)
        self.counters = {"requests": 0, "prompt_tokens_computed": 0, "tokens": 0, "aborted": 0}
        self.on_kv_change: Callable[[], None] = lambda: None
        self.lives: dict[Live, None] = {}
        self._waiting: list[tuple[int, int, Live]] = []
        self._prefill: tuple[Live, float] | None = None
        self._running: dict[Sequence, None] = {}
        self._streams: dict[Live, None] = {}
        self._hung: dict[Sequence, float] = {}
        self._ends: list[tuple[int, int, Sequence]] = []
        self._order = itertools.count()
        self._unseeded = itertools.count()
        self._handle: Handle | None = None
        self._soon = False
        self._idle_waiters: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        state = f"paused ({self.paused})" if self.paused else "stepping"
        return f"<Core {state} at {self.version!r}, {len(self._running)} running, {self.waiting} waiting>"

    @property
    def running(self) -> int:
        """Requests that hold a place: with a choice that runs, or a prompt being computed."""
        return len({s.live for s in self._running}) + (self._prefill is not None)

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return sum(not live.over for _, _, live in self._waiting)

    @property
    def busy(self) -> bool:
        """Something holds a place."""
        return bool(self._running) or self._prefill is not None

    def stuck_s(self) -> float:
        """Seconds since the engine last moved, while everything that runs hangs; else 0."""
        if not self._running or len(self._hung) < len(self._running) or self._prefill is not None:
            return 0.0
        return self.clock() - max(self._hung.values())

    def submit(self, live: Live) -> None:
        """Queue a checked request."""
        self.counters["requests"] += 1
        self.lives[live] = None
        live.sequences = [self._sequence(live, i) for i in range(live.request.sampling.choices)]
        heapq.heappush(self._waiting, (live.request.priority, live.arrival, live))
        self.poke()

    def forget(self, live: Live) -> None:
        """The reader is gone: stop the work and say nothing."""
        if not live.over:
            live.ended = True
            self._leave(live)
        self.lives.pop(live, None)
        self.poke()

    def abort(self, live: Live) -> None:
        """End what is left of a request, with all tokens made so far."""
        self.steps.move_to(self.clock())
        if not live.announced:
            self._announce(live)
        self.counters["aborted"] += 1
        for sequence in live.sequences:
            if not sequence.done:
                made = sequence.made(self.steps.whole)
                self._finish(sequence, made, reason="abort")
        self.poke()

    def fail_all(self, error_of: Callable[[Live], RollplaneError]) -> None:
        """End every request with an error."""
        for live in list(self.lives):
            if not live.over:
                live.fail(error_of(live))
                self._leave(live)
        self.poke()

    def freeze(self) -> None:
        """Stop stepping where it is, with every token that exists handed on."""
        self.frozen = True
        self.steps.stop(self.clock())
        self._progress()
        self.poke()

    def thaw(self) -> None:
        """Step again; a half computed prompt starts anew."""
        self.frozen = False
        self.steps.run(self.clock(), sequences=len(self._running))
        if self._prefill is not None:
            live = self._prefill[0]
            self._prefill = (live, self.clock() + self._prefill_s(live))
        self.poke()

    async def idle(self) -> None:
        """Wait until nothing holds a place, or stepping is stopped."""
        if self.busy and not self.frozen:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def relabel(self, version: str) -> None:
        """Tokens from now on carry another version."""
        self._progress()
        self.version = version
        for sequence in self._running:
            if sequence.labels is not None:
                sequence.labels.change(version, made=sequence.made(self.steps.whole))

    def replace_weights(self, digest: str, version: str) -> None:
        """Tokens from now on are those of other weights. Only while frozen or idle."""
        self.weights_digest = digest
        self.relabel(version)
        for sequence in self._running:
            live, made = sequence.live, sequence.made(self.steps.whole)
            live.scope, live.mixed = self._scope(live.request), True
            sequence.segments = [s for s in sequence.segments if s[1] < made] + [(live.scope, made)]
            sequence.draws, sequence.planned_end = sequence.draws.cut(0, made), False
            if sequence not in self._hung:
                self._plan(sequence)

    def drop_cache(self, *, held_too: bool) -> tuple[int, int, int]:
        """Drop cached blocks: how many, how many stayed, and how many requests must compute theirs again."""
        freed, stayed = self.cache.clear(held_too=held_too)
        recomputing = 0
        if held_too:
            for live in {s.live: None for s in self._running}:
                made = max(s.made(self.steps.whole) for s in live.sequences)
                live.recomputed_rows = max(live.recomputed_rows, live.request.prompt_tokens + made - 1)
                live.held = []
                recomputing += 1
        self.on_kv_change()
        return freed, stayed, recomputing

    def poke(self) -> None:
        """Look again at once."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self.turn)

    def turn(self) -> None:
        """Do what is due now, then sleep until the next moment that matters."""
        try:
            self._turn()
        except Exception as error:
            self.on_death(f"the scheduler failed: {error!r}")
            raise

    def _turn(self) -> None:
        self._soon = False
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        now = self.clock()
        if not self.frozen:
            if self.steps.instant and self._streams:
                self.steps.tick()
            self._progress()
            more = self._start_due(now)
            self.steps.run(now, sequences=len(self._running))
            self._sleep(now, at_once=more)
        if self.frozen or not self.busy:
            self.release_waiters()
        self.on_kv_change()

    def release_waiters(self) -> None:
        """Let those who wait for `idle` look."""
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _sleep(self, now: float, *, at_once: bool) -> None:
        streaming = any(s not in self._hung for live in self._streams for s in live.sequences if not s.done)
        if at_once or (streaming and self.steps.instant):
            self.poke()
            return
        delay_s = self._prefill[1] - now if self._prefill is not None else math.inf
        if streaming:
            delay_s = min(delay_s, self.steps.seconds_until(self.steps.whole + 1))
        if self._ends:
            delay_s = min(delay_s, self.steps.seconds_until(self._ends[0][0]))
        if delay_s < math.inf:
            self._handle = self.clock.call_later(max(delay_s, 0.0), self.turn)

    def _progress(self) -> None:
        """Hand on the tokens that exist by now."""
        self.steps.move_to(self.clock())
        whole = self.steps.whole
        for live in list(self._streams):
            for sequence in live.sequences:
                if not sequence.done and sequence not in self._hung:
                    self._deliver(sequence, whole)
        while self._ends and self._ends[0][0] <= whole:
            sequence = heapq.heappop(self._ends)[2]
            if not sequence.done and sequence not in self._hung and sequence.made(whole) >= len(sequence.draws):
                self._used_up(sequence)

    def _deliver(self, sequence: Sequence, whole: int) -> None:
        made = sequence.made(whole)
        if made >= len(sequence.draws):
            self._used_up(sequence)
        elif made > sequence.sent:
            self._push_delta(sequence, made)

    def _push_delta(self, sequence: Sequence, made: int) -> None:
        event = delta_event(sequence, made)
        sequence.sent = made
        sequence.live.push(event)

    def _used_up(self, sequence: Sequence) -> None:
        """Every drawn token exists: the choice ends, has its fault, or draws more."""
        live = sequence.live
        made = len(sequence.draws)
        fault = live.fault
        falls = fault is not None and sequence.index == 0 and made == fault.after_tokens and fault.kind not in BREACHES
        if live.request.stream and made > sequence.sent and (falls or not sequence.planned_end):
            self._push_delta(sequence, made)
        if falls:
            self._befall(sequence)
        elif sequence.planned_end:
            self._finish(sequence, made, reason=sequence.finish or "length")
        else:
            self._plan(sequence)
            if self.steps.instant and not live.request.stream:
                self._used_up(sequence)

    def _befall(self, sequence: Sequence) -> None:
        live, fault = sequence.live, sequence.live.fault
        if fault is None:
            return
        if fault.kind == "hang":
            self._hung[sequence] = self.clock()
        elif fault.kind == "die":
            self.on_death(f"scripted to die on request {live.request.request_id}")
        else:
            live.fail(
                EngineFailed(f"scripted to fail on request {live.request.request_id}")
                if fault.kind == "fail"
                else RuntimeError("scripted foreign error")
            )
            self._leave(live)

    def _start_due(self, now: float) -> bool:
        """Begin what there is room for; whether there is more to begin at once."""
        if self._prefill is not None and now >= self._prefill[1] - 1e-9:
            live, self._prefill = self._prefill[0], None
            self._start(live)
        begun = 0
        while self._prefill is None and self.paused is None and self._waiting:
            live = self._waiting[0][2]
            if not live.over:
                if len(self._running) + len(live.sequences) > self.settings.max_num_seqs:
                    return False
                if begun == _STARTS_PER_TURN:
                    return True
                begun += 1
                self._prepare(live)
                if delay_s := self._prefill_s(live):
                    self._prefill = (live, now + delay_s)
                else:
                    self._start(live)
            heapq.heappop(self._waiting)
        return False

    def _prepare(self, live: Live) -> None:
        """Look the prompt up in the prefix cache."""
        request, size = live.request, self.settings.block_tokens
        if self.settings.cache_blocks:
            tokens = routing_tokens(request.token_ids, request.features or ())
            live.block_keys = block_keys(tokens, block_tokens=size, salt=request.cache_salt, adapter=request.adapter)
            bypass = request.sampling.get("skip_reading_prefix_cache", False)
            if not bypass and request.sampling.get("prompt_logprobs") is None:
                # At least one token is computed: its logits make the first sample.
                usable = (request.prompt_tokens - 1) // size
                live.cached_tokens = self.cache.hit(live.block_keys[:usable]) * size
                live.held = self.cache.hold(live.block_keys[: live.cached_tokens // size])

    def _prefill_s(self, live: Live) -> float:
        rate = self.settings.prefill_tokens_per_s
        return 0.0 if rate is None else (live.request.prompt_tokens - live.cached_tokens) / rate

    def _start(self, live: Live) -> None:
        """The prompt is computed: say so, and begin its choices with their first token."""
        request = live.request
        self.counters["prompt_tokens_computed"] += request.prompt_tokens - live.cached_tokens
        self.cache.release(live.held)
        tokens = routing_tokens(request.token_ids, request.features or ())
        self.cache.store(live.block_keys, tokens, salt=request.cache_salt, adapter=request.adapter)
        live.held = self.cache.hold(live.block_keys)
        live.started = True
        self._announce(live)
        live.scope = self._scope(request)
        live.prompt_state = int(self.language.states(request.token_ids)[-1])
        if request.stream:
            self._streams[live] = None
        for sequence in live.sequences:
            sequence.labels = VersionSpans(self.version)
            sequence.segments = [(live.scope, 0)]
            sequence.started_at = self.steps.whole - 1
            self._running[sequence] = None
        for sequence in live.sequences:
            if live.over:
                return
            self._plan(sequence)
            if not request.stream and self.steps.instant:
                self._used_up(sequence)
            elif request.stream or len(sequence.draws) <= 1:
                self._deliver(sequence, self.steps.whole)

    def _announce(self, live: Live) -> None:
        live.announced = True
        live.push(
            prompt_event(live, self.language, scope=self._scope(live.request), caches=bool(self.cache.capacity_blocks))
        )

    def _plan(self, sequence: Sequence) -> None:
        """Draw more tokens, and find where the choice ends."""
        live, have = sequence.live, len(sequence.draws)
        by = live.by
        count = min(live.max_tokens - have, _DRAW_AHEAD_TOKENS)
        fault = live.fault if sequence.index == 0 else None
        if fault is not None and fault.kind not in BREACHES and have < fault.after_tokens:
            count = min(count, fault.after_tokens - have)
        elif fault is not None and fault.kind not in BREACHES and have == fault.after_tokens:
            count = 0
        if count:
            state = live.prompt_state
            if have:
                state = int(self.language.states(sequence.draws.ids, state=state)[-1])
            new = self.language.draw(
                live.scope,
                state,
                position=live.request.prompt_tokens + have,
                first=have,
                count=count,
                seed=sequence.seed,
                by=by,
            )
            if (ends := by.eos_ids | by.stop_ids) and (found := _first_of(new.ids, ends)) is not None:
                new = new.cut(0, found + 1)
                last = int(new.ids[-1])
                sequence.planned_end, sequence.finish = True, "stop"
                sequence.stop_reason = None if last in by.eos_ids else last
            sequence.draws = Draws.joined([sequence.draws, new], by) if have else new
        if not sequence.planned_end and len(sequence.draws) >= live.max_tokens:
            sequence.planned_end, sequence.finish = True, "length"
        if live.request.stream or sequence.started_at is None:
            return
        if self.steps.instant:
            sequence.started_at = self.steps.whole - len(sequence.draws)
        else:
            heapq.heappush(self._ends, (sequence.started_at + len(sequence.draws), next(self._order), sequence))

    def _finish(self, sequence: Sequence, made: int, *, reason: FinishReason) -> None:
        """Say a choice's last word, and the request's after its last choice."""
        live = sequence.live
        whole = sequence.draws.cut(0, made)
        event = ending_event(sequence, whole, reason=reason, version=self.version, router=self.router)
        sequence.done = True
        self._running.pop(sequence, None)
        self._hung.pop(sequence, None)
        self.counters["tokens"] += made
        kind = live.fault.kind if live.fault is not None and sequence.index == 0 else None
        for spoiled in [event] if kind is None else spoil_choice(kind, event):
            live.push(spoiled)
        live.floored += whole.floored() if live.by.logprobs else 0
        if not live.mixed and live.started:
            self._store_output(live, whole)
        if all(s.done for s in live.sequences):
            self._end(live)

    def _end(self, live: Live) -> None:
        if live.fault is None or live.fault.kind != "no_end":
            live.push(end_event(live))
        live.ended = True
        live.wake()
        self._leave(live)

    def _store_output(self, live: Live, made: Draws) -> None:
        """Cache the output's full blocks too, as an engine that serves the next turn of a conversation does."""
        request, size = live.request, self.settings.block_tokens
        if not self.settings.cache_blocks or (request.prompt_tokens + len(made) - 1) // size == len(live.block_keys):
            return
        tokens = np.concatenate([routing_tokens(request.token_ids, request.features or ()), made.ids[:-1]])
        keys = block_keys(tokens, block_tokens=size, salt=request.cache_salt, adapter=request.adapter)
        self.cache.store(keys, tokens, salt=request.cache_salt, adapter=request.adapter)

    def _leave(self, live: Live) -> None:
        """Give a request's place back."""
        self._streams.pop(live, None)
        for sequence in live.sequences:
            sequence.done = True
            self._running.pop(sequence, None)
            self._hung.pop(sequence, None)
        if self._prefill is not None and self._prefill[0] is live:
            self._prefill = None
        self.cache.release(live.held)
        live.held = []

    def _sequence(self, live: Live, index: int) -> Sequence:
        seed = live.request.sampling.get("seed")
        key = key_of("seed", seed + index) if seed is not None else key_of("unseeded", next(self._unseeded))
        return Sequence(live=live, index=index, seed=key, draws=Draws.empty(live.by), state=0)

    def _scope(self, request: GenerateRequest) -> int:
        """The key of everything but tokens that a token depends on."""
        adapter = self.adapters[request.adapter] if request.adapter is not None else None
        media = [(item.modality, item.mm_hash, item.offset, item.length) for item in request.features or ()]
        return key_of(self.weights_digest, adapter, repr(media) if media else None)

    def live_named(self, request_id: str | None) -> Iterator[Live]:
        """Live requests of this id (None: all)."""
        return iter([v for v in self.lives if not v.over and request_id in (None, v.request.request_id)])


def _first_of(ids: np.ndarray[tuple[int], np.dtype[np.int32]], wanted: frozenset[int]) -> int | None:
    """The first position that holds one of a few ids."""
    hits = np.isin(ids, list(wanted)) if len(wanted) > 1 else ids == next(iter(wanted))
    at = int(hits.argmax())
    return at if hits[at] else None
