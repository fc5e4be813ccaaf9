"""Placement that knows prefixes, groups and sessions, and to which load comes first. Pure: no I/O, decides and counts.

A worker is a candidate only while its load, with the request, stays within a cap over the mean. So a long common prefix, a
sticky session or a group never overloads a worker. Among the candidates the least work wins, counted in prompt tokens:
what the worker would have to compute of this prompt, part of what it still has to compute for others, and a little for
each sequence it runs. A worker that is slower per token than the others counts as more loaded by as much.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import structlog

from rollplane.identity import engine_salt, routing_tokens
from rollplane.protocol.kv_events import KvBatch
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.state import WorkerState
from rollplane.router.known_keys import KnownKeys
from rollplane.router.pace import slowdowns
from rollplane.router.prefix_index import CAPACITY_BLOCKS, PREDICTED_S, PrefixIndex
from rollplane.router.worker import Candidates, RoutedWorker

log = structlog.get_logger("rollplane.router")

MAX_REMEMBERED: Final = 65_536
"""Sessions, and groups, whose last worker is remembered; the longest unused go first."""
SLOWDOWNS_EVERY_S: Final = 0.5
LEAVES_AT: Final = 2.0
"""Times slower per token, from which a worker keeps neither its sessions nor what only its cache would bring it: what it
would save of a prompt, it loses while it makes the answer.
"""
OVER_THE_CAP: Final = 1e12
"""Prompt tokens; more than any cost."""


class PrefixAwareSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the terms weigh.

    `load_factor`, `load_slack`: the cap is the mean load times the factor, or the mean plus the slack where that is more;
    the slack, in sequences, is at most an eighth of a worker's slots. `sequence_tokens`: what one running sequence
    counts, in prompt tokens. `pending_share`: how much of a prompt token that others wait for counts. `slot_tokens`: what
    each sequence more than a worker has slots counts, in prompt tokens: it would wait for another to end.
    `capacity_blocks`, `predicted_s`: see `PrefixIndex`.
    """

    load_factor: float = 1.25
    load_slack: int = 16
    sequence_tokens: float = 64.0
    pending_share: float = 0.5
    slot_tokens: float = 1024.0
    capacity_blocks: int = CAPACITY_BLOCKS
    predicted_s: float = PREDICTED_S


class _Seen:
    """What was read from a worker's state, until there is another state."""

    __slots__ = ("adapters", "comparable", "salt_scope", "says_events", "slots", "state", "told", "url")

    def __init__(self, url: str, state: WorkerState | None, *, comparable: bool) -> None:
        self.url = url
        self.state = state
        self.comparable = comparable
        self.salt_scope: str | None = None
        self.adapters: dict[str, str] = {}
        self.says_events = False
        self.slots = 1
        self.told = 0
        """Sequences it said it has."""
        if state is None:
            return
        self.salt_scope = state.salt_scope
        self.adapters = {record.name: record.engine_name for record in state.adapters if record.state == "ready"}
        self.says_events = state.info.capabilities.kv_events
        self.slots = state.info.max_num_seqs
        self.told = state.health.running + state.health.waiting


class _Board:
    """What a choice reads of some workers, by their place among them.

    Args:
        seens: what each told last.
    """

    __slots__ = ("adapters", "least_slots", "place", "scopes", "seens", "slots", "told", "workers")

    def __init__(self, workers: Sequence[RoutedWorker], seens: Sequence[_Seen]) -> None:
        self.workers = workers
        self.seens = seens
        self.place = {seen.url: at for at, seen in enumerate(seens)}
        self.told = [seen.told for seen in seens]
        self.slots = [seen.slots for seen in seens]
        self.least_slots = min(self.slots)
        self.adapters = {name for seen in seens for name in seen.adapters}
        self.scopes: dict[str | None, dict[_Scope, set[str]]] = {}

    def loads(self) -> list[float]:
        """Sequences in flight of each: ours at once, others' as it told."""
        return [
            ours if (ours := worker.sequences) > told else told
            for worker, told in zip(self.workers, self.told, strict=True)
        ]


_Scope = tuple[str | None, str | None]
"""What keys depend on beside tokens: what scopes the salt, and the adapter's engine-side name."""


class _Prompt:
    """One request's keys and matches, by scope; kept from the choice to the placement."""

    __slots__ = ("request", "scopes")

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.scopes: dict[_Scope, tuple[list[int], dict[str, int]]] = {}


