"""Which workers may serve a request: how far a version may be behind, and what is said where none fits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.unit.rl.local_workers import LocalWorker

from rollplane.errors import PreconditionFailed
from rollplane.rl.fleet import Fleet
from rollplane.router.constraints import Fit, Lineup, fitting
from rollplane.router.worker import RoutedWorker
from rollplane.testing.requests import make_request


@asynccontextmanager
async def observed(*versions: str) -> AsyncIterator[tuple[Fleet, list[LocalWorker]]]:
    """Workers that a trainer updates itself: each gets a version of its own after it joined as `initial`."""
    fleet = Fleet(epoch=1)
    workers = [LocalWorker(f"http://w{i}") for i in range(len(versions))]
    try:
        for worker in workers:
            await worker.start()
            fleet.add(worker)
        for worker, version in zip(workers, versions, strict=True):
            await move(worker, version)
        yield fleet, workers
    finally:
        await fleet.close()


async def move(worker: LocalWorker, version: str) -> None:
    """An update that did not come through the fleet."""
    await worker.worker.set_policy_version(version)
    await worker.refresh()


def fit(fleet: Fleet, **options: Any) -> Fit:
    return fitting(make_request(options=options), Lineup([RoutedWorker(member) for member in fleet.members]), fleet)


def urls(found: Fit) -> list[str]:
    return [worker.url for worker in found.workers]


async def test_only_workers_within_the_lag_serve() -> None:
    async with observed("initial", "v1", "v2") as (fleet, _):
        assert [fleet.lag(version) for version in ("initial", "v1", "v2", "v3", None)] == [2, 1, 0, None, None]
        assert urls(fit(fleet, max_policy_lag=0)) == ["http://w2"]
        assert urls(fit(fleet, max_policy_lag=1)) == ["http://w1", "http://w2"]
        assert urls(fit(fleet, max_policy_lag=2)) == ["http://w0", "http://w1", "http://w2"]
        assert urls(fit(fleet, max_policy_lag=2, min_policy_version="v1")) == ["http://w1", "http://w2"]


async def test_the_newest_counts_also_where_nobody_has_it_any_more_and_the_refusal_says_what_there_is() -> None:
    async with observed("initial", "v1", "v2") as (fleet, workers):
        workers[2].cut()
        found = fit(fleet, max_policy_lag=0)
        assert found.verdict == "refuse"
        assert isinstance(found.error, PreconditionFailed)
        assert found.error.param == "rollplane.max_policy_lag"
        assert found.error.message == (
            "rollplane.max_policy_lag: no worker has a version at most 0 updates behind the newest, 'v2'; "
            "there is 'initial' (2 behind), 'v1' (1 behind)"
        )
        assert found.error.details == {
            "policy_versions": ["initial", "v1"],
            "newest": "v2",
            "lags": {"initial": 2, "v1": 1},
        }
        assert urls(fit(fleet, max_policy_lag=1)) == ["http://w1"]


async def test_a_request_with_a_deadline_waits_for_its_version_and_one_without_is_refused_at_once() -> None:
    async with observed("v1") as (fleet, _):
        for wanted in ({"policy_version": "v9"}, {"min_policy_version": "v9"}):
            assert fit(fleet, **wanted).verdict == "refuse"
            waiting = fit(fleet, **wanted, deadline_s=5.0)
            assert waiting.verdict == "wait"
            assert isinstance(waiting.error, PreconditionFailed)


async def test_a_version_without_a_place_in_the_order_bounds_nothing() -> None:
    """A worker that joins with a version nobody was seen to change to may be newer or older: that is not guessed."""
    async with observed("v1", "v2") as (fleet, workers):
        late = LocalWorker("http://late")
        await late.start()
        await late.worker.set_policy_version("other")
        await late.refresh()
        fleet.add(late)
        found = fit(fleet, max_policy_lag=5)
        assert found.verdict == "refuse"
        assert "'other' (its order is not known)" in found.error.message
        # Requests that bound nothing, or name it, are served as ever.
        assert len(fit(fleet).workers) == 3
        assert urls(fit(fleet, policy_version="other")) == ["http://late"]
        assert urls(fit(fleet, min_policy_version="v2")) == ["http://w1"]
        # Once a worker is seen to change to it, it is the newest.
        await move(workers[0], "other")
        assert urls(fit(fleet, max_policy_lag=0)) == ["http://w0", "http://late"]
        assert urls(fit(fleet, max_policy_lag=1)) == ["http://w0", "http://w1", "http://late"]


async def test_the_only_version_there_is_is_the_newest() -> None:
    async with observed("v1") as (fleet, workers):
        workers[0].cut()
        late = LocalWorker("http://late")
        await late.start()
        await late.worker.set_policy_version("v7")
        await late.refresh()
        fleet.add(late)
        assert urls(fit(fleet, max_policy_lag=0)) == ["http://late"]
