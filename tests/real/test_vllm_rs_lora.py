"""Adapters on vLLM's own Rust server and a real engine on the CPU, which read them from below one directory."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.models.tiny import shared_model
from tests.real import processes

from rollplane.engines.grpc.engine import GrpcEngine
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.errors import Conflict, InvalidRequest, NotFound
from rollplane.protocol.response import GenerateResponse
from rollplane.testing import CHECKS, Subject, answer, make_request, run_check

pytestmark = pytest.mark.timeout(120)

PROMPT = [300 + 17 * i for i in range(40)]


@pytest.fixture(scope="module")
def adapters() -> list[str]:
    base = str(shared_model("qwen3"))
    return [str(shared_model("lora", base=base, seed=seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def server(adapters: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Server]:
    log = tmp_path_factory.mktemp("vllm-rs") / "log"
    arguments = ["--dtype", "float32", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4"]
    environment = {
        "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(Path(adapters[0]).parent),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    with processes.vllm_rs(shared_model("qwen3"), log, arguments=arguments, environment=environment) as found:
        yield found


@pytest.fixture
async def engine(server: processes.Server) -> AsyncIterator[GrpcEngine]:
    engine = GrpcEngine(GrpcSettings(endpoint=server.grpc_target, start_timeout_s=20))
    await engine.start()
    yield engine
    await engine.close()


async def test_the_promise_on_adapters(engine: GrpcEngine, adapters: list[str]) -> None:
    (check,) = [check for check in CHECKS if check.__name__ == "adapters_load_serve_and_go"]

    assert await run_check(check, Subject(engine=engine, adapters=adapters)) is None


async def test_the_slots_are_the_servers(engine: GrpcEngine) -> None:
    assert engine.info.capabilities.lora is not None
    assert engine.info.capabilities.lora.max == 2


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
    (tmp_path / "outside").mkdir()
    with pytest.raises(InvalidRequest):
        await engine.load_adapter("q@4", str(tmp_path / "outside"))
    await engine.unload_adapter("never-loaded")

    assert await engine.loaded_adapters() == []
    with pytest.raises(NotFound):
        await with_adapter(engine, "never-loaded")
    await ask(engine, None)
