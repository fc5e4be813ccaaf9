import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rl.test_adapters import write_adapter
from tests.waiting import until

from rollplane.config import DynamoSettings
from rollplane.dynamo.kv_pump import KvPump
from rollplane.dynamo.runtime import Runtime, check_environment, rl_endpoint_of
from rollplane.dynamo.worker import DynamoWorker
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import EngineFailed, InvalidRequest, RollplaneError
from rollplane.protocol.info import Capabilities, EngineInfo
from rollplane.testing import answer, make_request

PROMPT = list(range(100, 148))  # three blocks of 16


class FakeDeployment:
    """The adapters that it shows, what it was told in order, and a fault for the next call."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.shown: set[str] = set()
        self.log: list[str] = []
        self.fault: RollplaneError | None = None

    async def show(self, adapter: str) -> None:
        self._say(f"show {adapter}")
        self.shown.add(adapter)

    async def hide(self, adapter: str) -> None:
        self._say(f"hide {adapter}")
        self.shown.discard(adapter)

    async def leave(self) -> None:
        self._say("leave")

    async def close(self) -> None:
        self._say("close")

    def _say(self, what: str) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        self.log.append(what)


class FakeIndex:
    """The blocks that Dynamo's router would count, by (salt, adapter)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str | None, str | None]] = {}

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        **scope: Any,
    ) -> None:
        assert sum(num_block_tokens) == len(token_ids)
        assert parent_hash is None or parent_hash in self.blocks
        self.blocks |= dict.fromkeys(block_hashes, (scope["cache_salt"], scope["lora_name"]))

    def publish_removed(self, block_hashes: list[int]) -> None:
        for name in block_hashes:
            del self.blocks[name]

    def count(self, salt: str | None = None, adapter: str | None = None) -> int:
        return list(self.blocks.values()).count((salt, adapter))


@asynccontextmanager
async def started(settings: MockSettings | None = None) -> AsyncIterator[tuple[DynamoWorker, FakeDeployment]]:
    deployment = FakeDeployment()
    worker = DynamoWorker(MockEngine(settings or MockSettings()), deployment=deployment)
    await worker.start()
    try:
        yield worker, deployment
    finally:
        await worker.close()


async def test_an_adapter_is_shown_once_loaded_and_hidden_before_it_goes(tmp_path: Path) -> None:
    async with started() as (worker, deployment):
        await worker.load_adapter("a", write_adapter(tmp_path / "a"))
        assert deployment.shown == {"a"}
        await worker.unload_adapter("a")
        assert deployment.log == ["show a", "hide a"]


async def test_a_load_that_could_not_be_shown_is_an_error_and_asking_again_repairs_it(tmp_path: Path) -> None:
    async with started() as (worker, deployment):
        path = write_adapter(tmp_path / "a")
        deployment.fault = EngineFailed("no lease")
        with pytest.raises(EngineFailed, match="no lease"):
            await worker.load_adapter("a", path)
        await worker.load_adapter("a", path)
        assert deployment.shown == {"a"}


async def test_an_adapter_that_cannot_be_hidden_stays_loaded(tmp_path: Path) -> None:
    async with started() as (worker, deployment):
        await worker.load_adapter("a", write_adapter(tmp_path / "a"))
        deployment.fault = EngineFailed("no lease")
        with pytest.raises(EngineFailed, match="no lease"):
            await worker.unload_adapter("a")
        assert worker.adapter_table is not None
        assert worker.adapter_table.serves("a")


async def test_an_unknown_adapter_cannot_be_loaded_nor_shown(tmp_path: Path) -> None:
    async with started() as (worker, deployment):
        with pytest.raises(RollplaneError):
            await worker.load_adapter("a", str(tmp_path / "nowhere"))
        assert deployment.log == []


async def test_a_lost_deployment_is_a_dead_worker() -> None:
    async with started() as (worker, deployment):
        assert (await worker.health()).alive
        deployment.trouble = "the lease is gone"
        health = await worker.health()
        assert (health.alive, health.reason) == (False, "the lease is gone")


async def test_the_deployment_is_left_before_the_engine_stops() -> None:
    async with started() as (_, deployment):
        pass
    assert deployment.log == ["leave", "close"]


async def test_the_description_names_the_workers_own_administration() -> None:
    async with started() as (worker, _):
        described = worker.description()
        assert described["world_size"] == 1
        assert "pause_generation" in described["routes"]
        assert described["system_url"] == described["admin_base_url"] == worker.settings.system_url


