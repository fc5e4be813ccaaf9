"""Who runs, who waits, and which prompt tokens the next step computes.

Slots 0..B-1 belong to the B decoding sequences. Prompts are computed in order, in chunks of at most `chunk_tokens` per
step, so that a long prompt does not stall the others. At most one prompt is half computed; it
sits in slot B. The n sequences of a request share one prefill.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollplane.engines.embedded.sequence import Generation, Sequence


@dataclass(eq=False)
class Job:
    """One request from arrival until its prompt is computed.

    Args:
        request: what was asked.
        sequences: its n sequences.
        slot: the slot its prompt is computed in, -1 while it waits.
        computed: prompt tokens computed so far.
    """

    request: Generation
    sequences: list[Sequence]
    slot: int = -1
    computed: int = 0


@dataclass(frozen=True, eq=False)
class Chunk:
    """Token positions [start, end) to compute in `slot`: of a job's prompt, or again for a running sequence."""

    slot: int
    start: int
    end: int
    adapter: str | None
    job: Job | None = None
    sequence: Sequence | None = None

    @property
    def tokens(self) -> int:
        """How many."""
        return self.end - self.start

    @property
    def logits(self) -> int:
        """How many of its last positions need logits."""
        if self.job is None:
            return 0
        request = self.job.request
        return self.tokens if request.prompt_logprobs is not None else int(self.end == len(request.prompt))


@dataclass
class Scheduler:
    """The queue and the running set.

    Args:
        max_slots: sequences that may run at once.
        chunk_tokens: prompt tokens computed per step at most.

    `held`: nothing new starts. `epoch` changes whenever the running set does.
    """

    max_slots: int
    chunk_tokens: int
    held: bool = False
    running: list[Sequence] = field(default_factory=list)
    partial: Job | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        self._waiting: list[tuple[int, int, Job]] = []
        self._arrivals = itertools.count()

    def __repr__(self) -> str:
        held = " held" if self.held else ""
        return (
            f"<Scheduler {len(self._waiting)} waiting, {self.prefilling} prefilling, {len(self.running)} running{held}>"
        )

    @property
    def waiting(self) -> int:
        """Requests whose prompt has not been started."""
        return len(self._waiting)

    @property
    def prefilling(self) -> int:
        """1 while a prompt is half computed."""
        return 0 if self.partial is None else 1

    @property
    def busy(self) -> bool:
        """Something holds a slot."""
        return bool(self.running) or self.partial is not None

    def requests(self) -> list[Generation]:
        """Every live request, those that hold a slot first."""
        held = list({id(s.request): s.request for s in self.running}.values())
        if self.partial is not None:
            held.append(self.partial.request)
        return held + [job.request for _, _, job in self._waiting]

    @property
    def started(self) -> int:
        """Requests that hold a slot."""
        return len({id(s.request) for s in self.running}) + self.prefilling

    def add(self, job: Job) -> None:
        """Queue a request: by priority, then by arrival."""
        heapq.heappush(self._waiting, (job.request.priority, next(self._arrivals), job))

    def remove_waiting(self, request_id: str | None) -> list[Job]:
        """Take the waiting requests of this id (None: all of them) out of the queue."""
        taken = [j for _, _, j in self._waiting if request_id is None or j.request.request_id == request_id]
        if taken:
            self._waiting = [w for w in self._waiting if w[2] not in taken]
            heapq.heapify(self._waiting)
        return taken

    def plan(self) -> list[Chunk]:
        """The chunks of the next step; running sequences that lost their keys come first and alone."""
        stale = [s for s in self.running if s.computed < s.total - 1]
        return list(self._recompute_chunks(stale) if stale else self._prompt_chunks())

    @property
    def decodable(self) -> bool:
        """Every running sequence is ready for its next token, and there is one."""
        return bool(self.running) and all(s.computed == s.total - 1 for s in self.running)

    def join(self, job: Job) -> None:
        """A prompt is complete: its sequences take the next slots and run."""
        if job is self.partial:
            self.partial = None
        first = len(self.running)
        for i, sequence in enumerate(job.sequences):
            sequence.slot = first + i
        self.running.extend(job.sequences)
        self.epoch += 1

    def leave(self, sequence: Sequence) -> tuple[int, int] | None:
        """A sequence leaves; the (source, target) slots of the one that fills its hole, None if there is no hole."""
        last = self.running.pop()
        self.epoch += 1
        if last is sequence:
            return None
        source, last.slot = last.slot, sequence.slot
        self.running[last.slot] = last
        return source, last.slot

    def _recompute_chunks(self, stale: list[Sequence]) -> Iterator[Chunk]:
        budget = self.chunk_tokens
        for s in stale:
            take = min(budget, s.total - 1 - s.computed)
            if not take:
                return
            yield Chunk(s.slot, s.computed, s.computed + take, s.request.adapter, sequence=s)
            budget -= take

    def _prompt_chunks(self) -> Iterator[Chunk]:
        budget = self.chunk_tokens
        slot = len(self.running)
        while budget:
            job = self.partial
            if job is None:
                if self.held or not self._waiting or slot + self._waiting[0][2].request.n > self.max_slots:
                    return
                job = self.partial = heapq.heappop(self._waiting)[2]
                job.slot = slot
            take = min(budget, len(job.request.prompt) - job.computed)
            yield Chunk(job.slot, job.computed, job.computed + take, job.request.adapter, job=job)
            budget -= take
            if job.computed + take < len(job.request.prompt):
                return
            # Complete after this step: the next prompt goes behind its n slots.
            self.partial = None
            slot += job.request.n


def group_by_length(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Chunks that share a forward: longest first, and in no group is one shorter than half of the longest.

    Chunks are padded to their group's longest, so that at most half of a forward is padding.
    """
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda c: -c.tokens):
        if groups and 2 * chunk.tokens >= groups[-1][0].tokens:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups
