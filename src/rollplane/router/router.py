"""Many workers as one engine: chooses, counts, holds while nobody can serve, and moves on when a worker fails.

A request moves to another worker only while nothing of its answer was handed on (unary: before the answer). A caller's
mistake is never repeated elsewhere. What was tried is in `attempt`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final

import msgspec

from rollplane.admission import check_request
from rollplane.discovery.base import Discovery
from rollplane.engines.wrappers.live import LiveRequests
from rollplane.errors import (
    DeadlineExceeded,
    PreconditionFailed,
    RollplaneError,
    ServiceError,
    Unavailable,
)
from rollplane.identity import identify
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, PromptEvent
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest
from rollplane.rl.fleet import Fleet
from rollplane.rl.members import FleetWorker
from rollplane.rl.remote import RemoteWorker
from rollplane.router.cache_followers import CacheFollowers
from rollplane.router.constraints import circuits, fitting
from rollplane.router.fair_queue import FairQueue, QueueSettings, Waiter
from rollplane.router.health import Circuit, CircuitSettings, is_fault, may_move
from rollplane.router.held import abort_events
from rollplane.router.key_homes import KeyHomes
from rollplane.router.observed import Observed
from rollplane.router.policies import Policy, make_policy
from rollplane.router.prefill_pace import PaceSettings, PrefillPace, Ticket
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.report import PlacementReport, placement_report
from rollplane.router.worker import RoutedWorker

HASHED_IN_PLACE_BYTES: Final = 256 * 1024
"""Media above this are hashed off the event loop: hashing costs about a millisecond per megabyte."""

RECHECK_S: Final = 1.0
"""A held request looks again this often even where nothing was told: circuits close by time."""


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`hold_limit_s`: how long a request without a deadline waits while nobody can serve. `max_attempts`: workers tried
    after faults. `circuit`: when a worker is left out. `queue`: how much is let in at once.
    `prefill`: how much uncached prompt a worker is sent at a time.
    """

    hold_limit_s: float = 600.0
    max_attempts: int = 4
    circuit: CircuitSettings = msgspec.field(default_factory=CircuitSettings)
    queue: QueueSettings = msgspec.field(default_factory=QueueSettings)
    prefill: PaceSettings = msgspec.field(default_factory=PaceSettings)


class _Placement:
    """Where one request is: on a worker, or held (None)."""

    __slots__ = ("aborted", "ticket", "woken", "worker")

    def __init__(self) -> None:
        self.worker: RoutedWorker | None = None
        self.ticket: Ticket | None = None
        self.aborted = False
        self.woken = asyncio.Event()

    def wake(self) -> None:
        """End its wait, whatever it waits for."""
        self.woken.set()
        if self.ticket is not None:
            self.ticket.wake()


