"""What vLLM's Rust server tells of its cache, against the keys that placement computes: predicted is what was cached."""

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.models.tiny import shared_model
from tests.real import processes

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.protocol.state import WorkerState
from rollplane.rl.members import Member
from rollplane.router.cache_followers import CacheFollowers
from rollplane.router.prefix_aware import PrefixAware
from rollplane.router.worker import RoutedWorker
from rollplane.testing import answer, make_request
from rollplane.worker import Worker

pytestmark = pytest.mark.timeout(300)

BLOCK_TOKENS = 32
WAIT_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    events, replay = processes.free_ports(2)
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv",
    }
    arguments = ["--max-num-batched-tokens", "4096", "--kv-events-config", json.dumps(config)]
    with processes.vllm_rs(
        shared_model("qwen3"), log, arguments=arguments, environment={"VLLM_SERVER_DEV_MODE": "1"}
    ) as found:
        yield found


class Told:
    """A worker in this process, as a fleet sees it."""

    def __init__(self, worker: Worker) -> None:
        self.url, self.engine, self.reachable = "http://w", worker, True
        self.state: WorkerState | None = None

    async def refresh(self) -> None:
        self.state = await self.engine.snapshot()


@pytest.fixture
async def told(server: processes.Server) -> AsyncIterator[Told]:
    engine = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, logprobs_mode="raw", start_timeout_s=20))
    worker = Worker(engine)
    await worker.start()
    told = Told(worker)
    await told.refresh()
    yield told
    await worker.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - another process tells
            await asyncio.sleep(0.05)


def prompt(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(300, 1000, 10 * BLOCK_TOKENS).astype(np.int32)


def hits(server: processes.Server) -> int:
    """Prompt tokens that the engine has read from its prefix cache: the gRPC answers do not say it."""
    with urllib.request.urlopen(f"{server.http_url}/metrics", timeout=10) as answered:
        text = answered.read().decode()
    return int(sum(float(n) for n in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)))


async def test_predicted_and_actual_cached_tokens_agree_for_text_and_salts(
    told: Told, server: processes.Server
) -> None:
    """A75, and A42 at the end: this server tells of a reset only with its next step."""
    routed, policy = RoutedWorker(Member(told)), PrefixAware()  # type: ignore[arg-type]
    followers = CacheFollowers(policy)
    followers.join(routed)
    assert told.engine.info.capabilities.kv_events
    await until(lambda: policy.index is not None)  # the feed has begun

    async def served(**fields: Any) -> int | None:
        """How many tokens are expected to be cached; then the request is served, and what was cached is that."""
        request = make_request(prompt(0), max_tokens=2, fields=fields)
        policy.choose(request, [routed])
        predicted = policy.placed(request, routed)
        before = hits(server)
        await answer(told.engine, request)
        if predicted:
            await until(lambda: hits(server) - before >= predicted)
        assert hits(server) - before == predicted
        return predicted

    try:
        for blocks, salt in ((10, None), (20, "s1"), (30, "s2")):
            fields = {} if salt is None else {"cache_salt": salt}
            assert await served(**fields) == 0
            index = policy.index
            assert index is not None
            await until(lambda index=index, blocks=blocks: index.blocks_of("http://w") == blocks)  # type: ignore[misc]
            # Only what the server told is left: nothing is predicted any more.
            assert index.sizes.predicted == 0
            assert await served(**fields) == 9 * BLOCK_TOKENS
        assert index.sizes.orphans == 0
        await told.engine.flush_cache()
        await told.refresh()
        assert await served() == 0
    finally:
        await followers.close()
