"""Adapters on vLLM's own Rust server and a real engine on the CPU, which read them from below one directory."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import rule
from tests.bad_files import bad_adapters
from tests.models.tiny import shared_model
from tests.policy_machine import ADAPTERS, TIE_NATS, ControlMachine, Kind, run_machine
from tests.real import processes
from tests.vllm.reference import Reference

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.errors import Conflict, InvalidRequest, NotFound
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import CHECKS, Subject, answer, make_request, run_check
from rollplane.worker import Worker

pytestmark = pytest.mark.timeout(300)

VOCABULARY = 1024
PROMPT = [300 + 17 * i for i in range(40)]
SLOTS, KEPT = 8, 9
"""How many adapters the server runs at once, and how many it keeps beside the model."""
LIVE = 3
"""How many the machine's worker loads: a server on a CPU gives the base model's requests whatever is in its last slot."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one directory that the server reads adapters from."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def adapters(root: Path) -> list[str]:
    base = str(shared_model("qwen3"))
    made = [shared_model("lora", base=base, seed=seed) for seed in range(1, ADAPTERS + 1)]
    return [str(shutil.copytree(path, root / f"v{i}")) for i, path in enumerate(made)]


@pytest.fixture(scope="module")
def server(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    arguments = ["--dtype", "float32", "--enable-lora", "--max-loras", str(SLOTS), "--max-cpu-loras", str(KEPT)]
    no_limit = ["--max-logprobs", "-1"]  # for the one test that asks for all; frontend and engine check it each
    environment = {
        "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(root),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    with processes.vllm_rs(
        shared_model("qwen3"),
        log,
        arguments=[*arguments, *no_limit],
        frontend_arguments=no_limit,
        environment=environment,
    ) as found:
        yield found


@pytest.fixture
async def engine(server: processes.Server) -> AsyncIterator[GrpcEngine]:
    engine = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, start_timeout_s=20, max_logprobs=VOCABULARY))
    await engine.start()
    yield engine
    await engine.close()


async def test_the_promise_on_adapters(engine: GrpcEngine, adapters: list[str]) -> None:
    (check,) = [check for check in CHECKS if check.__name__ == "adapters_load_serve_and_go"]

    assert await run_check(check, Subject(engine=engine, adapters=adapters[:2])) is None


async def test_the_slots_are_the_servers(engine: GrpcEngine) -> None:
    assert engine.info.capabilities.lora is not None
    assert engine.info.capabilities.lora.max == SLOTS


async def ask(engine: GrpcEngine, name: str | None) -> GenerateResponse:
    return await answer(engine, make_request(PROMPT, max_tokens=12, temperature=0.0, fields={"adapter": name}))


async def with_adapter(engine: GrpcEngine, name: str | None) -> list[int]:
    return (await ask(engine, name)).choices[0].token_ids.tolist()


async def test_adapters_change_what_is_made_each_in_its_own_way(engine: GrpcEngine, adapters: list[str]) -> None:
    base = await with_adapter(engine, None)
    for i in (0, 1):
        await engine.load_adapter(f"p@{i}", adapters[i])
    try:
        assert sorted(await engine.loaded_adapters()) == ["p@0", "p@1"]
        made = [await with_adapter(engine, f"p@{i}") for i in (0, 1)]
        assert len({tuple(each) for each in (base, *made)}) == 3
        assert await with_adapter(engine, None) == base
    finally:
        for i in (0, 1):
            await engine.unload_adapter(f"p@{i}")
    assert await engine.loaded_adapters() == []


async def test_the_base_model_beside_as_many_adapters_as_leave_the_servers_last_slot_empty(
    server: processes.Server, engine: GrpcEngine, adapters: list[str], root: Path
) -> None:
    for path in bad_adapters(root / "unfit", adapters[0]):  # vLLM keeps a slot for one whose width it refuses
        with pytest.raises((InvalidRequest, NotFound)):
            await engine.load_adapter("unfit", path)
    worker = Worker(GrpcEngine(GrpcSettings(endpoint=server.grpc_target, start_timeout_s=20, max_loras=SLOTS - 1)))
    await worker.start()
    names = [f"beside-{i}" for i in range(SLOTS - 1)]
    paths = [adapters[i % ADAPTERS] for i in range(SLOTS - 1)]
    models = [None, *names] * 2
    greedy = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    try:
        for name, path in zip(names, paths, strict=True):
            await worker.load_adapter(name, path)
        with pytest.raises(Conflict, match=f"the limit is {SLOTS - 1}"):
            await worker.load_adapter("one-more", adapters[0])
        requests = [make_request(PROMPT, fields={"model": model}, **greedy) for model in models]
        answers = await asyncio.gather(*(answer(worker, request) for request in requests))
    finally:
        for name in names:
            await worker.unload_adapter(name)
        await worker.close()

    references = [Reference(shared_model("qwen3"), adapter=path) for path in (None, *paths)] * 2
    for reference, found in zip(references, answers, strict=True):
        reference.check(PROMPT, found)


