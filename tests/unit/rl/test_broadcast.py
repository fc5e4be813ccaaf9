import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.rl.fakes import FakeReceiver
from tests.waiting import until

from rollplane.errors import Conflict, DeadlineExceeded, EngineFailed, InvalidRequest
from rollplane.protocol.admin import StagedWeights
from rollplane.protocol.broadcast import Manifest, TensorSpec, TransferGroup
from rollplane.protocol.info import Capabilities, EngineInfo
from rollplane.rl.base import Operation
from rollplane.rl.broadcast import TRANSITIONS, BroadcastControl
from rollplane.rl.weights import PolicyControl

GROUP = TransferGroup(master_address="trainer", master_port=29500, rank_offset=1, world_size=2)
MANIFEST = Manifest(tensors=[TensorSpec(name="w", dtype="float32", shape=[1])])


@dataclass
class FakeBroadcast(FakeReceiver):
    """Also receives by broadcast; in a group until it leaves."""

    in_group: bool = False
    received: list[str] = field(default_factory=lambda: ["first", "second", "third"])

    async def join_group(self, group: TransferGroup, *, deadline_s: float) -> None:
        await self._step("join")
        self.in_group = True

    async def receive_weights(self, manifest: Manifest, *, deadline_s: float) -> StagedWeights:
        await self._step("receive")
        return StagedWeights(path="broadcast", digest=self.received.pop(0), tensors=1, bytes=4)

    async def leave_group(self) -> None:
        await self._step("leave")
        self.in_group = False


def control(receiver: FakeBroadcast, **capabilities: Any) -> BroadcastControl:
    offered = {"weight_transfer": ["disk", "gloo"], **capabilities}
    info = EngineInfo(
        engine="fake", model="m", max_model_len=8, vocab_bound=8, max_num_seqs=1, capabilities=Capabilities(**offered)
    )
    return BroadcastControl(receiver, PolicyControl(receiver), info=info)


