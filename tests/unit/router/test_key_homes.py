"""Keepers of idempotency keys: one per key whichever frontend asks, found again after homes and books are lost."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from tests.unit.rl.local_workers import LocalWorker

from rollplane.rl.members import Member
from rollplane.router.key_homes import KeyHomes, homes
from rollplane.router.worker import RoutedWorker


@pytest.fixture
async def local() -> AsyncIterator[list[LocalWorker]]:
    async with AsyncExitStack() as stack:
        found = [LocalWorker(f"http://w{i}") for i in range(5)]
        for worker in found:
            await worker.start()
            stack.push_async_callback(worker.close)
        yield found


@pytest.fixture
def workers(local: list[LocalWorker]) -> list[RoutedWorker]:
    return [RoutedWorker(Member(worker)) for worker in local]


def test_every_frontend_finds_the_same_homes_and_only_a_lost_workers_keys_move(workers: list[RoutedWorker]) -> None:
    keys = [f"key-{i}" for i in range(300)]
    before = {key: homes(key, workers)[0].url for key in keys}
    assert {key: homes(key, list(reversed(workers)))[0].url for key in keys} == before
    assert min(list(before.values()).count(worker.url) for worker in workers) > 30
    after = {key: homes(key, workers[:4])[0].url for key in keys}
    assert all(after[key] == url for key, url in before.items() if url != "http://w4")


async def test_the_first_placement_of_a_key_is_found_by_every_frontend(workers: list[RoutedWorker]) -> None:
    one, other = KeyHomes(), KeyHomes()
    assert await one.claim("k", "http://w0", workers=workers) == "http://w0"
    assert await other.claim("k", "http://w1", workers=workers) == "http://w0"


async def test_a_key_moves_only_away_from_a_worker_that_is_of_no_use(workers: list[RoutedWorker]) -> None:
    one, other = KeyHomes(), KeyHomes()
    await one.claim("k", "http://w0", workers=workers)
    assert await other.claim("k", "http://w1", workers=workers) == "http://w0"
    assert await one.claim("k", "http://w3", workers=workers, instead_of="http://w0") == "http://w3"
    assert await other.claim("k", "http://w1", workers=workers, instead_of="http://w0") == "http://w3"


@pytest.mark.parametrize("missed", [0, 1, 2])
async def test_a_home_that_missed_a_move_does_not_undo_it(
    local: list[LocalWorker], workers: list[RoutedWorker], missed: int
) -> None:
    await KeyHomes().claim("k", "http://w0", workers=workers)
    home = next(w for w in local if w.url == homes("k", workers)[missed].url)
    home.cut()
    mover = KeyHomes()
    await mover.claim("k", "http://w3", workers=workers)
    await mover.claim("k", "http://w3", workers=workers, instead_of="http://w0")
    await home.mend()
    assert await KeyHomes().claim("k", "http://w1", workers=workers) == "http://w3"
    assert home.worker.keys.claim("k", "nobody") == ("http://w3", 2)


async def test_a_home_that_lost_its_book_is_told_by_the_other(
    local: list[LocalWorker], workers: list[RoutedWorker]
) -> None:
    await KeyHomes().claim("k", "http://w0", workers=workers)
    for home in homes("k", workers)[:3]:
        await next(w for w in local if w.url == home.url).restart()
        assert await KeyHomes().claim("k", "http://w1", workers=workers) == "http://w0"


async def test_a_home_that_cannot_be_reached_is_passed_over_and_finds_the_key_when_it_is_back(
    local: list[LocalWorker], workers: list[RoutedWorker]
) -> None:
    first = next(w for w in local if w.url == homes("k", workers)[0].url)
    first.cut()
    await KeyHomes().claim("k", "http://w0", workers=workers)
    await first.mend()
    assert await KeyHomes().claim("k", "http://w1", workers=workers) == "http://w0"


async def test_a_home_that_was_never_heard_is_asked_all_the_same(
    local: list[LocalWorker], workers: list[RoutedWorker]
) -> None:
    """A frontend that has just started: the homes must not depend on which workers it has heard already."""
    await KeyHomes().claim("k", "http://w0", workers=workers)
    for worker in local:
        worker.state = None
    assert await KeyHomes().claim("k", "http://w1", workers=workers) == "http://w0"


async def test_a_frontend_remembers_its_own_keys_when_every_home_lost_them(
    local: list[LocalWorker], workers: list[RoutedWorker]
) -> None:
    one = KeyHomes()
    await one.claim("k", "http://w0", workers=workers)
    for worker in local:
        await worker.restart()
    assert await one.claim("k", "http://w1", workers=workers) == "http://w0"
