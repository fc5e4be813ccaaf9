"""A fleet followed by another process: workers take requests here by the owner's word and their own."""

from pathlib import Path

import msgspec
from tests.unit.rl.local_workers import LocalWorker
from tests.unit.rl.test_fleet import weights

from rollplane.engines.mock.settings import MockSettings
from rollplane.rl.fleet import Fleet
from rollplane.rl.followed import FleetView, FollowedFleet, view_of


def told(fleet: Fleet) -> FleetView:
    """What crosses between processes."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(view_of(fleet)), type=FleetView)


async def followed() -> tuple[Fleet, FollowedFleet, LocalWorker]:
    """An owner with one worker, and a follower that was told of it."""
    owner, follower = Fleet(epoch=7), FollowedFleet()
    worker = LocalWorker("http://w0", MockSettings())
    await worker.start()
    owner.add(worker)
    follower.add(worker)
    follower.take(told(owner))
    return owner, follower, worker


async def test_a_follower_serves_what_the_owner_says_and_the_worker_has(tmp_path: Path) -> None:
    owner, follower = Fleet(epoch=7), FollowedFleet()
    workers = [LocalWorker(f"http://w{i}", MockSettings()) for i in range(2)]
    for worker in workers:
        await worker.start()
        owner.add(worker)
        follower.add(worker)
    assert repr(follower) == "<Fleet ? epoch=0: 2 joining>"  # nothing was told yet

    follower.take(told(owner))
    assert repr(follower) == "<Fleet initial epoch=7: 2 current>"

    await owner.update_from_disk(weights(tmp_path, "v1"))
    # The owner has not told: the workers' own word is of no policy that is known here, and workers refuse for themselves.
    assert follower.version == "initial"
    follower.take(told(owner))
    assert repr(follower) == "<Fleet v1 epoch=7: 2 current>"
    assert follower.lag("initial") == 1

    await workers[0].worker.set_policy_version("strange")
    await workers[0].refresh()
    assert [member.routable for member in follower.members] == [False, True]
    await owner.close()


async def test_a_pause_a_gate_and_a_fence_are_followed() -> None:
    owner, follower, _ = await followed()

    await owner.pause()
    follower.take(told(owner))
    assert follower.held_for == "pause"
    await owner.resume()
    follower.take(told(owner))
    assert follower.held_for is None

    owner.members[0].enter("fenced", "it answers nonsense")
    follower.take(told(owner))
    assert repr(follower.members[0]) == "<Member http://w0 fenced initial (it answers nonsense)>"
    owner.members[0].enter("joining")
    owner.members[0].enter("current")
    follower.take(told(owner))
    assert follower.members[0].routable
    await owner.close()


async def test_requests_of_a_worker_that_restarted_are_dropped_here_too() -> None:
    owner, follower, worker = await followed()
    await worker.restart()
    assert worker.dropped == ["worker http://w0 was restarted"] * 2
    follower.take(told(owner))
    assert follower.members[0].routable
    await owner.close()