class Router:
    """A fleet as one `Engine`.

    Args:
        fleet: the workers and what the policy is.
        policy: the order in which workers are tried; see `router.policies`.
        discovery: who the workers are, followed from `start` on. None: the caller adds them to the fleet.
        make_worker: the worker at an address that discovery names.
        clock: monotonic seconds, by which the workers' pace is measured.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        policy: Policy | None = None,
        settings: RouterSettings | None = None,
        discovery: Discovery | None = None,
        make_worker: Callable[[str], FleetWorker] = RemoteWorker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.fleet = fleet
        self._discovery = discovery
        self._make_worker = make_worker
        self._follower: asyncio.Task[None] | None = None
        self._looks: set[asyncio.Task[None]] = set()
        self.policy = policy or make_policy()
        self.settings = settings or RouterSettings()
        self.observed = Observed()
        self.queue = FairQueue(self.settings.queue, clock=clock)
        self._keys = KeyHomes(clock=clock)
        self.prefill = PrefillPace(self.settings.prefill, clock=clock)
        self._caches = CacheFollowers(self.policy, on_learn=self._learned)
        self._workers: dict[str, RoutedWorker] = {}
        self._placed: dict[str, _Placement] = {}
        self._live = LiveRequests(_Routed(self))
        self._closing = False

    def __repr__(self) -> str:
        held = sum(placement.worker is None for placement in self._placed.values())
        routable = sum(member.routable for member in self.fleet.members)
        return (
            f"<Router {routable}/{len(self.fleet.members)} workers at {self.fleet.version or '?'}, "
            f"{len(self._placed) - held} placed, {held} held, {self.policy!r}>"
        )

    @property
    def info(self) -> EngineInfo:
        """The merged facts of the workers.

        Raises:
            Unavailable: none was reached yet.
        """
        return self.fleet.info

    @property
    def workers(self) -> list[RoutedWorker]:
        """The record of every member, in the fleet's order; those of members that are gone are let go."""
        members = self.fleet.members
        for member in members:
            known = self._workers.get(member.url)
            if known is None or known.member is not member:
                if known is not None:
                    self._caches.leave(known)
                self._workers[member.url] = RoutedWorker(member, circuit=Circuit(self.settings.circuit))
                self._caches.join(self._workers[member.url])
        if len(self._workers) > len(members):
            urls = {member.url for member in members}
            for url in [url for url in self._workers if url not in urls]:
                self._caches.leave(self._workers.pop(url))
        return [self._workers[member.url] for member in members]

    async def start(self) -> None:
        """Follow discovery; workers join as they are reached, and requests wait for them."""
        if self._discovery is not None and self._follower is None:
            self._follower = asyncio.get_running_loop().create_task(self._follow(self._discovery), name="discovery")

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Refuse new requests, let those that are placed finish within `grace_s`, end the rest."""
        self._closing = True
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        if grace_s > 0:
            ends = time.monotonic() + grace_s
            while self._placed and (left := ends - time.monotonic()) > 0:
                await self._something(left)
        for placement in list(self._placed.values()):
            placement.wake()
        for look in list(self._looks):
            look.cancel()
        await self._caches.close()
        await self.fleet.close()

    async def _follow(self, discovery: Discovery) -> None:
        async for urls in discovery.watch():
            self.fleet.set_workers(urls, self._make_worker)
            self.workers  # noqa: B018 - their caches are followed from now on

    def placement(self) -> PlacementReport:
        """Each worker's load and cache as placement sees them now."""
        return placement_report(self.policy, self.workers, self.observed, lag=self.fleet.lag)

    async def health(self) -> EngineHealth:
        """The fleet's health: ready as soon as one worker can take requests."""
        workers = self.workers
        told = [w.member.worker.state.health for w in workers if w.member.worker.state is not None]
        running, waiting = sum(h.running for h in told), sum(h.waiting for h in told)
        held = sum(placement.worker is None for placement in self._placed.values())
        counters = {"workers": len(workers), "held": held}
        if self._closing:
            return EngineHealth(
                alive=True, state="draining", running=running, waiting=waiting + held, counters=counters
            )
        if self.fleet.held_for is not None:
            state = EngineHealth(alive=True, state="paused" if self.fleet.paused else "updating")
        elif any(w.member.routable for w in workers):
            state = EngineHealth(alive=True, state="ready")
        elif any(h.state in ("paused", "pausing") for h in told):
            state = EngineHealth(alive=True, state="paused")
        else:
            state = EngineHealth(alive=bool(told), state="starting", reason="no worker can take requests")
        return msgspec.structs.replace(
            state,
            running=running,
            waiting=waiting + held,
            last_progress_s=max((h.last_progress_s for h in told), default=0.0),
            counters=counters,
        )

    async def abort(self, request_id: str) -> int:
        """End a request, wherever it is: on its worker, or held here (then without tokens)."""
        placement = self._placed.get(request_id)
        if placement is None:
            return 0
        if placement.worker is None:
            placement.aborted = True
            placement.wake()
            return 1
        return await placement.worker.member.worker.engine.abort(request_id)

    async def abort_all(self) -> int:
        """End every request that this frontend has placed or holds; how many there were."""
        return sum(await asyncio.gather(*(self.abort(request_id) for request_id in list(self._placed))))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve one request; see `Engine.generate`. Deadlines count from here.

        Raises:
            Conflict: a live request has this id and another body.
            PreconditionFailed: no worker has the policy version; what there is, is in `details`.
            DeadlineExceeded: its own deadline passed.
            Unavailable: nobody could serve within the hold limit.
        """
        return self._live.generate(request)

    async def routed(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve a request that owns its id: check, choose, send, move on."""
        deadline_s = request.options.deadline_s
        ends = None if deadline_s is None else time.monotonic() + deadline_s
        if sum(len(item.kwargs or b"") for item in request.features or ()) > HASHED_IN_PLACE_BYTES:
            await asyncio.to_thread(identify, request.features)
        else:
            identify(request.features)
        await self._until_known(ends)
        check_request(request, self.info)
        placement = self._placed[request.request_id] = _Placement()
        entered: Waiter | None = None
        attempt = request.attempt
        tried: list[RoutedWorker] = []
        refusals, faults = 0, 0
        try:
            entered = await self.queue.enter(request, ends=ends, woken=placement.woken)
            while True:
                worker = await self._choose(request, placement, ends=ends, avoid=tried)
                if worker is None:
                    for event in abort_events(request, self.info, version=self.fleet.version):
                        yield event
                    return
                size = {"sequences": request.sampling.choices, "tokens": request.prompt_tokens}
                worker.place(**size)
                predicted = self.policy.placed(request, worker)
                if request.idempotency_key is not None:
                    try:
                        keeper = await self._keeper(request.idempotency_key, request, worker, avoid=tried)
                    except BaseException:
                        worker.release(**size)
                        raise
                    if keeper is not worker:
                        worker.release(**size)
                        worker = keeper
                        worker.place(**size)
                        predicted = self.policy.placed(request, worker)
                ticket: Ticket | None = None
                try:
                    ticket = await self._turn(request, worker, placement)
                except BaseException:
                    worker.release(**size)
                    raise
                if ticket is not None and (placement.woken.is_set() or not worker.member.routable):
                    # It waited, and meanwhile this worker is no more the one to send to, or the request was aborted.
                    worker.release(**size)
                    self._spent(worker, ticket)
                    continue
                sent = self._addressed(request, worker, attempt=attempt, ends=ends)
                if request.idempotency_key is not None and not worker.member.routable:
                    sent.attach_only = True
                placement.worker = worker
                sent_at, made = self._clock(), 0
                handed_on = False
                error: RollplaneError | None = None
                try:
                    held_back: list[Event] = []
                    events = worker.member.worker.engine.generate(sent)
                    try:
                        async for event in events:
                            if isinstance(event, EndEvent):
                                event.served_by.attempt = attempt
                                now = self._clock()
                                worker.pace.add(now - sent_at, tokens=made // request.sampling.choices, now=now)
                            elif isinstance(event, ChoiceEvent):
                                made += event.token_ids.size
                            else:
                                self.policy.answered(request, worker)
                                self.observed.add(predicted=predicted, cached=event.cached_tokens)
                            if not handed_on and isinstance(event, PromptEvent):
                                held_back.append(event)  # no token yet: another worker may still take over
                                continue
                            handed_on = True
                            for earlier in held_back:
                                yield earlier
                            held_back = []
                            yield event
                    finally:
                        await _close(events)
                    worker.circuit.succeeded()
                    return
                except RollplaneError as found:
                    error = found
                finally:
                    placement.worker = None
                    worker.release(**size)
                    if ticket is not None:
                        self._spent(worker, ticket)
                if is_fault(error):
                    worker.circuit.failed()
                else:
                    worker.circuit.succeeded()
                if handed_on:
                    raise error
                if isinstance(error, PreconditionFailed) and sent.attach_only:
                    tried.append(worker)
                    continue
                if isinstance(error, PreconditionFailed):
                    # What we knew of it was old. The worker's own word is fetched, so this ends.
                    refusals += 1
                    await self._refresh(worker)
                    if refusals > self.settings.max_attempts * 2:
                        raise error
                elif _busy(error) or may_move(error):
                    if may_move(error):
                        self._look_at(worker)
                    tried.append(worker)
                    faults += 1
                    if faults >= self.settings.max_attempts:
                        raise error
                else:
                    raise error
                attempt += 1
        finally:
            if entered is not None:
                self.queue.leave(entered)
            if self._placed.get(request.request_id) is placement:  # a repeat may have taken the id meanwhile
                del self._placed[request.request_id]

    async def _until_known(self, ends: float | None) -> None:
        """Wait for the first worker's facts, without which no request can be checked.

        Raises:
            Unavailable: none was reached in time.
        """
        limit = time.monotonic() + self.settings.hold_limit_s if ends is None else ends
        while True:
            changed = self.fleet.changed
            try:
                self.fleet.info  # noqa: B018 - asked for its error
            except Unavailable:
                left = limit - time.monotonic()
                if left <= 0 or self._closing:
                    raise
                await _either(changed, timeout_s=min(left, RECHECK_S))
            else:
                return

    async def _choose(
        self, request: GenerateRequest, placement: _Placement, *, ends: float | None, avoid: list[RoutedWorker]
    ) -> RoutedWorker | None:
        """The worker to send to, waited for; None when the request was aborted meanwhile.

        Raises:
            RollplaneError: nobody can serve it, or not in time.
        """
        limit = time.monotonic() + self.settings.hold_limit_s if ends is None else ends
        while True:
            if self._closing:
                raise Unavailable("this router is closing")
            if placement.aborted:
                return None
            changed = self.fleet.changed
            fit = fitting(request, self.workers, self.fleet)
            if fit.verdict == "go":
                fresh = [worker for worker in fit.workers if worker not in avoid]
                if not fresh and self._looks:
                    # Only workers that have just failed are left: what the looks at them say decides.
                    await asyncio.wait(self._looks, timeout=min(RECHECK_S, max(limit - time.monotonic(), 0)))
                    avoid.clear()
                    continue
                candidates = circuits(fresh or fit.workers)
                return self.policy.order(request, candidates)[0]
            if fit.verdict == "refuse":
                raise fit.error
            left = limit - time.monotonic()
            if left <= 0:
                if isinstance(fit.error, PreconditionFailed) or ends is None:
                    raise fit.error
                raise DeadlineExceeded(
                    f"the request could not be placed within its deadline: {fit.error.message}",
                    param="rollplane.deadline_s",
                )
            await _either(changed, placement.woken, timeout_s=min(left, RECHECK_S))

    async def _turn(self, request: GenerateRequest, worker: RoutedWorker, placement: "_Placement") -> Ticket | None:
        """Wait while the worker has prompts enough to compute; None where that is not known."""
        policy = self.policy
        if not isinstance(policy, PrefixAware) or policy.index is None or request.attach_only:
            return None
        keys = policy.to_compute(request, worker)
        if keys is None:
            return None
        size = policy.index.block_tokens
        ticket = placement.ticket = self.prefill.ask(worker.url, keys, block_tokens=size)
        if ticket.sent or placement.woken.is_set():
            return ticket
        try:
            await self.prefill.wait(worker.url, ticket, block_tokens=size)
        except BaseException:
            self._spent(worker, ticket)
            raise
        return ticket

    def _spent(self, worker: RoutedWorker, ticket: Ticket) -> None:
        index = self.policy.index if isinstance(self.policy, PrefixAware) else None
        if index is not None:
            self.prefill.done(worker.url, ticket, block_tokens=index.block_tokens)

    def _learned(self, worker: RoutedWorker) -> None:
        index = self.policy.index if isinstance(self.policy, PrefixAware) else None
        if index is not None:
            url = worker.url
            self.prefill.learned(url, lambda keys: index.reported(url, keys), block_tokens=index.block_tokens)

    async def _keeper(
        self, key: str, request: GenerateRequest, chosen: RoutedWorker, *, avoid: list[RoutedWorker]
    ) -> RoutedWorker:
        """The worker that has a key's request or answer already, where it can be asked; else the chosen one, from now on."""
        workers = self.workers
        url = await self._keys.claim(key, chosen.url, workers=workers)
        if url == chosen.url:
            return chosen
        for worker in workers:
            # Also one that takes no requests now, say because it is behind: it gives what it has.
            if worker.url == url and worker not in avoid and worker.member.worker.reachable:
                return worker
        await self._keys.claim(key, chosen.url, workers=workers, instead_of=url)
        return chosen

    def _addressed(
        self, request: GenerateRequest, worker: RoutedWorker, *, attempt: int, ends: float | None
    ) -> GenerateRequest:
        """The request as this worker gets it: its version as a precondition, and the time that is left."""
        options = request.options
        changes: dict[str, float | None] = {}
        if ends is not None:
            changes["deadline_s"] = max(ends - time.monotonic(), 0.001)
        for name in ("min_policy_version", "max_policy_lag"):
            # The fleet's to judge: a worker does not know the order of versions it never had.
            if getattr(options, name) is not None:
                changes[name] = None
        if changes:
            options = msgspec.structs.replace(options, **changes)
        return msgspec.structs.replace(
            request,
            options=options,
            attempt=attempt,
            expects_policy_version=self._expected(request, worker),
            caller=None,  # of no use to a worker
        )

    def _expected(self, request: GenerateRequest, worker: RoutedWorker) -> str | None:
        options = request.options
        bounded = options.min_policy_version or options.policy_version or options.max_policy_lag is not None
        if self.fleet.checkpoint is not None or bounded:
            return worker.version
        return None  # workers are only observed: whatever it has is right

    @staticmethod
    async def _refresh(worker: RoutedWorker) -> None:
        try:
            await worker.member.worker.refresh()
        except RollplaneError:
            worker.circuit.failed()

    def _look_at(self, worker: RoutedWorker) -> None:
        """Find out beside the request whether a worker that failed is still there."""
        look = asyncio.get_running_loop().create_task(self._refresh(worker), name=f"look at {worker.url}")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _something(self, timeout_s: float) -> None:
        await _either(self.fleet.changed, timeout_s=min(timeout_s, RECHECK_S))


class _Routed:
    """The router under its own live-request table."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def __repr__(self) -> str:
        return repr(self._router)

    @property
    def info(self) -> EngineInfo:
        return self._router.info

    async def start(self) -> None:
        return

    async def close(self, *, grace_s: float = 0.0) -> None:
        return

    async def abort(self, request_id: str) -> int:
        return await self._router.abort(request_id)

    async def health(self) -> EngineHealth:
        return await self._router.health()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        return self._router.routed(request)


def _busy(error: RollplaneError) -> bool:
    """A worker that cannot take it now, where another may; the request's own deadline is over everywhere."""
    return isinstance(error, ServiceError) and error.retryable


async def _close(events: AsyncIterator[Event]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


async def _either(*events: asyncio.Event, timeout_s: float) -> None:
    """Return when one of the events is set, or after `timeout_s`."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
