import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.unit.rl.fakes import FakeHost
from tests.waiting import until

from rollplane.engines.adapter_files import inspect_adapter
from rollplane.errors import Conflict, DeadlineExceeded, EngineFailed, InvalidRequest, NotFound
from rollplane.identity import adapter_digest
from rollplane.protocol.info import LoraCapability
from rollplane.rl.adapters import AdapterTable
from rollplane.rl.base import Operation


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


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 1025])
async def test_a_name_that_no_request_could_ask_for_is_refused(name: str, tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host)
    with pytest.raises(InvalidRequest, match="lora_name must be 1 to 1024 printable characters"):
        await adapters.load(name, write_adapter(tmp_path / "a"))
    assert adapters.records() == []


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


async def test_requests_for_a_name_that_swaps_without_a_free_slot_wait_for_the_new_generation(tmp_path: Path) -> None:
    adapters = table(FakeHost(), slots=1)
    await adapters.load("a", write_adapter(tmp_path / "1", fill=1.0))

    async def leased() -> str:
        async with adapters.lease("a") as record:
            return record.engine_name

    async with adapters.lease("a"):
        loading = asyncio.create_task(adapters.load("a", write_adapter(tmp_path / "2", fill=2.0)))
        await until(lambda: adapters.current("a") is None)
        waiting = asyncio.create_task(leased())
        assert adapters.serves("a")
    await loading
    assert await waiting == "a@2"


async def test_a_swap_that_does_not_drain_in_time_leaves_the_old_generation_serving(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host, slots=1)
    await adapters.load("a", write_adapter(tmp_path / "1", fill=1.0))
    async with adapters.lease("a"):
        with pytest.raises(DeadlineExceeded):
            await adapters.load("a", write_adapter(tmp_path / "2", fill=2.0), operation=Operation(deadline_s=0.01))
        assert repr(adapters) == "<AdapterTable 1/1: a@1 ready (1 leases)>"
        async with adapters.lease("a") as record:
            assert record.engine_name == "a@1"
    assert host.log == ["load a@1"]
    await adapters.load("a", write_adapter(tmp_path / "3", fill=3.0))
    assert list(host.loaded) == ["a@2"]


async def test_a_refused_load_that_had_made_room_brings_the_old_contents_back(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host, slots=1)
    old = write_adapter(tmp_path / "1", fill=1.0)
    await adapters.load("a", old)
    host.faults["load"] = EngineFailed("no")
    with pytest.raises(EngineFailed, match="no"):
        await adapters.load("a", write_adapter(tmp_path / "2", fill=2.0))
    current = adapters.current("a")
    assert current is not None
    assert (current.path, current.state) == (old, "ready")
    assert list(host.loaded) == [current.engine_name]


async def test_an_unload_that_the_engine_fails_stays_pending_and_asking_again_mends_it(tmp_path: Path) -> None:
    host = FakeHost(faults={"unload": EngineFailed("connection lost")})
    adapters = table(host)
    await adapters.load("a", write_adapter(tmp_path / "1"))
    with pytest.raises(EngineFailed, match="did not drop adapter 'a@1' and is asked again: connection lost"):
        await adapters.unload("a")
    [record] = adapters.records()
    assert (record.state, record.trouble) == ("draining", "connection lost")
    with pytest.raises(NotFound):
        async with adapters.lease("a"):
            pass
    assert (await adapters.unload("a")).state == "gone"
    assert (host.loaded, adapters.records()) == ({}, [])


async def test_an_unload_that_the_engine_fails_is_tried_again_by_itself(tmp_path: Path) -> None:
    host = FakeHost(faults={"unload": EngineFailed("connection lost")})
    adapters = table(host)
    await adapters.load("a", write_adapter(tmp_path / "1", fill=1.0))
    await adapters.load("a", write_adapter(tmp_path / "2", fill=2.0))
    async with asyncio.timeout(5):
        while "a@1" in host.loaded:  # noqa: ASYNC110 - the second try comes by time
            await asyncio.sleep(0.005)
    await until(lambda: repr(adapters) == "<AdapterTable 1/4: a@2 ready>")


async def test_a_request_that_is_still_leaving_its_engine_is_nobodys_trouble(tmp_path: Path) -> None:
    host = FakeHost(faults={"unload": Conflict("used by 1 request")})
    adapters = table(host)
    await adapters.load("a", write_adapter(tmp_path / "1"))
    assert (await adapters.unload("a")).state == "gone"
    assert host.log.count("unload a@1") == 2


