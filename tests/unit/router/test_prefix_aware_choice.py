"""The choice of `PrefixAware`, held to the rule as it is said: every term of every worker, looked up anew for each request."""

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplane.identity import block_keys, engine_salt
from rollplane.protocol.admin import AdapterRecord
from rollplane.protocol.info import Capabilities, EngineHealth, EngineInfo
from rollplane.protocol.kv_events import BlocksStored, KvBatch
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.state import WorkerState
from rollplane.rl.members import Member
from rollplane.router.pace import slowdowns
from rollplane.router.prefix_aware import LEAVES_AT, PrefixAware
from rollplane.router.worker import Candidates, RoutedWorker
from rollplane.testing.clock import FakeClock
from rollplane.testing.requests import make_request

BLOCK_TOKENS = 16
ADAPTER = "tuned"


class Told:
    """A worker of which only the state is needed."""

    def __init__(self, url: str, state: WorkerState | None) -> None:
        self.url, self.state, self.reachable = url, state, True


def state(at: int, rng: random.Random, *, alike: bool) -> WorkerState:
    """What a worker tells, of a few kinds. `alike`: only its load is its own."""
    odd = 0.0 if alike else 1.0
    adapter = AdapterRecord(
        name=ADAPTER,
        engine_name=f"{ADAPTER}@{rng.randrange(2)}",
        state="ready",
        path="",
        digest="",
        generation=1,
        rank=8,
    )
    return WorkerState(
        worker=f"w{at}",
        instance=f"i{at}.{rng.random() < 0.1 * odd}",
        info=EngineInfo(
            engine="mock",
            model="m",
            max_model_len=4096,
            vocab_bound=1000,
            max_num_seqs=rng.choice([2, 8, 200]),
            block_tokens=2 * BLOCK_TOKENS if at and rng.random() < 0.1 * odd else BLOCK_TOKENS,
            capabilities=Capabilities(kv_events=True),
        ),
        health=EngineHealth(
            alive=True, state="ready", running=rng.choice([0, 0, 1, 6]), waiting=rng.choice([0, 0, 30])
        ),
        policy_version="v1",
        salt_scope="v2" if rng.random() < 0.2 * odd else "v1",
        adapters=[adapter] if rng.random() < 0.7 * odd else [],
        cache_generation=int(rng.random() < 0.1 * odd),
    )


