"""Frontends: several side by side, one that drains, and workers of another version of the wire beside those of ours."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.commands import ready_line, running
from tests.e2e.fleets import FleetUnderTest, MockWorker, fleet_of, serve_frontend, write_weights
from tests.e2e.server_support import eventually
from tests.waiting import until

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import Unavailable
from rollplane.protocol import state as wire
from rollplane.protocol.admin import PauseMode
from rollplane.rl.fleet import Fleet
from rollplane.rl.remote import RemoteWorker
from rollplane.router.router import Router
from rollplane.server import state as served_state

SAMPLING: dict[str, Any] = {"max_tokens": 4, "seed": 1, "ignore_eos": True}


async def served(client: Client, count: int, **asked: Any) -> set[str]:
    answers = await asyncio.gather(*(client.generate([5, i], sampling_params=SAMPLING, **asked) for i in range(count)))
    return {version for answer in answers for version, _ in answer.choices[0].policy_versions}


async def test_a_second_frontend_reads_what_the_first_one_does_and_serves_on_when_that_is_gone(tmp_path: Path) -> None:
    """The owner updates the policy and an adapter; a reader beside it never serves what is behind, and shares keys' answers."""
    async with fleet_of([MockSettings(apply_s=0.05)] * 2) as first, AdminClient(first.frontend.url) as admin:
        reader = Router(Fleet())
        for worker in first.workers:
            reader.fleet.add(RemoteWorker(worker.url, poll_s=0.1))
        frontend = serve_frontend(reader, reader.fleet)
        await frontend.start()
        try:
            async with Client(first.frontend.url) as one, Client(frontend.url) as other:
                assert await served(other, 4) == {"initial"}
                running_on = asyncio.create_task(served(other, 16, min_policy_version="initial"))
                await admin.update_policy(write_weights(tmp_path, "v1"))
                assert await running_on <= {"initial", "v1"}
                # What is asked for after the update has its version, through either.
                assert await served(one, 4) == {"v1"}
                assert await served(other, 4) == {"v1"}
                made = await one.generate([5, 6], sampling_params={"max_tokens": 8}, idempotency_key="key")
                again = await other.generate([5, 6], sampling_params={"max_tokens": 8}, idempotency_key="key")
                assert again.choices[0].token_ids.tolist() == made.choices[0].token_ids.tolist()
                assert again.served_by.instance == made.served_by.instance
                await first.frontend.kill()
                await first.router.close()
                assert await served(other, 4) == {"v1"}
        finally:
            await frontend.kill()
            await reader.close()


async def test_a_frontend_that_is_told_to_stop_lets_requests_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    worker = MockWorker(MockSettings(step_s=0.02))
    await worker.start()
    log = tmp_path / "log"

    async def running_there() -> bool:
        return worker.worker.live_requests == 1

    try:
        with running("frontend", "--workers", worker.url, "--port", "0", "--drain-s", "30", log=log) as process:
            url = str((await asyncio.to_thread(ready_line, process, log))["url"])
            async with Client(url, attempts=1) as client:
                asked = asyncio.create_task(client.generate([5, 6], sampling_params={**SAMPLING, "max_tokens": 150}))
                await eventually(running_there)
                process.send_signal(signal.SIGTERM)
                await until_draining(client)
                with pytest.raises(Unavailable) as refused:
                    await client.generate([7, 8], sampling_params=SAMPLING)
                assert refused.value.retry_after_s == 1.0
                assert not asked.done()
                assert (await asked).choices[0].token_ids.size == 150
            assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        await worker.kill()


async def until_draining(client: Client) -> None:
    """Every new request is refused from then on; those before it are answered."""
    async with asyncio.timeout(20):
        while True:
            try:
                await client.generate([1], sampling_params={**SAMPLING, "max_tokens": 1})
            except Unavailable:
                return


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_every_mode_of_an_update_holds_over_a_fleet(tmp_path: Path, mode: PauseMode) -> None:
    """keep: running requests cross it; wait: they end on the old version; abort: they end with what they have."""
    async with (
        fleet_of([MockSettings(step_s=0.01)] * 2) as fleet,
        Client(fleet.frontend.url) as client,
        AdminClient(fleet.frontend.url) as admin,
    ):
        sampling = {**SAMPLING, "max_tokens": 60}
        asked = [asyncio.create_task(client.generate([5, i], sampling_params=sampling)) for i in range(6)]
        await until(lambda: sum(worker.worker.live_requests for worker in fleet.workers) == 6)
        await admin.update_policy(write_weights(tmp_path, "v1"), mode=mode)
        choices = [answer.choices[0] for answer in await asyncio.gather(*asked)]
        reasons = {choice.finish_reason for choice in choices}
        seen = {tuple(version for version, _ in choice.policy_versions) for choice in choices}
        if mode == "keep":
            assert (reasons, seen) == ({"length"}, {("initial", "v1")})
        elif mode == "wait":
            assert (reasons, seen) == ({"length"}, {("initial",)})
        else:
            assert (reasons, seen) == ({"abort"}, {("initial",)})
            assert all(choice.token_ids.size < 60 for choice in choices)
        assert await served(client, 4) == {"v1"}


async def test_a_worker_that_speaks_another_wire_takes_nothing_and_the_list_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rolling upgrade: what cannot be understood is left out by name, never misread."""
    async with fleet_of([MockSettings()]) as fleet, Client(fleet.frontend.url) as client:
        newer = MockWorker(name="newer")
        await newer.start()
        monkeypatch.setattr(served_state, "encode_state_frame", of_wire(newer, wire.WIRE_VERSION + 1))
        try:
            member = fleet.fleet.add(RemoteWorker(newer.url, poll_s=0.1))
            await fleet.until(lambda: "wire version" in (member.reason or ""))
            assert await served(client, 8) == {"initial"}
            assert newer.engine.calls("generate") == 0
            assert "wire version 2, this side 1" in await error_of(fleet, newer.url)
        finally:
            await newer.kill()


def of_wire(worker: MockWorker, version: int) -> Any:
    """Frames of a state as a worker of another release would send them; those of other workers as they are."""
    plain = wire.encode_state_frame

    def encode(state: wire.WorkerState) -> bytes:
        if state.instance == worker.worker.instance_id:
            state = msgspec.structs.replace(state, wire=version)
        return plain(state)

    return encode


async def error_of(fleet: FleetUnderTest, url: str) -> str:
    records = await fleet.fleet.workers()
    return next(record.error or "" for record in records if url in (record.system_url, record.request_plane_url))
