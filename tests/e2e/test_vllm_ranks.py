"""The ranks of a vLLM engine in a real gloo group, without vLLM: what they write, and how their calls end."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from rollplane.client.weights import manifest_of
from rollplane.engines.collective import Collective, open_store
from rollplane.engines.vllm.group_extension import GroupExtension
from rollplane.protocol.broadcast import TransferGroup

BOUND_S = 20.0
TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.full((5,), 7, dtype=torch.bfloat16),
    "c": torch.arange(3, dtype=torch.int8),
    "empty": torch.zeros(0, 4),
}


class Rank(GroupExtension):
    """A vLLM worker as far as a group sees it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.device = torch.device("cpu")


def answered(rank: Rank) -> dict[str, str]:
    """The answer to its last call, once there is one."""
    ends = time.monotonic() + BOUND_S
    while not (answer := rank.rollplane_group_answer()):
        assert time.monotonic() < ends, "no answer in time"
        threading.Event().wait(0.005)
    return answer


@contextlib.contextmanager
def group_of(*ranks: Rank) -> Iterator[Collective]:
    """A trainer and these ranks, joined."""
    store = open_store("127.0.0.1", 0, is_master=True, deadline_s=BOUND_S)
    group = TransferGroup(master_address="127.0.0.1", master_port=store.port, rank_offset=1, world_size=1 + len(ranks))
    for rank in ranks:
        rank.rollplane_join_group(msgspec.json.encode(group).decode(), BOUND_S)
    trainer = Collective(
        store, host="127.0.0.1", name=group.group_name, rank=0, world_size=group.world_size, deadline_s=BOUND_S
    )
    try:
        assert [answered(rank) for rank in ranks] == [{"done": ""}] * len(ranks)
        yield trainer
    finally:
        trainer.close()
        for rank in ranks:
            rank.rollplane_leave_group()


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(BOUND_S)


def manifest(bucket_bytes: int = 32) -> Any:
    return manifest_of(TENSORS, bucket_bytes=bucket_bytes)


def begin(rank: Rank, directory: Path, deadline_s: float = BOUND_S) -> None:
    rank.rollplane_receive_weights(msgspec.json.encode(manifest()).decode(), str(directory), deadline_s)


def test_the_first_rank_writes_what_was_sent_and_the_others_take_part(tmp_path: Path) -> None:
    ranks = [Rank(0), Rank(1)]
    with group_of(*ranks) as trainer:
        for rank in ranks:
            (tmp_path / str(rank.rank)).mkdir()
            begin(rank, tmp_path / str(rank.rank))
        in_thread(lambda: trainer.send(manifest(), TENSORS, deadline_s=BOUND_S))
        assert [answered(rank) for rank in ranks] == [{"done": ""}] * 2

    found: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "0").iterdir()):
        found.update(load_file(file))
    assert list((tmp_path / "1").iterdir()) == []
    assert sorted(found) == sorted(TENSORS)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_a_silent_trainer_ends_a_receive_at_its_deadline(tmp_path: Path) -> None:
    rank = Rank(0)
    with group_of(rank):
        began = time.monotonic()
        begin(rank, tmp_path, deadline_s=0.3)
        answer = answered(rank)

    assert answer["error"] == "DeadlineExceeded"
    assert time.monotonic() - began < 5


def test_leaving_does_not_wait_for_a_receive_which_ends_within_its_deadline(tmp_path: Path) -> None:
    rank = Rank(0)
    with group_of(rank):
        begin(rank, tmp_path, deadline_s=0.5)
        member: Any = rank._rollplane_member
        rank.rollplane_leave_group()
        member._call.exception(BOUND_S)

    assert rank.rollplane_group_answer() == {"error": "EngineFailed", "message": "this rank is in no weight group"}
    rank.rollplane_leave_group()


def test_a_trainer_that_is_not_there_ends_a_join_at_its_deadline() -> None:
    rank = Rank(0)
    group = TransferGroup(master_address="127.0.0.1", master_port=9, rank_offset=1, world_size=2)
    rank.rollplane_join_group(msgspec.json.encode(group).decode(), 0.5)

    assert answered(rank)["error"] in ("DeadlineExceeded", "EngineFailed")


def test_a_join_that_was_called_off_ends_before_its_deadline() -> None:
    rank = Rank(0)
    store = open_store("127.0.0.1", 0, is_master=True, deadline_s=BOUND_S)
    group = TransferGroup(master_address="127.0.0.1", master_port=store.port, rank_offset=1, world_size=2)
    rank.rollplane_join_group(msgspec.json.encode(group).decode(), 600.0)
    member: Any = rank._rollplane_member

    rank.rollplane_leave_group()

    assert member._call.exception(BOUND_S) is not None


def test_a_file_that_cannot_be_written_is_an_answer(tmp_path: Path) -> None:
    rank = Rank(0)
    with group_of(rank) as trainer:
        begin(rank, tmp_path / "absent")
        with contextlib.suppress(Exception):  # whether the sender hears of it depends on who was first
            in_thread(lambda: trainer.send(manifest(), TENSORS, deadline_s=1.0))
        assert answered(rank)["error"] == "EngineFailed"
