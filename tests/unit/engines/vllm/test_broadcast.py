"""vLLM's ranks in a trainer's group, seen from its API process: calls that cannot wait, and what becomes of them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rollplane.engines.vllm.broadcast import Receiver, checkpoint_of, offered_backends
from rollplane.engines.vllm.checkpoints import Checkpoint
from rollplane.errors import Conflict, DeadlineExceeded, EngineFailed, InvalidRequest
from rollplane.protocol.admin import StagedWeights
from rollplane.protocol.broadcast import Manifest, TensorSpec, TransferGroup

GROUP = TransferGroup(master_address="trainer", master_port=29500, rank_offset=1, world_size=3)
MANIFEST = Manifest(tensors=[TensorSpec(name="w", dtype="bfloat16", shape=[2, 3])])


class FakeEngine:
    """Two ranks that end a call after `looks` looks, with `answers`."""

    def __init__(self, *, looks: int = 2, answers: tuple[dict[str, str], ...] = ({"done": ""}, {"done": ""})) -> None:
        self.looks = looks
        self.answers = answers
        self.calls: list[str] = []
        self.asked: dict[str, Any] = {}
        self._left = 0

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        if method == "rollplane_group_answer":
            self._left -= 1
            return [{}, self.answers[1]] if self._left > 0 else list(self.answers)
        if method == "rollplane_backends":
            return [["gloo", "nccl"], ["gloo"]]
        self.calls.append(method.removeprefix("rollplane_"))
        self.asked = kwargs or {}
        self._left = self.looks
        return [None, None]


class FakePolicy:
    """Takes what it is given; `unfit` is refused before it is received."""

    good_path: str | None = None
    unfit = False

    async def ask(self, call: Any) -> Any:
        return await call

    def check_fits(self, checkpoint: Checkpoint, *, param: str) -> None:
        if self.unfit:
            raise InvalidRequest("unknown w", param=param)

    async def stage(self, path: str, *, param: str) -> StagedWeights:
        return StagedWeights(path=path, digest="d", tensors=1, bytes=12)


def receiver(tmp_path: Path, engine: FakeEngine) -> Receiver:
    return Receiver(engine, FakePolicy(), backends=["gloo"], root=str(tmp_path))  # type: ignore[arg-type]


def names(directory: Path) -> list[str]:
    return [str(path) for path in directory.iterdir()]


async def test_a_join_returns_when_every_rank_has_joined(tmp_path: Path) -> None:
    engine = FakeEngine(looks=4)
    joined = receiver(tmp_path, engine)

    await joined.join(GROUP, deadline_s=5.0)

    assert engine.calls == ["join_group"]
    assert msgspec.json.decode(engine.asked["group"], type=TransferGroup) == GROUP
    assert engine.asked["deadline_s"] == 5.0
    assert repr(joined) == "<Receiver weights>"
    with pytest.raises(Conflict, match="in weight group 'weights'"):
        await joined.join(GROUP, deadline_s=5.0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("DeadlineExceeded", DeadlineExceeded), ("EngineFailed", EngineFailed), ("KeyError", EngineFailed)],
)
async def test_a_ranks_error_is_ours_and_the_group_is_left(tmp_path: Path, name: str, kind: type[Exception]) -> None:
    engine = FakeEngine(answers=({"done": ""}, {"error": name, "message": "the trainer is gone"}))
    failed = receiver(tmp_path, engine)

    with pytest.raises(kind, match="the trainer is gone"):
        await failed.join(GROUP, deadline_s=5.0)

    assert engine.calls == ["join_group", "leave_group"]
    assert failed.group is None


async def test_a_rank_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplane.engines.vllm.broadcast._GRACE_S", 0.01)
    silent = receiver(tmp_path, FakeEngine(looks=10**6))

    async with asyncio.timeout(5):
        with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
            await silent.join(GROUP, deadline_s=0.05)

    assert silent.group is None


async def test_a_backend_that_some_rank_lacks_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequest, match="nccl backend does not work here; gloo do"):
        await receiver(tmp_path, engine).join(msgspec.structs.replace(GROUP, backend="nccl"), deadline_s=1.0)

    assert engine.calls == []


async def test_what_is_received_lies_on_files_until_it_is_forgotten(tmp_path: Path) -> None:
    engine = FakeEngine()
    joined = receiver(tmp_path, engine)
    await joined.join(GROUP, deadline_s=5.0)

    staged = await joined.receive(MANIFEST, deadline_s=5.0)

    assert engine.asked["directory"] == staged.path
    assert Path(staged.path).parent == tmp_path
    assert msgspec.json.decode(engine.asked["manifest"], type=Manifest) == MANIFEST
    joined.policy.good_path = staged.path  # type: ignore[misc]
    await joined.forget()
    assert names(tmp_path) == [staged.path]
    await joined.close()
    assert names(tmp_path) == []


async def test_a_receive_that_fails_leaves_nothing_but_the_weights_in_place(tmp_path: Path) -> None:
    engine = FakeEngine()
    joined = receiver(tmp_path, engine)
    await joined.join(GROUP, deadline_s=5.0)
    good = (await joined.receive(MANIFEST, deadline_s=5.0)).path
    joined.policy.good_path = good  # type: ignore[misc]
    engine.answers = ({"error": "EngineFailed", "message": "connection reset"}, {"done": ""})

    with pytest.raises(EngineFailed, match="connection reset"):
        await joined.receive(MANIFEST, deadline_s=5.0)

    assert names(tmp_path) == [good]


async def test_tensors_that_are_not_the_models_are_refused_before_anything_is_received(tmp_path: Path) -> None:
    engine = FakeEngine()
    joined = receiver(tmp_path, engine)
    await joined.join(GROUP, deadline_s=5.0)
    joined.policy.unfit = True  # type: ignore[attr-defined]

    with pytest.raises(InvalidRequest, match="unknown w") as refusal:
        await joined.receive(MANIFEST, deadline_s=5.0)

    assert refusal.value.param == "tensors"
    assert engine.calls == ["join_group"]
    assert joined.group == GROUP


async def test_receiving_and_leaving_without_a_group(tmp_path: Path) -> None:
    engine = FakeEngine()
    alone = receiver(tmp_path, engine)
    with pytest.raises(Conflict, match="no weight group"):
        await alone.receive(MANIFEST, deadline_s=1.0)
    await alone.leave()

    assert engine.calls == []


@pytest.mark.parametrize(
    ("parallel", "offered"),
    [
        ({"distributed_executor_backend": "mp"}, ["gloo"]),
        ({"distributed_executor_backend": "uni", "nnodes": 1}, ["gloo"]),
        ({"distributed_executor_backend": "mp", "nnodes": 2}, []),
        ({"distributed_executor_backend": "ray"}, []),
    ],
)
async def test_backends_of_every_rank_are_offered_where_all_are_on_this_machine(
    parallel: dict[str, Any], offered: list[str]
) -> None:
    engine: Any = FakeEngine()
    engine.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))

    assert await offered_backends(engine) == offered


def test_a_manifest_is_held_to_the_model_like_a_checkpoint() -> None:
    found = checkpoint_of(MANIFEST).tensors["w"]

    assert (found.dtype, found.shape, found.end - found.begin) == ("BF16", (2, 3), 12)
