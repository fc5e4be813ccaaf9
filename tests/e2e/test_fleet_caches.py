"""What workers cache, told over real sockets to frontends that place by it."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.e2e.fleets import WAIT_S, FleetUnderTest, MockWorker, fleet_of
from tests.unit.rl.test_adapters import write_adapter

from rollplane.engines.mock.settings import MockSettings
from rollplane.engines.remote import RemoteEngine
from rollplane.errors import NotFound, RollplaneError, TransportError
from rollplane.protocol.kv_events import BlocksStored, CacheCleared
from rollplane.router.prefix_aware import PrefixAware
from rollplane.testing.requests import answer, make_request


def prompt(seed: int, tokens: int = 512) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(3, 30_000, tokens).astype(np.int32)


async def told(under_test: FleetUnderTest, policy: PrefixAware) -> None:
    """The index has every block that the workers cache."""
    await under_test.until(
        lambda: (
            policy.index is not None
            and all(
                policy.index.blocks_of(worker.url) == len(worker.engine._core.cache) for worker in under_test.workers
            )
        )
    )


async def test_a_worker_tells_all_it_caches_and_then_every_change() -> None:
    worker = MockWorker()
    await worker.start()
    engine = RemoteEngine(worker.url)
    try:
        await answer(worker.engine, make_request(prompt(0), max_tokens=2))
        feed = engine.kv_feed()
        async with asyncio.timeout(WAIT_S):
            first = await anext(feed)
            assert (first.instance, first.generation) == (worker.worker.instance_id, 0)
            assert sum(len(event.hashes) for event in first.events if isinstance(event, BlocksStored)) == 32
            await answer(worker.engine, make_request(prompt(1), max_tokens=2))
            second = await anext(feed)
            (event,) = second.events
            assert isinstance(event, BlocksStored)
            assert event.token_ids.tolist() == prompt(1).tolist()
            await worker.worker.flush_cache()
            third = await anext(feed)
            assert (third.generation, third.events) == (1, [CacheCleared()])
            await worker.worker.close()
            assert [batch async for batch in feed] == []
    finally:
        await engine.close()
        await worker.kill()


async def test_an_engine_without_kv_events_answers_404_and_a_frontend_has_no_such_route() -> None:
    async with fleet_of([MockSettings(cache_blocks=0)]) as under_test:
        engine = RemoteEngine(under_test.workers[0].url)
        with pytest.raises(NotFound, match="no KV events are said here"):
            await anext(engine.kv_feed())
        await engine.close()
        async with aiohttp.ClientSession() as session:
            url = f"{under_test.frontend.url}/internal/v1/kv_events"
            async with session.get(url) as response:
                assert response.status == 404


async def test_a_feed_whose_worker_dies_is_a_transport_error() -> None:
    worker = MockWorker()
    await worker.start()
    engine = RemoteEngine(worker.url)
    feed = engine.kv_feed()
    assert (await anext(feed)).events == []
    await worker.kill()
    with pytest.raises((TransportError, StopAsyncIteration)):
        async with asyncio.timeout(WAIT_S):
            await anext(feed)
    await engine.close()


async def test_a_frontend_places_by_what_workers_cached_before_it_was_there() -> None:
    policy = PrefixAware()
    async with fleet_of([MockSettings(), MockSettings()], policy=policy) as under_test:
        warm = under_test.workers[1]
        await answer(warm.worker, make_request(prompt(0), max_tokens=2))
        await told(under_test, policy)
        for _ in range(6):
            response = await answer(under_test.router, make_request(prompt(0), max_tokens=2))
            assert response.served_by.worker == "worker-1"
        assert under_test.router.observed.cached_tokens == under_test.router.observed.predicted_tokens == 6 * 496


async def test_the_second_request_of_an_adapters_prompt_is_predicted_to_be_cached_and_is(tmp_path: Path) -> None:
    """Keys of blocks have the adapter's generation in them, on both sides the same."""
    policy = PrefixAware()
    adapter = write_adapter(tmp_path / "a")
    async with fleet_of([MockSettings(), MockSettings()], policy=policy) as under_test:
        await under_test.fleet.load_adapter("a", adapter)
        cached, workers = [], set()
        for _ in range(5):
            response = await answer(under_test.router, make_request(prompt(0), max_tokens=2, fields={"model": "a"}))
            cached.append(response.usage.cached_tokens)
            workers.add(response.served_by.worker)
            await told(under_test, policy)
        assert cached == [0, 496, 496, 496, 496]
        assert len(workers) == 1
        observed = under_test.router.observed
        assert observed.predicted_tokens == observed.cached_tokens == 4 * 496
        base = await answer(under_test.router, make_request(prompt(0), max_tokens=2))
        assert base.usage.cached_tokens == 0
        assert observed.over_tokens == 0


