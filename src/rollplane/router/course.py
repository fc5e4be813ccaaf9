"""One request's way through a router: what it has tried, and the worker that it is sent to now."""

from rollplane.protocol.request import GenerateRequest
from rollplane.router.fair_queue import Waiter
from rollplane.router.placed import Placement
from rollplane.router.prefill_pace import Ticket
from rollplane.router.worker import RoutedWorker


class Course:
    """A request from its check to its answer.

    `ends`: the moment of its deadline on the monotonic clock, None without one. `attempt`: the number of the next sending.
    `tried`: workers that failed it. `refusals`, `faults`: how often workers had another version than was known, and how often
    one failed.
    """

    __slots__ = ("attempt", "ends", "entered", "faults", "placement", "refusals", "request", "size", "tried")

    def __init__(self, request: GenerateRequest, *, ends: float | None) -> None:
        self.request = request
        self.ends = ends
        self.placement = Placement()
        self.entered: Waiter | None = None
        self.attempt = request.attempt
        self.tried: list[RoutedWorker] = []
        self.refusals = 0
        self.faults = 0
        self.size = {"sequences": request.sampling.choices, "tokens": request.prompt_tokens}

    def __repr__(self) -> str:
        return f"<Course of {self.request.request_id}: attempt {self.attempt}, {self.placement!r}>"


class Sending:
    """One attempt at one worker. `at`: when it was sent. `made`: tokens that came back so far."""

    __slots__ = ("at", "made", "predicted", "sent", "ticket", "worker")

    def __init__(
        self,
        worker: RoutedWorker,
        sent: GenerateRequest,
        *,
        ticket: Ticket | None,
        predicted: int | None,
        at: float,
    ) -> None:
        self.worker = worker
        self.sent = sent
        self.ticket = ticket
        self.predicted = predicted
        self.at = at
        self.made = 0

    def __repr__(self) -> str:
        return f"<Sending to {self.worker.url}, {self.made} tokens>"
