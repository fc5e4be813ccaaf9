"""One queue for all processes of a frontend: it is the owner's; followers hold a call to it open while a request runs.

The end of the call is the end of the request, also where the process that made it was killed. Where the owner was, its
followers tell the next one what it had let in and still runs, before they ask for more.
"""

import asyncio
import contextlib
import time
from typing import Final

import aiohttp
import msgspec
from starlette.types import Send

from rollplane.errors import DeadlineExceeded, RollplaneError, TransportError
from rollplane.protocol.arrays import empty_int32
from rollplane.protocol.http import error_from_answer
from rollplane.protocol.request import GenerateRequest, RequestOptions
from rollplane.protocol.sampling import SamplingParams
from rollplane.router.fair_queue import DEFAULT_CLASS, FairQueue, QueueSettings, Waiter
from rollplane.server.crew import OWNER, QUEUE_PATH, RETRY_S, Crew, owner_gone
from rollplane.server.watch import WatchedAnswer

ADMITTED: Final = b"in"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request that wants in. `left_s`: until its deadline. `runs`: an owner that is gone let it in."""

    choices: int
    priority: int = 0
    traffic: str | None = None
    model: str | None = None
    caller: str | None = None
    left_s: float | None = None
    runs: bool = False

    def request(self) -> GenerateRequest:
        """As the queue reads it; it has no prompt."""
        return GenerateRequest(
            request_id="",
            token_ids=empty_int32(),
            sampling=SamplingParams(n=self.choices),
            model=self.model,
            priority=self.priority,
            options=RequestOptions(traffic_class=self.traffic),
            caller=self.caller,
        )


async def enter(queue: FairQueue, ask: Ask) -> Waiter:
    """Let a follower's request in, in its turn; one that runs is counted at once.

    Raises:
        Overloaded, DeadlineExceeded: see `FairQueue.enter`.
    """
    if ask.runs:
        return queue.let_in(ask.request())
    ends = None if ask.left_s is None else time.monotonic() + ask.left_s
    waiter = await queue.enter(ask.request(), ends=ends, woken=asyncio.Event())
    if waiter is None:
        raise DeadlineExceeded("the request was not let in")
    return waiter


class Admitted(WatchedAnswer):
    """The answer to a follower whose request was let in: it lasts as long as the request."""

    def __init__(self, queue: FairQueue, waiter: Waiter) -> None:
        self._queue = queue
        self._waiter = waiter

    async def send_all(self, send: Send) -> None:
        """Say that it is in, then wait for the follower to hang up."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": ADMITTED, "more_body": True})
            await asyncio.Event().wait()
        finally:
            self._queue.leave(self._waiter)


class _Call:
    """A call that is open while a request runs. `keeping`: tells another owner when this one has gone."""

    __slots__ = ("answer", "keeping")

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.keeping: asyncio.Task[None] | None = None

    def end(self) -> None:
        """The request has ended."""
        if self.keeping is not None:
            self.keeping.cancel()
        self.answer.close()


class OwnersQueue(FairQueue):
    """The owner's queue from a follower.

    Args:
        fleet: whose queue.
        wait_limit_s: how long a request without a deadline waits for an owner that is not there.
    """

    def __init__(self, crew: Crew, fleet: str, settings: QueueSettings, *, wait_limit_s: float) -> None:
        super().__init__(settings)
        self._crew = crew
        self._path = QUEUE_PATH + fleet
        self._wait_limit_s = wait_limit_s
        self._calls: dict[Waiter, _Call] = {}
        self._untold: set[Waiter] = set()
        """What was let in by an owner that is gone, and no other knows of yet."""

    def __repr__(self) -> str:
        return f"<OwnersQueue {len(self._calls)} let in>"

    async def enter(self, request: GenerateRequest, *, ends: float | None, woken: asyncio.Event) -> Waiter | None:
        """Wait for room at the owner; see `FairQueue.enter`."""
        name = request.options.traffic_class or DEFAULT_CLASS
        waiter = Waiter(request.sampling.choices, traffic=name, caller=request.caller)
        call = asyncio.ensure_future(self._let_in(request, ends=ends))
        woke = asyncio.ensure_future(woken.wait())
        try:
            await asyncio.wait({call, woke}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return None
            made = self._calls[waiter] = _Call(call.result())
            made.keeping = asyncio.create_task(self._keep(waiter, made, request), name="let in by the owner")
            self.running += waiter.sequences
            return waiter
        finally:
            woke.cancel()
            if waiter not in self._calls:
                call.cancel()
                [found] = await asyncio.gather(call, return_exceptions=True)
                if isinstance(found, aiohttp.ClientResponse):
                    found.close()

    def leave(self, waiter: Waiter) -> None:
        """The request has ended."""
        self._calls.pop(waiter).end()
        self._untold.discard(waiter)
        self.running -= waiter.sequences

    async def _keep(self, waiter: Waiter, call: _Call, request: GenerateRequest) -> None:
        """Wait for the end of the owner, and tell the next one; for as long as the request runs."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await call.answer.content.read()
            self._untold.add(waiter)
            ask = self._ask(request, ends=None, runs=True)
            while waiter in self._untold:
                try:
                    call.answer = await self._call(ask)
                    self._untold.discard(waiter)
                except RollplaneError:
                    await asyncio.sleep(RETRY_S)

    @staticmethod
    def _ask(request: GenerateRequest, *, ends: float | None, runs: bool = False) -> Ask:
        return Ask(
            choices=request.sampling.choices,
            priority=request.priority,
            traffic=request.options.traffic_class,
            model=request.model,
            caller=request.caller,
            left_s=None if ends is None else max(ends - time.monotonic(), 0.0),
            runs=runs,
        )

    async def _let_in(self, request: GenerateRequest, *, ends: float | None) -> aiohttp.ClientResponse:
        limit = time.monotonic() + self._wait_limit_s if ends is None else ends
        while True:
            try:
                if self._untold:
                    raise TransportError("the owner of the queue is gone and does not know yet what runs")
                return await self._call(self._ask(request, ends=ends))
            except TransportError as error:
                if time.monotonic() >= limit:
                    raise owner_gone(error) from None
            await asyncio.sleep(RETRY_S)

    async def _call(self, ask: Ask) -> aiohttp.ClientResponse:
        url = f"http://process-{OWNER}{self._path}"
        answer: aiohttp.ClientResponse | None = None
        try:
            body, unlimited = msgspec.json.encode(ask), aiohttp.ClientTimeout(total=None)
            answer = await self._crew.session(OWNER).post(url, data=body, timeout=unlimited)
            if answer.status != 200:
                raise error_from_answer(answer.status, await answer.read(), answer.headers, url=url)
            if await answer.content.readexactly(len(ADMITTED)) != ADMITTED:
                raise TransportError("the owner of the queue says something else than that the request is in")
            return answer
        except BaseException as error:
            if answer is not None:
                answer.close()
            if isinstance(error, (aiohttp.ClientError, OSError, EOFError)) and not isinstance(error, RollplaneError):
                raise TransportError(f"the owner of the queue does not answer: {error!r}") from error
            raise
