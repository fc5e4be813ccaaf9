import asyncio
import gc
import weakref

import pytest
from tests.unit.rl.fakes import FakeReceiver
from tests.waiting import until

from rollplane.errors import Conflict, DeadlineExceeded, EngineDied, EngineFailed, InvalidRequest, Unavailable
from rollplane.protocol.admin import StagedWeights
from rollplane.rl.base import Operation
from rollplane.rl.weights import TRANSITIONS, PolicyControl


class Weights:
    """What an engine stages."""


def test_every_state_of_the_table_can_be_left_and_ready_is_entered_only_from_pauses() -> None:
    assert all(TRANSITIONS.values())
    assert {state for state, targets in TRANSITIONS.items() if "ready" in targets} == {"pausing", "paused"}
    assert TRANSITIONS["failed"] == {"receiving"}


async def test_an_update_of_a_running_worker_stages_then_pauses_applies_and_resumes() -> None:
    receiver = FakeReceiver()
    control = PolicyControl(receiver)
    report = await control.update_from_disk("/ckpt/step_1", version="v1", mode="wait")
    assert receiver.log == ["stage /ckpt/step_1", "pause wait", "apply v1", "resume"]
    assert (report.policy_version, report.previous_version, report.applied) == ("v1", "v0", True)
    assert repr(control) == "<PolicyControl ready at 'v1'>"
    assert control.digest == "digest of /ckpt/step_1"


async def test_an_update_without_a_version_is_named_by_its_directory() -> None:
    control = PolicyControl(FakeReceiver())
    report = await control.update_from_disk("/ckpt/step_7")
    assert report.policy_version == "step_7"


async def test_a_worker_that_the_caller_paused_stays_paused_after_an_update() -> None:
    receiver = FakeReceiver()
    control = PolicyControl(receiver)
    await control.pause("keep")
    await control.update_from_disk("/ckpt/1", version="v1")
    assert control.state == "paused"
    assert "resume" not in receiver.log
    report = await control.resume()
    assert (report.was_paused, report.policy_version, control.state) == (True, "v1", "ready")


async def test_resuming_twice_and_pausing_twice_change_nothing_more() -> None:
    receiver = FakeReceiver()
    control = PolicyControl(receiver)
    assert (await control.pause("keep")).already_paused is False
    assert (await control.pause("keep")).already_paused is True
    assert (await control.resume()).was_paused is True
    assert (await control.resume()).was_paused is False
    assert receiver.log.count("resume") == 1


async def test_a_refused_update_leaves_the_old_version_serving() -> None:
    receiver = FakeReceiver(faults={"apply v1": EngineFailed("no")})
    control = PolicyControl(receiver)
    with pytest.raises(EngineFailed):
        await control.update_from_disk("/ckpt/1", version="v1")
    assert (control.state, control.version, control.digest) == ("ready", "v0", None)
    assert receiver.log[-1] == "resume"


async def test_a_refused_checkpoint_never_pauses() -> None:
    receiver = FakeReceiver(faults={"stage /ckpt/1": InvalidRequest("unknown tensor")})
    control = PolicyControl(receiver)
    with pytest.raises(InvalidRequest):
        await control.update_from_disk("/ckpt/1", version="v1")
    assert receiver.log == ["stage /ckpt/1"]
    assert control.state == "ready"


async def test_weights_of_unknown_version_never_serve_until_an_update_succeeds() -> None:
    receiver = FakeReceiver(faults={"apply v1": EngineDied("half written")})
    control = PolicyControl(receiver)
    with pytest.raises(EngineDied):
        await control.update_from_disk("/ckpt/1", version="v1")
    assert control.state == "failed"
    with pytest.raises(Unavailable):
        await control.resume()
    with pytest.raises(Unavailable):
        await control.wait_ready()
    assert (await control.pause("keep")).already_paused is True
    await control.update_from_disk("/ckpt/1", version="v1")
    assert control.state == "paused"
    await control.resume()
    assert (control.state, control.version) == ("ready", "v1")


async def test_an_engine_that_reports_another_version_after_an_update_is_failed() -> None:
    control = PolicyControl(FakeReceiver(lies_about_version=True))
    with pytest.raises(Exception, match="says version 'v0' after an update to 'v1'"):
        await control.update_from_disk("/ckpt/1", version="v1")
    assert control.state == "failed"


async def test_the_same_contents_under_the_same_version_again_are_no_work() -> None:
    receiver = FakeReceiver()
    control = PolicyControl(receiver)
    await control.update_from_disk("/ckpt/1", version="v1")
    again = await control.update_from_disk("/ckpt/1", version="v1")
    assert again.applied is False
    assert receiver.log.count("apply v1") == 1


async def test_other_contents_at_the_same_path_are_loaded() -> None:
    receiver = FakeReceiver()
    control = PolicyControl(receiver)
    await control.update_from_disk("/ckpt", version="v1")
    receiver.digests["/ckpt"] = "other contents"
    report = await control.update_from_disk("/ckpt", version="v1")
    assert (report.applied, report.digest) == (True, "other contents")


async def test_a_caller_that_hangs_up_does_not_stop_the_update_and_asking_again_applies_nothing_twice() -> None:
    gate = asyncio.Event()
    receiver = FakeReceiver(gates={"apply v1": gate})
    control = PolicyControl(receiver)
    operation = Operation(id="op-1", step=1)
    first = asyncio.create_task(control.update_from_disk("/ckpt/1", version="v1", operation=operation))
    await until(lambda: "apply v1" in receiver.log)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(control.update_from_disk("/ckpt/1", version="v1", operation=operation))
    gate.set()
    report = await second
    assert report.applied is True
    assert receiver.log.count("apply v1") == 1
    assert control.state == "ready"