async def test_an_unload_past_its_deadline_goes_on_draining_and_frees_its_slot_at_the_last_lease(
    tmp_path: Path,
) -> None:
    host = FakeHost()
    adapters = table(host)
    await adapters.load("a", write_adapter(tmp_path / "1"))
    async with adapters.lease("a"):
        with pytest.raises(DeadlineExceeded):
            await adapters.unload("a", operation=Operation(deadline_s=0.01))
        assert repr(adapters) == "<AdapterTable 1/4: a@1 draining (1 leases)>"
        again = asyncio.create_task(adapters.unload("a"))
        await asyncio.sleep(0)
        assert host.loaded
    assert (await again).state == "gone"
    assert not host.loaded


async def test_a_load_that_was_called_off_leaves_nothing_in_the_engine(tmp_path: Path) -> None:
    gate = asyncio.Event()

    class SlowHost(FakeHost):
        async def load_adapter(self, engine_name: str, path: str) -> None:
            await super().load_adapter(engine_name, path)
            await gate.wait()

    host = SlowHost()
    adapters = table(host)
    with pytest.raises(DeadlineExceeded):
        await adapters.load("a", write_adapter(tmp_path / "1"), operation=Operation(deadline_s=0.05))
    await until(lambda: not host.loaded)
    await until(lambda: not adapters.records())
    gate.set()
    assert (await adapters.load("a", write_adapter(tmp_path / "1"))).engine_name == "a@2"


async def test_loading_the_same_contents_again_mends_an_adapter_that_the_engine_lost(tmp_path: Path) -> None:
    host = FakeHost()
    adapters = table(host)
    path = write_adapter(tmp_path / "1")
    await adapters.load("a", path)
    host.loaded.clear()
    record = await adapters.load("a", path)
    assert (record.engine_name, list(host.loaded)) == ("a@2", ["a@2"])


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


@pytest.mark.parametrize(
    ("targets", "refused"),
    [
        (["k_proj", "v_proj"], True),
        (["proj"], True),
        (["q_proj", "up_proj"], False),
        ("all-linear", False),
        ([], False),
    ],
)
def test_a_list_of_target_modules_that_no_tensor_is_of_is_refused(
    tmp_path: Path, targets: list[str] | str, refused: bool
) -> None:
    path = write_adapter(tmp_path / "a")
    config = {"peft_type": "LORA", "r": 2, "target_modules": targets}
    (Path(path) / "adapter_config.json").write_text(json.dumps(config))
    if refused:
        with pytest.raises(InvalidRequest, match=r"no tensor is of the target_modules .*; there is base_model"):
            inspect_adapter(path, max_rank=8)
    else:
        assert inspect_adapter(path, max_rank=8).rank == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_values_that_are_not_finite_are_refused_by_the_tensors_name(tmp_path: Path, value: float, dtype: Any) -> None:
    path = Path(write_adapter(tmp_path / "a"))
    good = np.full((2, 4), np.finfo(dtype).max, dtype=dtype)
    bad = np.zeros((4, 2), dtype=dtype)
    bad[3, 1] = value
    name = "base_model.model.q_proj.lora_{}.weight"
    save_file({name.format("A"): good, name.format("B"): bad}, path / "adapter_model.safetensors")
    with pytest.raises(InvalidRequest, match=r"q_proj\.lora_B\.weight holds values that are not finite"):
        inspect_adapter(str(path), max_rank=8)


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


HOSTILE_HEADERS: list[Any] = [
    [],
    {"t": []},
    {"t": {"dtype": "F32", "data_offsets": [0, 4]}},
    {"t": {"dtype": "F32", "shape": "4", "data_offsets": [0, 4]}},
    {"t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    {"t": {"dtype": "F32", "shape": [1], "data_offsets": ["0", 4]}},
    {"t": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
    {"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
    {"m.lora_A.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}},
    {"m.lora_B.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    {"__metadata__": {"format": "pt"}},
]


@pytest.mark.parametrize("header", HOSTILE_HEADERS, ids=lambda header: json.dumps(header)[:60])
def test_a_header_that_says_nonsense_is_refused_and_crashes_nothing(tmp_path: Path, header: Any) -> None:
    path = Path(write_adapter(tmp_path / "a"))
    encoded = json.dumps(header).encode()
    (path / "adapter_model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(64))
    with pytest.raises(InvalidRequest, match=r"adapter_model\.safetensors"):
        inspect_adapter(str(path), max_rank=8)


@pytest.mark.parametrize(
    "config",
    [
        {"rank_pattern": "all"},
        {"rank_pattern": {"q_proj": "4"}},
        {"target_modules": 3},
        {"target_modules": [3]},
        {"r": True},
        {"r": 0},
        {"r": "8"},
        {"peft_type": "IA3"},
    ],
    ids=str,
)
def test_a_config_that_says_nonsense_is_refused_and_crashes_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    path = Path(write_adapter(tmp_path / "a"))
    good = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(good | config))
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json"):
        inspect_adapter(str(path), max_rank=8)