@asynccontextmanager
async def pumped(worker: DynamoWorker) -> AsyncIterator[FakeIndex]:
    index = FakeIndex()
    pump = KvPump(worker, index, scopes=worker.scopes, block_tokens=16)
    running = asyncio.create_task(pump.run())
    try:
        yield index
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def ask(worker: DynamoWorker, **fields: Any) -> None:
    await answer(worker, make_request(PROMPT, max_tokens=1, fields=fields))


async def test_blocks_are_told_under_what_the_caller_sent(tmp_path: Path) -> None:
    async with started() as (worker, _), pumped(worker) as index:
        await worker.load_adapter("a", write_adapter(tmp_path / "a"))
        await ask(worker)
        await ask(worker, cache_salt="v7")
        await ask(worker, model="a")
        await until(lambda: (index.count(), index.count("v7"), index.count(None, "a")) == (3, 3, 3))


async def test_a_new_version_leaves_nothing_told_of_the_old_one() -> None:
    async with started() as (worker, _), pumped(worker) as index:
        await ask(worker)
        await until(lambda: index.count() == 3)
        await worker.set_policy_version("v1")
        await until(lambda: index.count() == 0)
        await ask(worker)
        await until(lambda: index.count() == 3)


async def test_a_replaced_adapter_leaves_nothing_told(tmp_path: Path) -> None:
    async with started() as (worker, _), pumped(worker) as index:
        await worker.load_adapter("a", write_adapter(tmp_path / "1"))
        await ask(worker, model="a")
        await until(lambda: index.count(None, "a") == 3)
        await worker.load_adapter("a", write_adapter(tmp_path / "2", fill=2.0))
        await until(lambda: index.count(None, "a") == 0)


async def test_a_reset_is_taken_back_whole() -> None:
    async with started() as (worker, _), pumped(worker) as index:
        await ask(worker)
        await until(lambda: index.count() == 3)
        await worker.flush_cache()
        await until(lambda: index.count() == 0)
        await ask(worker)
        await until(lambda: index.count() == 3)


async def test_the_oldest_salts_are_forgotten_and_their_blocks_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplane.dynamo.scopes.MAX_SALTS", 3)
    async with started() as (worker, _):
        for salt in ("one", "two", "three"):
            await ask(worker, cache_salt=salt)
        await ask(worker)
        async with pumped(worker) as index:
            await until(lambda: len(index.blocks) == 9)
            assert [index.count(salt) for salt in (None, "one", "two", "three")] == [3, 0, 3, 3]


@pytest.mark.parametrize("name", ["generate", "a.b", "a..c", "a.b.rl"])
def test_an_endpoint_is_three_names_and_not_the_administrations(name: str) -> None:
    with pytest.raises(InvalidRequest, match="runtime_endpoint"):
        rl_endpoint_of(name)


def test_the_administration_is_beside_the_endpoint() -> None:
    assert rl_endpoint_of("dynamo.backend.generate") == "dynamo.backend.rl"


def test_dynamos_own_system_server_is_on_loopback_unless_told_otherwise() -> None:
    assert check_environment({}) == {"DYN_SYSTEM_HOST": "127.0.0.1"}
    assert check_environment({"DYN_SYSTEM_HOST": "0.0.0.0", "DYN_SYSTEM_PORT": "9090"}) == {}


def test_a_system_port_that_dynamo_cannot_read_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 32767"):
        check_environment({"DYN_SYSTEM_PORT": "40000"})


@pytest.mark.parametrize(("asked", "has", "found"), [(None, None, 16), (32, None, 32), (None, 32, 32), (32, 32, 32)])
def test_a_model_is_registered_with_its_engines_block_size_or_the_one_that_was_set(
    asked: int | None, has: int | None, found: int
) -> None:
    runtime = Runtime(DynamoSettings(block_tokens=asked), model_path="unread")
    runtime.about(info(block_tokens=has))
    assert runtime.block_tokens == found


def test_a_block_size_that_the_engine_contradicts_is_refused() -> None:
    runtime = Runtime(DynamoSettings(block_tokens=16), model_path="unread")
    with pytest.raises(InvalidRequest, match=r"dynamo\.block_tokens is 16, the engine's KV blocks have 32"):
        runtime.about(info(block_tokens=32))


def info(**facts: Any) -> EngineInfo:
    return EngineInfo(
        engine="mock", model="m", max_model_len=64, vocab_bound=8, max_num_seqs=1,
        capabilities=Capabilities(logprobs_mode="raw"), **facts,
    )  # fmt: skip
