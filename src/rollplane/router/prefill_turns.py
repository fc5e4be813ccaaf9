"""A request's turn at a worker that has prompts enough to compute: the pace of `prefill_pace`, by what the prefix index knows."""

from rollplane.protocol.request import GenerateRequest
from rollplane.router.placed import Placement
from rollplane.router.policies import Policy
from rollplane.router.prefill_pace import PrefillPace, Ticket
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.prefix_index import PrefixIndex
from rollplane.router.worker import RoutedWorker


class PrefillTurns:
    """Turns at all workers of a router; without a policy that follows caches there are none."""

    def __init__(self, pace: PrefillPace, policy: Policy) -> None:
        self.pace = pace
        self._policy = policy

    def __repr__(self) -> str:
        return f"<PrefillTurns by {self.pace!r}>"

    @property
    def _index(self) -> PrefixIndex | None:
        return self._policy.index if isinstance(self._policy, PrefixAware) else None

    async def wait(self, request: GenerateRequest, worker: RoutedWorker, placement: Placement) -> Ticket | None:
        """Wait while the worker has prompts enough to compute; None where that is not known."""
        index = self._index
        if index is None or not isinstance(self._policy, PrefixAware) or request.attach_only:
            return None
        keys = self._policy.to_compute(request, worker)
        if keys is None:
            return None
        size = index.block_tokens
        ticket = placement.ticket = self.pace.ask(worker.url, keys, block_tokens=size)
        if ticket.sent or placement.woken.is_set():
            return ticket
        try:
            await self.pace.wait(worker.url, ticket, block_tokens=size)
        except BaseException:
            self.spent(worker, ticket)
            raise
        return ticket

    def spent(self, worker: RoutedWorker, ticket: Ticket) -> None:
        """The request has ended, or does not go to this worker."""
        if self._index is not None:
            self.pace.done(worker.url, ticket, block_tokens=self._index.block_tokens)

    def learned(self, worker: RoutedWorker) -> None:
        """The index has heard what a worker caches now."""
        index = self._index
        if index is not None:
            url = worker.url
            self.pace.learned(url, lambda keys: index.reported(url, keys), block_tokens=index.block_tokens)