async def test_adapters_that_cannot_be_loaded_are_refused_and_the_server_lives(
    engine: GrpcEngine, adapters: list[str], tmp_path: Path
) -> None:
    await engine.load_adapter("q@1", adapters[0])
    try:
        with pytest.raises(Conflict, match="already loaded"):
            await engine.load_adapter("q@1", adapters[1])
    finally:
        await engine.unload_adapter("q@1")
    with pytest.raises(NotFound):
        await engine.load_adapter("q@2", f"{adapters[0]}-none")
    with pytest.raises(InvalidRequest, match="absolute"):
        await engine.load_adapter("q@3", "relative")
    shutil.copytree(adapters[0], tmp_path / "outside")
    with pytest.raises(InvalidRequest):
        await engine.load_adapter("q@4", str(tmp_path / "outside"))
    await engine.unload_adapter("never-loaded")

    assert await engine.loaded_adapters() == []
    with pytest.raises(NotFound):
        await with_adapter(engine, "never-loaded")
    await ask(engine, None)


async def test_every_alternative_comes_from_a_server_without_a_limit(engine: GrpcEngine) -> None:
    found = (await answer(engine, make_request(PROMPT, max_tokens=2, temperature=0.0, logprobs=-1))).choices[0]

    assert found.logprobs is not None
    alternatives = found.logprobs.alternatives
    assert alternatives is not None
    rows = [alternatives.ids[a:b] for a, b in itertools.pairwise(alternatives.offsets.tolist())]
    values = [alternatives.values[a:b] for a, b in itertools.pairwise(alternatives.offsets.tolist())]
    assert [sorted(row.tolist()) for row in rows] == [list(range(VOCABULARY))] * 2
    for i, row in enumerate(rows):
        assert np.exp(values[i].astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-4)
        assert values[i][row == found.token_ids[i]] == pytest.approx(found.logprobs.values[i], abs=1e-4)


# -- every order of calls --------------------------------------------------------------------------------------------


class FreshEngine(GrpcEngine):
    """A new engine over the server that was there before: no adapter, not paused, under the first label."""

    async def start(self) -> None:
        await super().start()
        for name in await self.control.loras():
            await self.unload_adapter(name)
        await self.pause("abort", clear_cache=True)
        await self.resume()
        await self.set_policy_version("w0")


class VllmRsKind(Kind):
    target: str

    def make(self) -> FreshEngine:
        return FreshEngine(GrpcSettings(endpoint=self.target, start_timeout_s=20, max_loras=LIVE))

    async def differing(
        self, content: int, adapter: int | None, tokens: list[int], first: int, end: int, prompt: list[int]
    ) -> list[str]:
        key = -1 if adapter is None else adapter
        if key not in self.references:
            path = None if adapter is None else self.adapters[adapter]
            self.references[key] = Reference(self.checkpoints[content], adapter=path)
        stop = len(prompt) + end
        if first >= end:
            return []
        made = tokens[len(prompt) : stop]
        rows = self.references[key].logprobs(prompt, made)[first:]
        gaps = rows.max(axis=1) - rows[np.arange(end - first), made[first:]]
        return [
            f"output {first + i} is {made[first + i]}, by {gap:.2g} nats too unlikely"
            for i, gap in enumerate(gaps)
            if gap > TIE_NATS
        ]


class OverVllmRs(ControlMachine):
    """What the server's Control offers: pause, resume, abort, adapters, labels. A label changes no weights."""

    unary_spans = False

    @rule(i=st.integers(0, 2))
    def relabel(self, i: int) -> None:
        self.call(self.worker.set_policy_version(f"w{i}"))

    def content(self, version: str) -> int:
        assert version in ("w0", "w1", "w2")
        return 0


def test_a_worker_over_the_server_under_every_order_of_calls(
    server: processes.Server, root: Path, adapters: list[str]
) -> None:
    bad = bad_adapters(root / "bad", adapters[0])
    kind = VllmRsKind([str(shared_model("qwen3"))], adapters, bad_adapters=bad)
    kind.target = server.grpc_target
    run_machine(OverVllmRs, kind, examples=4, steps=20, shrinks=False)


# -- last: a name stays stuck in the server --------------------------------------------------------------------------


async def test_a_name_that_the_server_cannot_drop_after_eviction_counts_as_stuck(
    engine: GrpcEngine, adapters: list[str]
) -> None:
    names = [f"many@{i}" for i in range(KEPT + 1)]  # one more than the server keeps
    for i, name in enumerate(names):
        await engine.load_adapter(name, adapters[i % 2])
        await with_adapter(engine, name)
    for name in names:
        await engine.unload_adapter(name)

    assert set(names).isdisjoint(await engine.loaded_adapters())
    assert (await engine.health()).counters["stuck_adapters"] == 1
    assert [name for name in await engine.control.loras() if name in names] == [names[0]]