class PrefixAware:
    """A `Policy`; see the module.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, settings: PrefixAwareSettings | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings or PrefixAwareSettings()
        self.index: PrefixIndex | None = None
        """Made when the first worker with a block cache is seen, with its block size."""
        self._clock = clock
        self._seen: dict[RoutedWorker, _Seen] = {}
        self._board: _Board | None = None
        self._sessions = _Recent()
        self._groups = _Recent()
        self._prompt: _Prompt | None = None
        self._known = KnownKeys()
        self._slowdowns: dict[RoutedWorker, float] = {}
        self._slowdowns_until = 0.0
        self._left: set[str] = set()
        """The workers that are so slow that nothing holds their sessions and groups."""
        self._turn = 0

    def __repr__(self) -> str:
        return f"<PrefixAware {self.index!r}, {len(self._sessions)} sessions, {len(self._groups)} groups>"

    def choose(self, request: GenerateRequest, workers: Sequence[RoutedWorker]) -> RoutedWorker:
        """See `Policy.choose`."""
        options, settings = request.options, self.settings
        prompt = self._prompt = _Prompt(request)
        sequences = request.sampling.choices
        board = self._looked_at(workers)
        place, loads = board.place, self._loads(board)
        slack = max(min(settings.load_slack, board.least_slots // 8), sequences)
        mean = (sum(loads) + sequences) / len(loads)
        cap = max(mean * settings.load_factor, mean + slack) - sequences
        left = self._left
        if left and left.issuperset(place):
            left = set()  # there is none to leave for
        # What a choice would cost, but for what it would cost everywhere: the prompt.
        per_sequence, per_slot, index = settings.sequence_tokens, settings.slot_tokens, self.index
        costs = [per_sequence * load for load in loads]
        if index is not None:
            if _reads_cache(request):
                self._credit(costs, board, prompt, index, left)
            for url, tokens in index.pending_tokens().items():
                if (at := place.get(url)) is not None:
                    costs[at] += settings.pending_share * tokens
        most = max(loads)
        if most + sequences > board.least_slots:
            for at, (load, slots) in enumerate(zip(loads, board.slots, strict=True)):
                if load + sequences > slots:
                    costs[at] += per_slot * (load + sequences - slots)
        group, session = self._groups.get(options.group_id), self._sessions.get(options.session_id)
        if group in place and group not in left:
            costs[place[group]] -= per_sequence * slack
        if session in place and session not in left:
            costs[place[session]] = float("-inf")
        if most > cap:
            # Over the cap by load only, under it by cost.
            costs = [cost if load <= cap else OVER_THE_CAP + load for load, cost in zip(loads, costs, strict=True)]
        # Among equals one after the other.
        self._turn = first = (self._turn + 1) % len(costs)
        least = min(costs)
        return workers[costs.index(least, first) if least in costs[first:] else costs.index(least)]

    def placed(self, request: GenerateRequest, worker: RoutedWorker) -> int | None:
        """See `Policy.placed`: the worker will have this prompt, its group and its session."""
        self._sessions.put(request.options.session_id, worker.url)
        self._groups.put(request.options.group_id, worker.url)
        seen, index = self._look(worker), self.index
        if index is None or not seen.comparable or request.content_parts:
            return None
        prompt = self._prompt if self._prompt is not None and self._prompt.request is request else _Prompt(request)
        self._prompt = prompt
        keys, depths = self._keys(index, prompt, self._scope(request, seen))
        depth = depths.get(worker.url, 0)
        index.predict(worker.url, keys, depth=depth)
        return min(depth, _usable(request, index)) * index.block_tokens if _reads_cache(request) else 0

    def to_compute(self, request: GenerateRequest, worker: RoutedWorker) -> Sequence[int] | None:
        """The blocks of a prompt that a worker has not reported; None where it would not tell when it has them."""
        seen, index = self._look(worker), self.index
        if index is None or not seen.comparable or not seen.says_events or request.content_parts:
            return None
        if not _reads_cache(request):
            return None
        prompt = self._prompt if self._prompt is not None and self._prompt.request is request else _Prompt(request)
        return index.unreported(worker.url, self._keys(index, prompt, self._scope(request, seen))[0])

    def answered(self, request: GenerateRequest, worker: RoutedWorker) -> None:
        """See `Policy.answered`: a worker that says no events has what it computed, as far as anyone can tell."""
        seen, index = self._look(worker), self.index
        if index is None or not seen.comparable or seen.says_events or request.content_parts:
            return
        index.assume(worker.url, self._hashed(index, request, self._scope(request, seen)))

    def learn(self, worker: RoutedWorker, batch: KvBatch) -> None:
        """See `Policy.learn` and `PrefixIndex.apply`."""
        self._look(worker)
        if self.index is not None:
            self.index.apply(worker.url, batch)

    def forget(self, worker: RoutedWorker) -> None:
        """See `Policy.forget`."""
        self._seen.pop(worker, None)
        self._board = None
        if self._slowdowns.pop(worker, 1.0) >= LEAVES_AT:
            self._left.discard(worker.url)
        if self.index is not None:
            self.index.remove_worker(worker.url)

    def lost_track(self, worker: RoutedWorker) -> None:
        """See `Policy.lost_track`."""
        if self.index is not None:
            self.index.drop_worker(worker.url)

    # -- keys ------------------------------------------------------------------------------------------------------

    def _look(self, worker: RoutedWorker) -> _Seen:
        """The worker's state as it was last told; what is known of its cache is dropped where that may be gone."""
        state = worker.member.worker.state
        seen = self._seen.get(worker)
        if seen is not None and seen.state is state:
            return seen
        if state is None or worker.member.state == "gone":
            # One that is gone may still answer what it had: it is not taken up again, nor is another of its address dropped.
            return seen or _Seen(worker.url, None, comparable=False)
        block_tokens = state.info.block_tokens
        if self.index is None and block_tokens is not None:
            settings = self.settings
            self.index = PrefixIndex(
                block_tokens=block_tokens,
                capacity_blocks=settings.capacity_blocks,
                predicted_s=settings.predicted_s,
                clock=self._clock,
            )
        index = self.index
        comparable = index is not None and block_tokens == index.block_tokens
        if index is not None:
            index.observe(worker.url, instance=state.instance, generation=state.cache_generation)
            if seen is None and block_tokens is not None and not comparable:
                log.warning(
                    "block_size_differs", worker=worker.url, block_tokens=block_tokens, others=index.block_tokens
                )
        seen = self._seen[worker] = _Seen(worker.url, state, comparable=comparable)
        return seen

    @staticmethod
    def _scope(request: GenerateRequest, seen: _Seen) -> _Scope:
        return seen.salt_scope, seen.adapters.get(request.model) if request.model is not None else None

    def _credit(self, costs: list[float], board: _Board, prompt: _Prompt, index: PrefixIndex, left: set[str]) -> None:
        """Take from each worker's cost the prompt tokens that it would read from its cache.

        What all of them would is left out: it changes no choice.
        """
        request = prompt.request
        usable, size, place = _usable(request, index), index.block_tokens, board.place
        scopes = self._scopes(request, board)
        for scope, members in scopes.items():
            depths = self._keys(index, prompt, scope)[1]
            common = 0
            if len(depths) == index.worker_count and len(members) == len(place) and not left:
                common = next(iter(depths.values()))
            deeper = [(url, depth) for url, depth in depths.items() if depth != common]
            least = min(common, usable)
            for url, depth in deeper:
                if url in members and url not in left:
                    costs[place[url]] -= (min(depth, usable) - least) * size

    def _scopes(self, request: GenerateRequest, board: _Board) -> dict[_Scope, set[str]]:
        """The workers whose caches can be compared, by what their keys of a request depend on."""
        name = request.model if request.model in board.adapters else None
        known = board.scopes.get(name)
        if known is None:
            known = board.scopes[name] = {}
            for seen in board.seens:
                if seen.comparable:
                    known.setdefault(self._scope(request, seen), set()).add(seen.url)
        return known

    def _keys(self, index: PrefixIndex, prompt: _Prompt, scope: _Scope) -> tuple[list[int], dict[str, int]]:
        """The prompt's keys in a scope, and how many leading ones each worker has."""
        known = prompt.scopes.get(scope)
        if known is None:
            keys = self._hashed(index, prompt.request, scope)
            known = prompt.scopes[scope] = (keys, index.match(keys))
        return known

    def _hashed(self, index: PrefixIndex, request: GenerateRequest, scope: _Scope) -> list[int]:
        """The keys of a prompt in a scope; none of one with raw media, whose final form is not known here."""
        if request.content_parts:
            return []
        salt_scope, adapter = scope
        return self._known.of(
            routing_tokens(request.token_ids, request.features or ()),
            block_tokens=index.block_tokens,
            salt=engine_salt(request.cache_salt, scope=salt_scope),
            adapter=adapter,
        )

    # -- load ------------------------------------------------------------------------------------------------------

    def _looked_at(self, workers: Sequence[RoutedWorker]) -> _Board:
        """What the workers told last; looked at anew unless they are known to have told nothing since."""
        board = self._board
        if board is None or board.workers is not workers or not isinstance(workers, Candidates):
            board = self._board = _Board(workers, [self._look(worker) for worker in workers])
        return board

    def _loads(self, board: _Board) -> list[float]:
        """Sequences in flight of each worker, counted as more where it is slower than the others."""
        now = self._clock()
        if now >= self._slowdowns_until:
            self._slowdowns = slowdowns(board.workers, now=now)
            self._slowdowns_until = now + SLOWDOWNS_EVERY_S
            self._left = {worker.url for worker, by in self._slowdowns.items() if by >= LEAVES_AT}
        loads = board.loads()
        for worker, by in self._slowdowns.items():
            if (at := board.place.get(worker.url)) is not None:
                loads[at] *= by
        return loads


class _Recent:
    """The last worker of each session or group, bounded; the longest unused go first."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._urls)

    def get(self, name: str | None) -> str | None:
        return None if name is None else self._urls.get(name)

    def put(self, name: str | None, url: str) -> None:
        if name is None:
            return
        self._urls.pop(name, None)
        self._urls[name] = url
        if len(self._urls) > MAX_REMEMBERED:
            del self._urls[next(iter(self._urls))]


def _usable(request: GenerateRequest, index: PrefixIndex) -> int:
    """Blocks of a prompt that can be read from a cache: the last token is always computed, for the first sample."""
    return (request.prompt_tokens - 1) // index.block_tokens


def _reads_cache(request: GenerateRequest) -> bool:
    """Whether an engine serves this prompt from its prefix cache at all."""
    sampling = request.sampling
    return sampling.get("prompt_logprobs") is None and not sampling.get("skip_reading_prefix_cache", False)