class Simulated:
    """Workers, a policy that chooses among them, and the same choice by the rule."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.clock = rng, FakeClock()
        self.policy = PrefixAware(clock=self.clock)
        self.alike = rng.random() < 0.6
        self.told = [
            Told(f"http://w{at}", state(at, rng, alike=self.alike)) for at in range(rng.choice([1, 2, 3, 5, 9]))
        ]
        if len(self.told) > 1 and rng.random() < 0.3 and not self.alike:
            self.told[-1].state = None
        self.workers = [RoutedWorker(Member(told)) for told in self.told]  # type: ignore[arg-type]
        self.pace_s = {worker: rng.choice([1.0, 1.0, 1.0, 4.0]) for worker in self.workers}
        self.all = Candidates(self.workers)
        self.policy._look(self.workers[0])  # its block size is the index's
        self.sessions: dict[str, RoutedWorker] = {}
        self.groups: dict[str, RoutedWorker] = {}
        self.turn = 0
        self.running: list[tuple[RoutedWorker, GenerateRequest]] = []

    def request(self) -> GenerateRequest:
        rng = self.rng
        tokens = [5] * (BLOCK_TOKENS * rng.choice([0, 2, 8, 12])) + [rng.randrange(3, 6)] * rng.randrange(1, 200)
        options: dict[str, Any] = {}
        if rng.random() < 0.3:
            options["session_id"] = f"s{rng.randrange(4)}"
        if rng.random() < 0.3:
            options["group_id"] = f"g{rng.randrange(3)}"
        more: dict[str, Any] = {"prompt_logprobs": 0} if rng.random() < 0.1 else {}
        request = make_request(tokens, n=rng.choice([1, 1, 1, 4]), options=options, **more)
        request.model = rng.choice([None, "m", ADAPTER])
        return request

    def cached(self, request: GenerateRequest, worker: RoutedWorker) -> int:
        heard, index = worker.member.worker.state, self.policy.index
        if heard is None or index is None or heard.info.block_tokens != BLOCK_TOKENS:
            return 0
        if request.sampling.get("prompt_logprobs") is not None:
            return 0
        adapter = next((record.engine_name for record in heard.adapters if record.name == request.model), None)
        salt = engine_salt(None, scope=heard.salt_scope)
        keys = block_keys(request.token_ids, block_tokens=BLOCK_TOKENS, salt=salt, adapter=adapter)
        depth = index.match(keys).get(worker.url, 0)
        return min(depth, (request.prompt_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    def by_the_rule(self, request: GenerateRequest, workers: list[RoutedWorker]) -> RoutedWorker:
        """The least cost under the cap; who is over it, by load."""
        for worker in workers:
            self.policy._look(worker)
        sequences, weights = request.sampling.choices, self.policy.settings
        slow = slowdowns(workers, now=self.clock())
        left = [worker for worker in workers if slow.get(worker, 1.0) >= LEAVES_AT]
        if len(left) == len(workers):
            left = []
        loads = {worker: worker.load * slow.get(worker, 1.0) for worker in workers}
        told = [worker.member.worker.state for worker in workers]
        slots = {
            worker: 1 if heard is None else heard.info.max_num_seqs for worker, heard in zip(workers, told, strict=True)
        }
        slack = max(min(weights.load_slack, min(slots.values()) // 8), sequences)
        mean = (sum(loads.values()) + sequences) / len(workers)
        cap = max(mean * weights.load_factor, mean + slack)
        pending = {} if self.policy.index is None else self.policy.index.pending_tokens()

        def rank(worker: RoutedWorker) -> tuple[bool, float]:
            load = loads[worker]
            if load + sequences > cap:
                return True, load
            if self.sessions.get(request.options.session_id or "") is worker and worker not in left:
                return False, float("-inf")
            cost = weights.sequence_tokens * load + weights.pending_share * pending.get(worker.url, 0)
            cost += weights.slot_tokens * max(load + sequences - slots[worker], 0)
            if worker not in left:
                cost -= self.cached(request, worker)
                if self.groups.get(request.options.group_id or "") is worker:
                    cost -= weights.sequence_tokens * slack
            return False, cost

        self.turn = (self.turn + 1) % len(workers)
        return min([*workers[self.turn :], *workers[: self.turn]], key=rank)

    def step(self) -> None:
        """A request comes, and something of all else that may happen in between."""
        rng, request = self.rng, self.request()
        self.clock._now += 1.0
        some = rng.sample(self.workers, rng.randrange(1, len(self.workers) + 1))
        among = some if rng.random() < 0.2 else self.all
        expected = self.by_the_rule(request, list(among))
        chosen = self.policy.choose(request, among)
        assert chosen is expected
        chosen.place(sequences=request.sampling.choices, tokens=request.prompt_tokens)
        self.policy.placed(request, chosen)
        self.running.append((chosen, request))
        for name, kept in ((request.options.session_id, self.sessions), (request.options.group_id, self.groups)):
            if name is not None:
                kept[name] = chosen
        if rng.random() < 0.7:
            worker, ended = self.running.pop(rng.randrange(len(self.running)))
            worker.release(sequences=ended.sampling.choices, tokens=ended.prompt_tokens)
            worker.pace.add(self.pace_s[worker], tokens=16, now=self.clock())
            self.report(worker, ended)
        if rng.random() < 0.2:
            at = rng.randrange(len(self.told))
            self.told[at].state = state(at, rng, alike=self.alike)
            self.all = Candidates(self.workers)

    def report(self, worker: RoutedWorker, request: GenerateRequest) -> None:
        """A worker says that it has a prompt's blocks."""
        heard = worker.member.worker.state
        if heard is None or heard.info.block_tokens != BLOCK_TOKENS or self.rng.random() < 0.3:
            return
        self.policy._look(worker)
        whole = np.asarray(request.token_ids)[: request.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS]
        salt = engine_salt(None, scope=heard.salt_scope)
        keys = block_keys(whole, block_tokens=BLOCK_TOKENS, salt=salt)
        stored = BlocksStored(hashes=keys, parent=None, token_ids=whole, block_tokens=BLOCK_TOKENS, salt=salt)
        self.policy.learn(
            worker, KvBatch(instance=heard.instance, generation=heard.cache_generation, events=[stored] if keys else [])
        )


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_a_choice_is_the_least_cost_under_the_cap_among_equals_in_turn(seed: int) -> None:
    simulated = Simulated(random.Random(seed))
    for _ in range(40):
        simulated.step()
