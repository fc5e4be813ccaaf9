import pytest
from tests.unit.rl.local_workers import LocalWorker

from rollplane.errors import InvalidRequest
from rollplane.rl.members import Member
from rollplane.router.policies import LeastLoaded, RoundRobin, make_policy
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.worker import RoutedWorker
from rollplane.testing.requests import make_request


@pytest.fixture
def workers() -> list[RoutedWorker]:
    return [RoutedWorker(Member(LocalWorker(f"http://w{i}"))) for i in range(3)]


def test_round_robin_starts_one_further_each_time(workers: list[RoutedWorker]) -> None:
    policy = RoundRobin()
    chosen = [policy.choose(make_request(), workers).url[-1] for _ in range(4)]
    assert chosen == ["0", "1", "2", "0"]


def test_least_loaded_prefers_few_sequences_then_few_tokens(workers: list[RoutedWorker]) -> None:
    workers[0].place(sequences=1, tokens=10)
    workers[1].place(sequences=1, tokens=9)
    workers[2].place(sequences=2, tokens=1)
    assert LeastLoaded().choose(make_request(), workers) is workers[1]
    workers[1].place(sequences=2, tokens=0)
    assert LeastLoaded().choose(make_request(), workers) is workers[0]


def test_a_burst_spreads_because_each_placement_counts_at_once(workers: list[RoutedWorker]) -> None:
    policy = LeastLoaded()
    for _ in range(9):
        policy.choose(make_request(), workers).place(sequences=1, tokens=3)
    assert [worker.sequences for worker in workers] == [3, 3, 3]


def test_the_load_of_other_frontends_counts_as_the_worker_told_it(workers: list[RoutedWorker]) -> None:
    workers[0].place(sequences=4, tokens=1)
    workers[0].release(sequences=4, tokens=1)
    assert workers[0].load == 0
    assert repr(workers[0]) == "<RoutedWorker http://w0 joining ? circuit=closed load=0/0t>"


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    assert isinstance(make_policy(None), PrefixAware)
    with pytest.raises(InvalidRequest, match="least_loaded, prefix_aware, round_robin"):
        make_policy("fastest")
