"""What a router knows at a moment: its fleet's health, each worker's load and cache, and how well the caches were foreseen."""

from collections.abc import Callable, Sequence

import msgspec

from rollplane.protocol.info import EngineHealth
from rollplane.rl.fleet import Fleet
from rollplane.router.health import CircuitState
from rollplane.router.observed import Observed
from rollplane.router.policies import Policy
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.prefix_index import IndexSizes
from rollplane.router.queue_counts import QueueReport
from rollplane.router.worker import RoutedWorker


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. `policy_lag`: updates its version is behind the newest, None where its order is not known. `sequences`, `prompt_tokens`: placed from here and not ended. `load`: sequences it works on, also of other
    frontends. `cached_blocks`, `pending_tokens`: None where the policy follows no caches.
    """

    url: str
    policy_version: str | None
    policy_lag: int | None
    routable: bool
    circuit: CircuitState
    sequences: int
    prompt_tokens: int
    load: int
    cached_blocks: int | None = None
    pending_tokens: int | None = None


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True):
    """A router's placement. `index`: None where the policy has none. `queues`: of each fleet."""

    policy: str
    workers: list[WorkerLoad]
    observed: Observed
    index: IndexSizes | None = None
    queues: list[QueueReport] = msgspec.field(default_factory=list)


def placement_report(
    policy: Policy,
    workers: list[RoutedWorker],
    observed: Observed,
    *,
    queue: QueueReport,
    lag: Callable[[str | None], int | None],
) -> PlacementReport:
    """The report of now. `lag`: how far a version is behind."""
    index = policy.index if isinstance(policy, PrefixAware) else None
    pending = {} if index is None else index.pending_tokens()
    return PlacementReport(
        policy=type(policy).__name__,
        observed=observed,
        queues=[queue],
        index=None if index is None else index.sizes,
        workers=[
            WorkerLoad(
                url=worker.url,
                policy_version=worker.version,
                policy_lag=lag(worker.version),
                routable=worker.member.routable,
                circuit=worker.circuit.state,
                sequences=worker.sequences,
                prompt_tokens=worker.tokens,
                load=worker.load,
                cached_blocks=None if index is None else index.blocks_of(worker.url),
                pending_tokens=None if index is None else pending.get(worker.url, 0),
            )
            for worker in workers
        ],
    )


def fleet_health(fleet: Fleet, workers: Sequence[RoutedWorker], *, held: int, closing: bool) -> EngineHealth:
    """The health of a fleet: ready as soon as one worker can take requests.

    Args:
        held: requests that wait for a worker.
        closing: no more are taken.
    """
    told = [w.member.worker.state.health for w in workers if w.member.worker.state is not None]
    running, waiting = sum(h.running for h in told), sum(h.waiting for h in told)
    if closing:
        state = EngineHealth(alive=True, state="draining")
    elif fleet.held_for is not None:
        state = EngineHealth(alive=True, state="paused" if fleet.paused else "updating")
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
        last_progress_s=0.0 if closing else max((h.last_progress_s for h in told), default=0.0),
        counters={"workers": len(workers), "held": held},
    )