async def test_one_operation_name_with_other_arguments_is_a_conflict() -> None:
    control = PolicyControl(FakeReceiver())
    await control.update_from_disk("/ckpt/1", version="v1", operation=Operation(id="op"))
    with pytest.raises(Conflict, match="other arguments"):
        await control.update_from_disk("/ckpt/2", version="v2", operation=Operation(id="op"))


async def test_a_staged_checkpoint_is_used_only_with_its_digest() -> None:
    receiver = FakeReceiver()
    control = PolicyControl(receiver)
    staged = await control.stage("/ckpt/1")
    await control.update_from_disk("/ckpt/1", version="v1", expected_digest=staged.digest)
    assert receiver.log.count("stage /ckpt/1") == 1
    await control.stage("/ckpt/2")
    await control.update_from_disk("/ckpt/2", version="v2")
    assert receiver.log.count("stage /ckpt/2") == 2


async def test_another_digest_than_expected_is_refused_before_anything_pauses() -> None:
    receiver = FakeReceiver()
    control = PolicyControl(receiver)
    with pytest.raises(Conflict, match="expected"):
        await control.update_from_disk("/ckpt/1", version="v1", expected_digest="f" * 64)
    assert not any(step.startswith("pause") for step in receiver.log)


async def test_an_update_past_its_deadline_ends_in_a_known_state() -> None:
    receiver = FakeReceiver(gates={"pause wait": asyncio.Event()})
    control = PolicyControl(receiver)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        await control.update_from_disk(
            "/ckpt/1", version="v1", mode="wait", operation=Operation(id="op", deadline_s=0.01)
        )
    assert (control.state, control.version) == ("ready", "v0")


async def test_requests_wait_from_the_first_moment_of_a_pause_until_the_resume() -> None:
    gate = asyncio.Event()
    receiver = FakeReceiver(gates={"pause wait": gate})
    control = PolicyControl(receiver)
    pausing = asyncio.create_task(control.pause("wait"))
    await until(lambda: receiver.log)
    assert control.state == "pausing"
    waiting = asyncio.create_task(control.wait_ready())
    gate.set()
    await pausing
    assert not waiting.done()
    await control.resume()
    await waiting


async def test_a_stricter_pause_joins_one_that_is_under_way() -> None:
    gate = asyncio.Event()
    receiver = FakeReceiver(gates={"pause wait": gate})
    control = PolicyControl(receiver)
    patient = asyncio.create_task(control.pause("wait"))
    await until(lambda: receiver.log)
    await control.pause("abort")
    assert receiver.log == ["pause wait", "pause abort"]
    assert control.state == "pausing"
    gate.set()
    await patient
    assert control.state == "paused"


async def test_publishing_a_label_touches_no_request_and_advances_the_sequence() -> None:
    receiver = FakeReceiver()
    control = PolicyControl(receiver)
    await control.set_version("v1")
    assert receiver.log == ["label v1"]
    assert control.sequence.at_least("v1", "v0")


async def test_a_pause_that_comes_while_an_update_resumes_holds() -> None:
    gate = asyncio.Event()
    receiver = FakeReceiver(gates={"resume": gate})
    control = PolicyControl(receiver)
    updating = asyncio.create_task(control.update_from_disk("/ckpt/1", version="v1"))
    await until(lambda: "resume" in receiver.log)
    await control.pause("keep")
    gate.set()
    await updating
    assert (control.state, control.version, receiver.log[-1]) == ("paused", "v1", "pause keep")


async def test_an_update_joins_a_pause_that_is_under_way_and_leaves_it_to_its_caller() -> None:
    gate = asyncio.Event()
    receiver = FakeReceiver(gates={"pause wait": gate})
    control = PolicyControl(receiver)
    pausing = asyncio.create_task(control.pause("wait"))
    await until(lambda: "pause wait" in receiver.log)
    updating = asyncio.create_task(control.update_from_disk("/ckpt/1", version="v1"))
    await until(lambda: "pause keep" in receiver.log)
    gate.set()
    await asyncio.gather(pausing, updating)
    assert (control.state, control.version) == ("paused", "v1")
    await control.resume()
    assert control.state == "ready"


async def test_an_engine_that_fails_to_resume_after_a_failed_pause_counts_as_paused() -> None:
    faults = {"pause keep": EngineFailed("busy"), "resume": EngineFailed("no")}
    control = PolicyControl(FakeReceiver(faults=dict(faults)))
    with pytest.raises(EngineFailed):
        await control.pause("keep")
    assert control.state == "paused"
    await control.resume()
    assert control.state == "ready"


async def test_what_is_remembered_of_a_staging_holds_no_weights() -> None:
    """A fleet stages under a new operation name at every update: each would keep a whole copy of the model."""
    receiver = FakeReceiver()
    held: list[weakref.ref[Weights]] = []

    async def stage(path: str, **_: object) -> StagedWeights:
        weights = Weights()
        held.append(weakref.ref(weights))
        return StagedWeights(path=path, digest=f"digest of {path}", tensors=1, bytes=1, handle=weights)

    receiver.stage_weights = stage  # type: ignore[method-assign]
    control = PolicyControl(receiver)
    for step in range(1, 4):
        staged = await control.stage(f"/ckpt/{step}", operation=Operation(id=f"update-{step}"))
        assert staged.handle is None
        await control.apply_staged(staged.digest, version=f"v{step}", operation=Operation(id=f"apply-{step}"))
    gc.collect()

    assert sum(weights() is not None for weights in held) <= 1  # the last, until the next replaces it
