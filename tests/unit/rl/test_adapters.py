import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.unit.rl.fakes import FakeHost
from tests.waiting import until

from rollplane.engines.adapter_files import inspect_adapter
from rollplane.errors import Conflict, EngineFailed, InvalidRequest, NotFound
from rollplane.identity import adapter_digest
from rollplane.protocol.info import LoraCapability
from rollplane.rl.adapters import AdapterTable


def write_adapter(path: Path, *, rank: int = 2, fill: float = 1.0, declared: int | None = None) -> str:
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            "base_model.model.q_proj.lora_A.weight": np.full((rank, 4), fill, dtype=np.float32),
            "base_model.model.q_proj.lora_B.weight": np.full((4, rank), fill, dtype=np.float32),
        },
        path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": declared or rank, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def table(host: FakeHost, *, slots: int = 4) -> AdapterTable:
    return AdapterTable(host, capability=LoraCapability(max=slots, rank=8))


async def test_a_reload_flips_the_name_at_once_and_keeps_the_old_generation_for_its_lease(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host)
    await adapters.load("a", write_adapter(tmp_path / "1", fill=1.0))
    async with adapters.lease("a") as old:
        await adapters.load("a", write_adapter(tmp_path / "2", fill=2.0))
        async with adapters.lease("a") as new:
            assert (old.engine_name, new.engine_name) == ("a@1", "a@2")
        assert set(host.loaded) == {"a@1", "a@2"}
        assert repr(adapters) == "<AdapterTable 2/4: a@1 draining (1 leases), a@2 ready>"
    await until(lambda: "a@1" not in host.loaded)
    assert [record.engine_name for record in adapters.records()] == ["a@2"]


async def test_the_same_contents_again_are_no_new_generation(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host)
    first = await adapters.load("a", write_adapter(tmp_path / "1"))
    again = await adapters.load("a", write_adapter(tmp_path / "2"))
    assert first is again
    assert host.log == ["load a@1"]


async def test_unloading_refuses_new_requests_at_once_and_ends_at_the_last_lease(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host)
    await adapters.load("a", write_adapter(tmp_path / "1"))
    async with adapters.lease("a"):
        unloading = asyncio.create_task(adapters.unload("a"))
        await until(lambda: adapters.current("a") is None)
        with pytest.raises(NotFound):
            async with adapters.lease("a"):
                pass
        assert host.loaded
    await unloading
    assert not host.loaded


async def test_a_refused_load_leaves_the_current_generation_serving(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host)
    await adapters.load("a", write_adapter(tmp_path / "1", fill=1.0))
    host.faults["load"] = EngineFailed("no")
    with pytest.raises(EngineFailed):
        await adapters.load("a", write_adapter(tmp_path / "2", fill=2.0))
    assert repr(adapters) == "<AdapterTable 1/4: a@1 ready>"


async def test_without_a_free_slot_the_swap_drains_first(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host, slots=1)
    await adapters.load("a", write_adapter(tmp_path / "1", fill=1.0))
    async with adapters.lease("a"):
        loading = asyncio.create_task(adapters.load("a", write_adapter(tmp_path / "2", fill=2.0)))
        await until(lambda: adapters.current("a") is None)
        assert host.log == ["load a@1"]
    await loading
    assert host.log == ["load a@1", "unload a@1", "load a@2"]


async def test_another_name_without_a_free_slot_is_a_conflict(tmp_path: Path) -> None:
    adapters = table(FakeHost(), slots=1)
    await adapters.load("a", write_adapter(tmp_path / "1"))
    with pytest.raises(Conflict, match="the limit is 1"):
        await adapters.load("b", write_adapter(tmp_path / "2"))


async def test_parallel_loads_and_unloads_of_one_name_end_in_a_state_that_one_order_explains(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host)
    paths = [write_adapter(tmp_path / str(i), fill=float(i)) for i in range(6)]
    calls = [adapters.load("a", path) for path in paths] + [adapters.unload("a") for _ in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(not isinstance(r, BaseException) or isinstance(r, NotFound) for r in results)
    current = adapters.current("a")
    live = {record.engine_name for record in adapters.records() if record.state == "ready"}
    assert live == ({current.engine_name} if current else set())
    for record in list(adapters.records()):
        assert record.engine_name in host.loaded


def test_a_rank_over_the_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="rank 16, the limit is 8"):
        inspect_adapter(write_adapter(tmp_path / "a", rank=16), max_rank=8)


def test_tensors_that_contradict_the_rank_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"lora_A\.weight has shape \[2, 4\], which is not of rank 4"):
        inspect_adapter(write_adapter(tmp_path / "a", rank=2, declared=4), max_rank=8)


def test_a_missing_file_is_not_found_so_that_callers_try_again(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"adapter_config\.json"):
        inspect_adapter(str(tmp_path / "nowhere"), max_rank=8)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = Path(write_adapter(tmp_path / "a"))
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(InvalidRequest, match="ends past the file"):
        inspect_adapter(str(path), max_rank=8)


@pytest.mark.parametrize("data", [b"", b"\x00" * 4, b"\xff" * 16, b"\x02\x00\x00\x00\x00\x00\x00\x00{}"])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, data: bytes) -> None:
    path = Path(write_adapter(tmp_path / "a"))
    (path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(InvalidRequest, match=r"adapter_model\.safetensors"):
        inspect_adapter(str(path), max_rank=8)


def test_the_streamed_digest_is_the_adapter_identity(tmp_path: Path) -> None:
    path = Path(write_adapter(tmp_path / "a"))
    files = [(name, (path / name).read_bytes()) for name in ("adapter_config.json", "adapter_model.safetensors")]
    assert inspect_adapter(str(path), max_rank=8).digest == adapter_digest(files)