def test_every_state_of_the_table_leads_back_to_absent() -> None:
    for state in TRANSITIONS:
        seen, todo = {state}, [state]
        while todo:
            for following in TRANSITIONS[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        assert "absent" in seen


async def test_weights_are_received_while_tokens_are_made_and_pause_only_to_be_applied() -> None:
    receiver = FakeBroadcast()
    broadcast = control(receiver)
    report = await broadcast.init(GROUP)
    assert (report.active, report.ranks, report.world_size) == (True, [1], 2)
    update = await broadcast.update(MANIFEST, version="v1")
    assert receiver.log == ["join", "receive", "pause keep", "apply v1", "resume"]
    assert (update.policy_version, update.digest, broadcast.state) == ("v1", "first", "joined")
    assert (await broadcast.destroy()).active is False
    assert receiver.log[-1] == "leave"


async def test_a_second_group_while_one_is_active_is_a_conflict_and_leaves_the_first_alone() -> None:
    broadcast = control(FakeBroadcast())
    await broadcast.init(GROUP)
    with pytest.raises(Conflict, match="destroy it first"):
        await broadcast.init(TransferGroup(master_address="other", master_port=1, rank_offset=1, world_size=2))
    assert (await broadcast.update(MANIFEST, version="v1")).policy_version == "v1"


async def test_asking_again_by_the_same_name_joins_once_and_receives_once() -> None:
    receiver = FakeBroadcast()
    broadcast = control(receiver)
    joining = Operation(id="op", step=0)
    assert (await broadcast.init(GROUP, operation=joining)) == (await broadcast.init(GROUP, operation=joining))
    update = Operation(id="op", step=1)
    first = await broadcast.update(MANIFEST, version="v1", operation=update)
    assert await broadcast.update(MANIFEST, version="v1", operation=update) is first
    assert (receiver.log.count("join"), receiver.log.count("receive")) == (1, 1)
    with pytest.raises(Conflict, match="other arguments"):
        await broadcast.update(MANIFEST, version="v2", operation=update)


async def test_a_trainer_that_dies_leaves_the_old_version_serving_and_no_group() -> None:
    receiver = FakeBroadcast(faults={"receive": EngineFailed("connection closed by peer")})
    broadcast = control(receiver)
    await broadcast.init(GROUP)
    with pytest.raises(EngineFailed):
        await broadcast.update(MANIFEST, version="v1")
    assert (broadcast.state, receiver.in_group) == ("absent", False)
    assert (broadcast.policy.state, broadcast.policy.version) == ("ready", "v0")
    assert not any(step.startswith(("pause", "apply")) for step in receiver.log)
    await broadcast.init(GROUP)
    await broadcast.update(MANIFEST, version="v1")


async def test_a_silent_trainer_releases_the_worker_at_the_deadline() -> None:
    receiver = FakeBroadcast(gates={"receive": asyncio.Event()})
    broadcast = control(receiver)
    await broadcast.init(GROUP)
    with pytest.raises(DeadlineExceeded):
        await broadcast.update(MANIFEST, version="v1", operation=Operation(deadline_s=0.01))
    assert (broadcast.state, broadcast.policy.state, broadcast.policy.version) == ("absent", "ready", "v0")


async def test_a_trainer_that_never_comes_leaves_no_group() -> None:
    broadcast = control(FakeBroadcast(gates={"join": asyncio.Event()}))
    with pytest.raises(DeadlineExceeded):
        await broadcast.init(GROUP, operation=Operation(deadline_s=0.01))
    assert broadcast.state == "absent"


async def test_tensors_that_are_not_the_models_are_refused_and_the_group_stands() -> None:
    receiver = FakeBroadcast(faults={"receive": InvalidRequest("unknown x")})
    broadcast = control(receiver)
    await broadcast.init(GROUP)
    with pytest.raises(InvalidRequest):
        await broadcast.update(MANIFEST, version="v1")
    assert (broadcast.state, broadcast.policy.state) == ("joined", "ready")
    await broadcast.update(MANIFEST, version="v1")


@pytest.mark.parametrize("held", ["join", "receive"])
async def test_destroying_a_group_ends_what_is_under_way_in_it(held: str) -> None:
    receiver = FakeBroadcast(gates={held: asyncio.Event()})
    broadcast = control(receiver)
    joining = asyncio.create_task(broadcast.init(GROUP))
    work: asyncio.Task[Any] = joining
    if held == "receive":
        await joining
        work = asyncio.create_task(broadcast.update(MANIFEST, version="v1"))
    await until(lambda: held in receiver.log)
    await broadcast.destroy()
    with pytest.raises(Conflict, match="destroyed meanwhile"):
        await work
    assert (broadcast.state, broadcast.policy.state, broadcast.policy.version) == ("absent", "ready", "v0")


async def test_destroying_without_a_group_is_no_error() -> None:
    assert (await control(FakeBroadcast()).destroy()).active is False


async def test_what_was_staged_goes_into_place_by_its_digest_and_no_other() -> None:
    receiver = FakeBroadcast()
    broadcast = control(receiver)
    await broadcast.init(GROUP)
    staged = await broadcast.stage(MANIFEST)
    with pytest.raises(Conflict, match="no staged weights"):
        await broadcast.policy.apply_staged("f" * 64, version="v1")
    assert receiver.policy_version == "v0"
    report = await broadcast.policy.apply_staged(staged.digest, version="v1")
    assert (report.applied, report.digest) == (True, "first")
    assert (await broadcast.policy.apply_staged(staged.digest, version="v1")).applied is False


async def test_resume_answers_while_weights_are_received() -> None:
    gate = asyncio.Event()
    receiver = FakeBroadcast(gates={"receive": gate})
    broadcast = control(receiver)
    await broadcast.init(GROUP)
    await broadcast.policy.pause("keep")
    updating = asyncio.create_task(broadcast.update(MANIFEST, version="v1"))
    await until(lambda: "receive" in receiver.log)
    assert (await broadcast.policy.resume()).was_paused
    gate.set()
    await updating
    assert (broadcast.policy.state, broadcast.policy.version) == ("ready", "v1")


async def test_topologies_that_cannot_be_counted_are_refused_in_words() -> None:
    with pytest.raises(InvalidRequest, match="data parallelism 2"):
        await control(FakeBroadcast(), data_parallel_size=2).init(GROUP)
    with pytest.raises(InvalidRequest, match="backend 'gloo' does not work here; nccl do"):
        await control(FakeBroadcast(), weight_transfer=["disk", "nccl"]).init(GROUP)
