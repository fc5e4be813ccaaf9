"""Many workers as one engine: chooses, counts, holds while nobody can serve, and moves on when a worker fails.

A request moves to another worker only while nothing of its answer was handed on (unary: before the answer). A caller's
mistake is never repeated elsewhere. What was tried is in `attempt`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from rollplane.admission import check_request
from rollplane.discovery.base import Discovery
from rollplane.engines.base import MediaRenderer, close_events, whole_of
from rollplane.engines.wrappers.live import LiveRequests
from rollplane.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    PreconditionFailed,
    RollplaneError,
    ServiceError,
    Unavailable,
)
from rollplane.identity import identify
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, PromptEvent
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.rendered import RenderBody, Rendered
from rollplane.protocol.request import GenerateRequest, RequestHead
from rollplane.rl.fleet import Fleet
from rollplane.rl.members import FleetWorker, Member
from rollplane.rl.remote import RemoteWorker
from rollplane.router.addressing import addressed
from rollplane.router.cache_followers import CacheFollowers
from rollplane.router.constraints import Lineup, circuits, fitting
from rollplane.router.course import Course, Sending
from rollplane.router.fair_queue import FairQueue, QueueSettings
from rollplane.router.health import Circuit, CircuitSettings, is_fault, may_move
from rollplane.router.held import abort_events
from rollplane.router.key_homes import KeyHomes
from rollplane.router.observed import Observed
from rollplane.router.placed import Placement, RoutedRequests, Unknowing, either
from rollplane.router.policies import Policy, make_policy
from rollplane.router.prefill_pace import PaceSettings, PrefillPace
from rollplane.router.prefill_turns import PrefillTurns
from rollplane.router.report import PlacementReport, fleet_health, placement_report
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


class Router:
    """A fleet as one `Engine`.

    Args:
        fleet: the workers and what the policy is.
        policy: chooses the worker for a request; see `router.policies`.
        discovery: who the workers are, followed from `start` on. None: the caller adds them to the fleet.
        make_worker: the worker at an address that discovery names.
        clock: monotonic seconds, by which the workers' pace is measured.
        name: of the fleet, in metrics.
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
        name: str = "default",
    ) -> None:
        self.name = name
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
        self._turns = PrefillTurns(self.prefill, self.policy)
        self._caches = CacheFollowers(self.policy, on_learn=self._turns.learned)
        self._workers: dict[str, RoutedWorker] = {}
        self._lineup: Lineup | None = None
        self._lineup_at: asyncio.Event | None = None
        """`Fleet.changed` of that time."""
        self._placed: dict[str, Placement] = {}
        self.unknowing = Unknowing()
        self._live = LiveRequests(RoutedRequests(self))
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
    def reached(self) -> bool:
        """Whether the facts of its workers are known."""
        try:
            self.fleet.info  # noqa: B018 - asked for its error
        except Unavailable:
            return False
        return True

    @property
    def workers(self) -> list[RoutedWorker]:
        """The record of every member, in the fleet's order; those of members that are gone are let go."""
        return list(self._present().workers)

    def _present(self) -> Lineup:
        """The workers as they are now; the same until the fleet, a worker or a circuit told something."""
        changed = self.fleet.changed
        if self._lineup is None or self._lineup_at is not changed:
            self._lineup, self._lineup_at = Lineup(self._records()), changed
        return self._lineup

    def _circuit_changed(self) -> None:
        self._lineup_at = None

    def _records(self) -> Sequence[RoutedWorker]:
        members, before = self.fleet.members, self._lineup
        if before is not None and [worker.member for worker in before.workers] == members:
            return before.workers
        for member in members:
            known = self._workers.get(member.url)
            if known is None or known.member is not member:
                if known is not None:
                    self._caches.leave(known)
                self._workers[member.url] = self._record(member)
                self._caches.join(self._workers[member.url])
        if len(self._workers) > len(members):
            urls = {member.url for member in members}
            for url in [url for url in self._workers if url not in urls]:
                self._caches.leave(self._workers.pop(url))
        return [self._workers[member.url] for member in members]

    def _record(self, member: Member) -> RoutedWorker:
        return RoutedWorker(member, circuit=Circuit(self.settings.circuit, on_change=self._circuit_changed))

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
        queue = self.queue.report(self.name)
        return placement_report(self.policy, self.workers, self.observed, queue=queue, lag=self.fleet.lag)

    async def health(self) -> EngineHealth:
        """The fleet's health: ready as soon as one worker can take requests."""
        held = sum(placement.worker is None for placement in self._placed.values())
        return fleet_health(self.fleet, self.workers, held=held, closing=self._closing)

    async def abort(self, request_id: str) -> int:
        """End a request, wherever it is: on its worker, or held here (then without tokens)."""
        placement = self._placed.get(request_id)
        if placement is None:
            return self.unknowing.abort(request_id)
        if placement.worker is None:
            placement.aborted = True
            placement.wake()
            return 1
        return await placement.worker.member.worker.engine.abort(request_id)

    async def abort_all(self) -> int:
        """End every request that this frontend has placed or holds; how many there were."""
        unknowing = self.unknowing.abort_all()
        return unknowing + sum(await asyncio.gather(*(self.abort(request_id) for request_id in list(self._placed))))

    async def render_media(self, body: RenderBody, *, model: str | None = None) -> Rendered:
        """Let the least loaded worker process the media of a prompt; `model` is for `Models` to choose by.

        Raises:
            Unavailable: no worker can take requests.
        """
        able = [worker for worker in self.workers if worker.member.routable]
        if not able:
            raise Unavailable("no worker can take requests")
        engine = min(able, key=lambda worker: worker.load).member.worker.engine
        if not isinstance(engine, MediaRenderer):
            raise InvalidRequest("the workers make no features of raw media", param="messages")
        return await engine.render_media(body)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve one request; see `Engine.generate`. Deadlines count from here.

        Raises:
            Conflict: a live request has this id and another body.
            PreconditionFailed: no worker has the policy version; what there is, is in `details`.
            DeadlineExceeded: its own deadline passed.
            Unavailable: nobody could serve within the hold limit.
        """
        return self._live.generate(request)

    def whole(self, request: GenerateRequest) -> Coroutine[Any, Any, list[Event]]:
        """As `generate`, for a request that does not stream."""
        return self._live.whole(request)

    async def routed(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve a request that owns its id: check, choose, send, move on."""
        course = await self._begin(request)
        try:
            await self._enter(course)
            while True:
                sending = await self._place(course)
                if sending is None:
                    for event in abort_events(request, self.info, version=self.fleet.version):
                        yield event
                    return
                handed_on = False
                error: RollplaneError | None = None
                try:
                    held_back: list[Event] = []
                    events = sending.worker.member.worker.engine.generate(sending.sent)
                    try:
                        async for event in events:
                            self._count(course, sending, event)
                            if not handed_on and isinstance(event, PromptEvent):
                                held_back.append(event)  # no token yet: another worker may still take over
                                continue
                            handed_on = True
                            for earlier in held_back:
                                yield earlier
                            held_back = []
                            yield event
                    finally:
                        await close_events(events)
                    sending.worker.circuit.succeeded()
                    return
                except RollplaneError as found:
                    error = found
                finally:
                    self._leave(course, sending)
                await self._move_on(course, sending, error, handed_on=handed_on)
        finally:
            self._end(course)

    async def routed_whole(self, request: GenerateRequest) -> list[Event]:
        """As `routed`, for a request that does not stream."""
        course = await self._begin(request)
        try:
            await self._enter(course)
            while True:
                sending = await self._place(course)
                if sending is None:
                    return abort_events(request, self.info, version=self.fleet.version)
                try:
                    events = await whole_of(sending.worker.member.worker.engine, sending.sent)
                    for event in events:
                        self._count(course, sending, event)
                    sending.worker.circuit.succeeded()
                    return events
                except RollplaneError as found:
                    error = found
                finally:
                    self._leave(course, sending)
                await self._move_on(course, sending, error, handed_on=False)
        finally:
            self._end(course)

    async def _begin(self, request: GenerateRequest) -> Course:
        """Check a request and give it a placement; `_end` is owed."""
        deadline_s = request.options.deadline_s
        ends = None if deadline_s is None else time.monotonic() + deadline_s
        if request.features:
            if sum(len(item.kwargs or b"") for item in request.features) > HASHED_IN_PLACE_BYTES:
                await asyncio.to_thread(identify, request.features)
            else:
                identify(request.features)
        try:
            info = self.fleet.info
        except Unavailable:
            info = await self.known(request.head)
        check_request(request, info)
        course = Course(request, ends=ends)
        self._placed[request.request_id] = course.placement
        return course

    async def _enter(self, course: Course) -> None:
        course.entered = await self.queue.enter(course.request, ends=course.ends, woken=course.placement.woken)

    def _end(self, course: Course) -> None:
        if course.entered is not None:
            self.queue.leave(course.entered)
        request_id = course.request.request_id
        if self._placed.get(request_id) is course.placement:  # a repeat may have taken the id meanwhile
            del self._placed[request_id]

    async def _place(self, course: Course) -> Sending | None:
        """The worker to send to, with its turn taken and the request counted there (`_leave` is owed); None when the request
        was aborted before it had one.
        """
        request, placement, ends = course.request, course.placement, course.ends
        while True:
            worker = await self._choose(request, placement, ends=ends, avoid=course.tried)
            if worker is None:
                return None
            size = course.size
            worker.place(**size)
            predicted = self.policy.placed(request, worker)
            if request.idempotency_key is not None:
                try:
                    keeper = await self._keeper(request.idempotency_key, request, worker, avoid=course.tried)
                except BaseException:
                    worker.release(**size)
                    raise
                if keeper is not worker:
                    worker.release(**size)
                    worker = keeper
                    worker.place(**size)
                    predicted = self.policy.placed(request, worker)
            try:
                ticket = await self._turns.wait(request, worker, placement)
            except BaseException:
                worker.release(**size)
                raise
            if ticket is not None and (placement.woken.is_set() or not worker.member.routable):
                # It waited, and meanwhile this worker is no more the one to send to, or the request was aborted.
                worker.release(**size)
                self._turns.spent(worker, ticket)
                continue
            left_s = None if ends is None else ends - time.monotonic()
            sent = addressed(request, worker, self.fleet, attempt=course.attempt, left_s=left_s)
            placement.worker = worker
            return Sending(worker, sent, ticket=ticket, predicted=predicted, at=self._clock())

    def _count(self, course: Course, sending: Sending, event: Event) -> None:
        """Learn from what a worker says."""
        if isinstance(event, EndEvent):
            event.served_by.attempt = course.attempt
            now = self._clock()
            made = sending.made // course.request.sampling.choices
            sending.worker.pace.add(now - sending.at, tokens=made, now=now)
        elif isinstance(event, ChoiceEvent):
            sending.made += event.token_ids.size
        else:
            self.policy.answered(course.request, sending.worker)
            self.observed.add(predicted=sending.predicted, cached=event.cached_tokens)

    def _leave(self, course: Course, sending: Sending) -> None:
        course.placement.worker = None
        sending.worker.release(**course.size)
        if sending.ticket is not None:
            self._turns.spent(sending.worker, sending.ticket)

    async def _move_on(self, course: Course, sending: Sending, error: RollplaneError, *, handed_on: bool) -> None:
        """Return where the request may be sent again.

        Raises:
            RollplaneError: the error itself, where it may not.
        """
        worker = sending.worker
        if is_fault(error):
            worker.circuit.failed()
        else:
            worker.circuit.succeeded()
        if handed_on:
            raise error
        if isinstance(error, PreconditionFailed) and sending.sent.attach_only:
            course.tried.append(worker)
            return
        if isinstance(error, PreconditionFailed):
            # What we knew of it was old. The worker's own word is fetched, so this ends.
            course.refusals += 1
            await self._refresh(worker)
            if course.refusals > self.settings.max_attempts * 2:
                raise error
        elif _busy(error) or may_move(error):
            if may_move(error):
                self._look_at(worker)
            course.tried.append(worker)
            course.faults += 1
            if course.faults >= self.settings.max_attempts:
                raise error
        else:
            raise error
        course.attempt += 1

    async def known(self, head: RequestHead) -> EngineInfo:
        """The facts of the workers, without which no request can be checked. Until the first one is reached a request waits,
        and counts among those that wait for room.

        Raises:
            Overloaded: too many wait already. DeadlineExceeded: none was reached in time. Cancelled: it was aborted.
            Unavailable: none was reached within the hold limit, or the router closes.
        """
        with contextlib.suppress(Unavailable):
            return self.fleet.info
        limit = time.monotonic() + (self.settings.hold_limit_s if head.deadline_s is None else head.deadline_s)
        with self.queue.outside(head), self.unknowing.waits(head.names) as aborted:
            while True:
                if aborted.is_set():
                    raise Cancelled("the request was aborted before a worker was reached")
                changed = self.fleet.changed
                try:
                    return self.fleet.info
                except Unavailable as error:
                    left = limit - time.monotonic()
                    if self._closing or (left <= 0 and head.deadline_s is None):
                        raise
                    if left <= 0:
                        raise DeadlineExceeded(
                            f"the request could not be placed within its deadline: {error.message}",
                            param="rollplane.deadline_s",
                        ) from None
                    await either(changed, aborted, timeout_s=min(left, RECHECK_S))

    async def _choose(
        self, request: GenerateRequest, placement: Placement, *, ends: float | None, avoid: list[RoutedWorker]
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
            lineup = self._present()
            fit = fitting(request, lineup, self.fleet)
            if fit.verdict == "go":
                fresh = [worker for worker in fit.workers if worker not in avoid] if avoid else fit.workers
                if not fresh and self._looks:
                    # Only workers that have just failed are left: what the looks at them say decides.
                    await asyncio.wait(self._looks, timeout=min(RECHECK_S, max(limit - time.monotonic(), 0)))
                    avoid.clear()
                    continue
                able = fresh or fit.workers
                return self.policy.choose(request, able if lineup.steady else circuits(able))
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
            await either(changed, placement.woken, timeout_s=min(left, RECHECK_S))

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
        await either(self.fleet.changed, timeout_s=min(timeout_s, RECHECK_S))


def _busy(error: RollplaneError) -> bool:
    """A worker that cannot take it now, where another may; the request's own deadline is over everywhere."""
    return isinstance(error, ServiceError) and error.retryable