async def test_a_worker_whose_cache_is_reset_behind_the_frontend_is_not_taken_for_warm() -> None:
    """Over the worker's own admin route; the frontend hears of it by the worker's state."""
    policy = PrefixAware()
    async with fleet_of([MockSettings(), MockSettings()], policy=policy) as under_test:
        first = await answer(under_test.router, make_request(prompt(0), max_tokens=2))
        await told(under_test, policy)
        warm = next(w for w in under_test.workers if w.worker.settings.name == first.served_by.worker)
        warm.engine._publish = lambda: None  # type: ignore[method-assign]
        warm.engine._core.on_kv_change = lambda: None
        url = f"{warm.url}/engine/flush_cache"
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as response:
            assert response.status == 200
        members = {member.url: member for member in under_test.fleet.members}
        await under_test.until(
            lambda: (state := members[warm.url].worker.state) is not None and state.cache_generation == 1
        )
        again = await answer(under_test.router, make_request(prompt(0), max_tokens=2))
        assert again.usage.cached_tokens == 0
        assert under_test.router.observed.over_tokens == 0


async def test_a_restarted_worker_begins_cold_and_is_followed_again() -> None:
    policy = PrefixAware()
    async with fleet_of([MockSettings()], policy=policy) as under_test:
        (worker,) = under_test.workers
        await answer(under_test.router, make_request(prompt(0), max_tokens=2))
        await told(under_test, policy)
        port = worker.port
        await worker.kill()
        await under_test.until(lambda: not any(member.routable for member in under_test.fleet.members))
        fresh = MockWorker(name="worker-0", port=port)
        await fresh.start()
        under_test.workers[0] = fresh
        await under_test.until(lambda: all(member.routable for member in under_test.fleet.members))
        first = await answer(under_test.router, make_request(prompt(0), max_tokens=2))
        assert first.usage.cached_tokens == 0
        assert under_test.router.observed.over_tokens == 0
        await told(under_test, policy)
        assert policy.index is not None
        assert policy.index.blocks_of(fresh.url) == 32


async def test_kv_events_that_lie_never_fail_a_request() -> None:
    policy = PrefixAware()
    async with fleet_of([MockSettings()], policy=policy) as under_test:
        (worker,) = under_test.workers
        await answer(under_test.router, make_request(prompt(0), max_tokens=2))
        await told(under_test, policy)
        wrong = BlocksStored(hashes=[1, 2], parent=None, token_ids=prompt(5, 16), block_tokens=16)
        for queue in worker.engine._subscribers:
            queue.put_nowait([wrong])
        for _ in range(3):
            try:
                await answer(under_test.router, make_request(prompt(0), max_tokens=2))
            except RollplaneError as error:
                raise AssertionError("a wrong event reached a request") from error
        assert policy.index is not None
        assert policy.index.match([1]) == {}


async def test_metrics_show_predicted_beside_actual_cached_tokens_the_index_and_each_workers_load() -> None:
    """A75: a hash that differs would show as `over` or `under`."""
    policy = PrefixAware()
    async with fleet_of([MockSettings(), MockSettings()], policy=policy) as under_test:
        for _ in range(3):
            await answer(under_test.router, make_request(prompt(0), max_tokens=2))
            await told(under_test, policy)
        async with aiohttp.ClientSession() as session, session.get(f"{under_test.frontend.url}/metrics") as response:
            text = await response.text()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(lines["rollplane_predicted_cached_prompt_tokens_total"]) == 2 * 496
        assert float(lines["rollplane_actual_cached_prompt_tokens_total"]) == 2 * 496
        assert float(lines['rollplane_mispredicted_cached_prompt_tokens_total{direction="over"}']) == 0
        assert float(lines['rollplane_mispredicted_cached_prompt_tokens_total{direction="under"}']) == 0
        assert float(lines['rollplane_prefix_index_blocks{kind="reported"}']) == 32
        for worker in under_test.workers:
            labels = f'{{policy_version="initial",worker="{worker.url}"}}'
            assert float(lines[f"rollplane_worker_load{labels}"]) == 0
            assert float(lines[f"rollplane_worker_routable{labels}"]) == 1
            assert float(lines[f"rollplane_worker_cached_blocks{labels}"]) == len(worker.engine._core.cache)
