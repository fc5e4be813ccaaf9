"""`rollplane status`: what it shows of a fleet is what the fleet says."""

import asyncio
import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tests.e2e.fleets import FleetUnderTest, fleet_of, write_weights
from tests.e2e.server_support import eventually

from rollplane.cli.status import FleetStatus, look, show, table_of
from rollplane.client.admin import AdminClient
from rollplane.client.transport import Transport
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import TransportError


def drawn(status: FleetStatus) -> str:
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(table_of(status))
    return console.export_text()


async def looked(fleet: FleetUnderTest) -> FleetStatus:
    async with Transport(fleet.frontend.url, key=None, attempts=1, connect_timeout_s=5.0) as transport:
        return await look(transport)


async def test_a_fleets_status_names_every_worker_its_version_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    failing = MockSettings(faults=(Fault(kind="fail", operation="apply_weights"),))
    async with fleet_of([MockSettings(), failing]) as fleet, AdminClient(fleet.frontend.url) as admin:
        await admin.update_policy(write_weights(tmp_path, "v1"), on_failure="fence")
        status = await looked(fleet)
        assert [worker.url for worker in status.workers] == [worker.url for worker in fleet.workers]
        assert status.policy_versions == ["v1"]
        assert [worker.routable for worker in status.workers] == [True, False]
        assert [worker.load for worker in status.workers] == [0, 0]
        assert status.workers[1].error is not None
        text = drawn(status)
        assert "fenced" in text
        assert fleet.workers[0].url in text


async def test_a_workers_own_status_has_no_loads_of_a_fleet() -> None:
    async with fleet_of([MockSettings()]) as fleet:
        async with Transport(fleet.workers[0].url, key=None, attempts=1, connect_timeout_s=5.0) as transport:
            status = await look(transport)
        assert [(worker.state, worker.load, worker.circuit) for worker in status.workers] == [("ready", None, None)]
        assert status.state == "ready"


async def test_json_is_one_line_that_a_program_reads(capsys: pytest.CaptureFixture[str]) -> None:
    async with fleet_of([MockSettings()]) as fleet:
        await show(fleet.frontend.url, key=None, once=False, as_json=True, interval_s=1.0)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert msgspec.convert(json.loads(line), FleetStatus).workers[0].policy_version == "initial"


async def test_a_server_that_does_not_answer_is_an_error_and_no_empty_table() -> None:
    with pytest.raises(TransportError):
        await show("http://127.0.0.1:1", key=None, once=True, as_json=False, interval_s=1.0)


async def test_into_a_pipe_one_table_goes_as_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_on = io.StringIO()
    monkeypatch.setattr("rollplane.cli.status.Console", lambda: Console(file=drawn_on, force_terminal=False, width=240))

    async with fleet_of([MockSettings()]) as fleet:
        shown = show(fleet.frontend.url, key=None, once=False, as_json=False, interval_s=1.0)
        await asyncio.wait_for(shown, 20.0)

    assert drawn_on.getvalue().count("initial") >= 1


async def test_the_live_view_follows_the_fleet_and_a_server_that_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_on = io.StringIO()
    terminal = Console(file=drawn_on, force_terminal=True, width=240)
    monkeypatch.setattr("rollplane.cli.status.Console", lambda: terminal)

    async def until_shown(text: str) -> None:
        async def shown() -> bool:
            return text in drawn_on.getvalue()

        await eventually(shown, seconds=20.0)

    async with fleet_of([MockSettings()] * 2) as fleet, AdminClient(fleet.frontend.url) as admin:
        view = asyncio.create_task(show(fleet.frontend.url, key=None, once=False, as_json=False, interval_s=0.1))
        try:
            await until_shown("initial")
            await admin.update_policy(write_weights(tmp_path, "step-7"))
            await until_shown("step-7")
            await fleet.workers[0].kill()
            await until_shown("cannot be reached")
            await fleet.frontend.kill()
            await until_shown("Cannot connect")
            assert not view.done()
        finally:
            view.cancel()
            await asyncio.gather(view, return_exceptions=True)
