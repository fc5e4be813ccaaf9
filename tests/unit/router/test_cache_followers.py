"""What workers cache, followed by a router: real workers over mock engines, no sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from tests.unit.rl.local_workers import LocalWorker
from tests.unit.rl.test_adapters import write_adapter
from tests.unit.rl.test_fleet import weights
from tests.waiting import until

from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.features import MediaItem
from rollplane.protocol.kv_events import BlocksStored, CacheCleared, KvBatch
from rollplane.rl.fleet import Fleet
from rollplane.router import cache_followers
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.prefix_index import PrefixIndex
from rollplane.router.router import Router
from rollplane.testing import watching
from rollplane.testing.requests import answer, make_request


@asynccontextmanager
async def router_of(*settings: MockSettings) -> AsyncIterator[tuple[Router, PrefixAware, list[LocalWorker]]]:
    fleet = Fleet(epoch=1)
    workers = [LocalWorker(f"http://w{i}", one) for i, one in enumerate(settings)]
    for worker in workers:
        await worker.start()
        fleet.add(worker)
    policy = PrefixAware()
    router = Router(fleet, policy=policy)
    await router.start()
    assert len(router.workers) == len(workers)
    try:
        yield router, policy, workers
    finally:
        await router.close()


def prompt(seed: int, tokens: int = 512) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(3, 30_000, tokens).astype(np.int32)


def index_of(policy: PrefixAware) -> PrefixIndex:
    assert policy.index is not None
    return policy.index


async def followed(policy: PrefixAware, workers: list[LocalWorker]) -> None:
    """Every block that a worker caches is in the index."""
    await until(
        lambda: (
            policy.index is not None
            and all(policy.index.blocks_of(worker.url) == len(worker.mock._core.cache) for worker in workers)
        )
    )


async def test_predicted_and_actual_cached_tokens_agree_for_text_salts_adapters_and_images(tmp_path: Path) -> None:
    """Each dimension is sent twice, and once more beside another value of it."""
    async with router_of(MockSettings(), MockSettings()) as (router, policy, workers):
        for name in ("one", "other"):
            await router.fleet.load_adapter(name, write_adapter(tmp_path / name, fill=float(len(name))))

        def image(content: bytes) -> list[MediaItem]:
            return [MediaItem(modality="image", producer_hash="p", offset=40, length=64, kwargs=content)]

        scopes: list[dict[str, Any]] = [
            {},
            {"cache_salt": "s1"},
            {"cache_salt": "s2"},
            {"model": "one"},
            {"model": "other"},
            {"model": "one", "cache_salt": "s1"},
            {"features": lambda: image(b"cat")},
            {"features": lambda: image(b"dog")},
        ]
        for scope in scopes:
            for expected in (0, 496, 496):
                fields = {name: value() if callable(value) else value for name, value in scope.items()}
                fields = fields or {}
                before = router.observed.predicted_tokens, router.observed.cached_tokens
                if "features" in fields:
                    expected = expected or 32  # the two blocks before the image are those of the text
                response = await answer(router, make_request(prompt(0), max_tokens=2, fields=fields))
                await followed(policy, workers)
                predicted = router.observed.predicted_tokens - before[0]
                assert (scope, predicted) == (scope, response.usage.cached_tokens)
                assert (scope, predicted) == (scope, expected)
        assert (router.observed.over_tokens, router.observed.under_tokens) == (0, 0)
        assert router.observed.answers == 3 * len(scopes)


async def test_a_version_name_that_comes_back_finds_nothing_of_its_first_use(tmp_path: Path) -> None:
    """v3, v4, v3 again with other contents, and a request kept from the first v3 on. The mock drops nothing by itself."""
    async with router_of(MockSettings(step_s=0.001)) as (router, policy, workers):

        async def asked() -> tuple[int, int | None]:
            before = router.observed.predicted_tokens
            response = await answer(router, make_request(prompt(0), max_tokens=2))
            await until(lambda: index_of(policy).blocks_of(workers[0].url) >= 512 // 16)
            return router.observed.predicted_tokens - before, response.usage.cached_tokens

        async def update(contents: str, version: str) -> None:
            await router.fleet.update_from_disk(weights(tmp_path, contents), version=version)

        await update("first", "v3")
        kept = make_request(prompt(0), max_tokens=3000, ignore_eos=True, stream=True)
        async with watching(router, kept) as (watch,):
            await watch.until_tokens(1)
            assert await asked() == (496, 496)
            await update("second", "v4")
            assert await asked() == (0, 0)
            await update("third", "v3")
            assert [await asked(), await asked()] == [(0, 0), (496, 496)]
            await router.fleet.set_policy_version("v5")
            assert [await asked(), await asked()] == [(0, 0), (496, 496)]
            await router.fleet.set_policy_version("v3")
            assert await asked() == (0, 0)
            assert not watch.over
        assert (router.observed.over_tokens, router.observed.under_tokens) == (0, 0)


async def test_a_reset_worker_gets_no_traffic_for_a_cache_that_is_gone() -> None:
    """Warm P on worker A, reset A, send P 10 times."""
    async with router_of(MockSettings(), MockSettings()) as (router, policy, workers):
        tokens = prompt(0)
        await answer(router, make_request(tokens, max_tokens=2))
        await followed(policy, workers)
        warm = max(workers, key=lambda worker: index_of(policy).blocks_of(worker.url))
        warm.mock._publish = lambda: None  # type: ignore[method-assign]  # an idle engine may never say it
        warm.mock._core.on_kv_change = lambda: None
        await warm.flush_cache()
        await warm.refresh()
        other = next(worker for worker in workers if worker is not warm)
        busy = router.workers[workers.index(warm)]
        busy.place(sequences=1, tokens=10)  # a little load is enough now: its cache is worth nothing any more
        for _ in range(10):
            await answer(router, make_request(tokens, max_tokens=2))
        assert (warm.mock.calls("generate"), other.mock.calls("generate")) == (1, 10)
        assert router.observed.over_tokens == 0


async def test_an_update_a_sleep_a_restart_and_a_pause_that_clears_drop_what_was_known(tmp_path: Path) -> None:
    """Each of them, whatever the events say."""
    async with router_of(MockSettings(sleep_mode=True)) as (router, policy, (worker,)):
        tokens = prompt(0)

        async def warm() -> None:
            await answer(router, make_request(tokens, max_tokens=2))
            await followed(policy, [worker])
            assert index_of(policy).blocks_of(worker.url) == 32

        def expected() -> int | None:
            predicted = policy.placed(make_request(tokens), router.workers[0])
            policy.lost_track(router.workers[0])
            return predicted

        await warm()
        await router.fleet.update_from_disk(weights(tmp_path, "v1"))
        assert expected() == 0
        await worker.flush_cache(preempt=True)
        await warm()
        await router.fleet.pause("wait", clear_cache=True)
        await router.fleet.resume()
        assert expected() == 0
        await warm()
        await worker.worker.sleep()
        await worker.worker.wake_up()
        await worker.refresh()
        assert expected() == 0
        await warm()
        await worker.restart()
        assert expected() == 0


async def test_events_of_before_a_reset_that_arrive_after_it_are_left_out() -> None:
    async with router_of(MockSettings()) as (router, policy, (worker,)):
        routed = router.workers[0]
        stored = BlocksStored(hashes=[1], parent=None, token_ids=prompt(0, 16), block_tokens=16)
        await worker.flush_cache()
        await worker.refresh()
        policy.learn(routed, KvBatch(instance=worker.worker.instance_id, generation=0, events=[stored]))
        assert (index_of(policy).blocks_of(worker.url), index_of(policy).sizes.stale) == (0, 1)
        policy.learn(routed, KvBatch(instance=worker.worker.instance_id, generation=1, events=[stored]))
        assert index_of(policy).blocks_of(worker.url) == 1
        policy.learn(routed, KvBatch(instance=worker.worker.instance_id, generation=1, events=[CacheCleared()]))
        assert index_of(policy).blocks_of(worker.url) == 0


async def test_a_feed_that_ends_is_asked_for_again_and_begins_with_all_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_followers, "AGAIN_S", 0.0)
    async with router_of(MockSettings()) as (router, policy, (worker,)):
        await answer(router, make_request(prompt(0), max_tokens=2))
        await followed(policy, [worker])
        before = worker.mock._subscribers[0]
        before.put_nowait(None)
        await until(lambda: worker.mock._subscribers and worker.mock._subscribers[0] is not before)
        await followed(policy, [worker])
        assert index_of(policy).blocks_of(worker.url) == 32


async def test_a_big_snapshot_is_taken_in_by_parts_and_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_followers, "EVENTS_AT_ONCE", 8)
    worker = LocalWorker("http://w0")
    await worker.start()
    for seed in range(3):
        await answer(worker.engine, make_request(prompt(seed), max_tokens=2))
    fleet, policy = Fleet(epoch=1), PrefixAware()
    fleet.add(worker)
    router = Router(fleet, policy=policy)
    assert len(router.workers) == 1
    await followed(policy, [worker])
    assert index_of(policy).blocks_of(worker.url) == 96
    await router.close()


async def test_a_worker_of_another_block_size_is_refused_by_name_and_served_by_load() -> None:
    with structlog.testing.capture_logs() as logs:
        async with router_of(MockSettings(), MockSettings(block_tokens=32)) as (router, policy, workers):
            for seed in range(4):
                await answer(router, make_request(prompt(seed), max_tokens=2))
            await until(lambda: any(entry["event"] == "kv_events_refused" for entry in logs))
            assert index_of(policy).block_tokens == 16
            assert index_of(policy).blocks_of(workers[1].url) == 0
            assert all(worker.mock.calls("generate") for worker in workers)
    refused = next(entry for entry in logs if entry["event"] == "kv_events_refused")
    assert "worker http://w1 caches blocks of 32 tokens, this index has blocks of 16" in refused["error"]
    assert any(entry["event"] == "block_size_differs" and entry["worker"] == "http://w1" for entry in logs)


async def test_a_member_that_leaves_takes_its_blocks_along() -> None:
    async with router_of(MockSettings(), MockSettings()) as (router, policy, workers):
        await answer(router, make_request(prompt(0), max_tokens=2))
        await followed(policy, workers)
        router.fleet.set_workers([], lambda url: workers[0])
        await until(lambda: not router.workers)
        assert index_of(policy).sizes.blocks == 0
        assert repr(router._caches) == "<CacheFollowers of 0 workers>"
