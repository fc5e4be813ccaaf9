"""Several models behind one frontend: each a fleet of its own, with its own policy, under one address."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.commands import ready_line, running
from tests.e2e.fleets import MockWorker, write_weights

from rollplane.cli.frontend import urls_of
from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import InvalidRequest, NotFound

SAMPLING: dict[str, Any] = {"max_tokens": 8, "seed": 1, "ignore_eos": True}


@contextlib.asynccontextmanager
async def frontend_of(tmp_path: Path) -> AsyncIterator[tuple[str, dict[str, MockWorker]]]:
    """Two workers of the policy and one of the teacher, and a frontend process over them."""
    workers = {
        "policy-0": MockWorker(MockSettings(model="policy")),
        "policy-1": MockWorker(MockSettings(model="policy")),
        "teacher": MockWorker(
            MockSettings(model="big", weights="teacher", policy_version="frozen", max_model_len=8192)
        ),
    }
    for worker in workers.values():
        await worker.start()
    policy = ",".join(worker.url for name, worker in workers.items() if name != "teacher")
    options = ["--workers", policy, "--fleet", f"teacher={workers['teacher'].url}", "--port", "0"]
    log = tmp_path / "log"
    try:
        with running("frontend", *options, "--control-record", str(tmp_path / "control.json"), log=log) as process:
            line = await asyncio.to_thread(ready_line, process, log)
            yield str(line["url"]), workers
    finally:
        for worker in workers.values():
            await worker.kill()


async def test_each_request_goes_to_the_fleet_of_its_model_and_each_policy_changes_alone(tmp_path: Path) -> None:
    async with frontend_of(tmp_path) as (url, workers), Client(url) as client, AdminClient(url) as admin:

        async def ask(model: str | None) -> Any:
            more = {} if model is None else {"model": model}
            return await client.generate([5, 6, 7], sampling_params=SAMPLING, **more)

        by_default, by_name = await ask(None), await ask("policy")
        teacher, by_fleet = await ask("big"), await ask("teacher")
        tokens = [answer.choices[0].token_ids.tolist() for answer in (by_default, by_name, teacher, by_fleet)]
        assert tokens[0] == tokens[1]
        assert tokens[2] == tokens[3]
        assert tokens[0] != tokens[2]
        assert teacher.served_by.instance == workers["teacher"].worker.instance_id
        with pytest.raises(NotFound, match="nobody"):
            await ask("nobody")

        await admin.update_policy(write_weights(tmp_path, "v1"))  # the root administers the first fleet
        assert {answer.choices[0].policy_versions[0][0] for answer in [await ask(None)]} == {"v1"}
        assert (await ask("teacher")).choices[0].policy_versions[0][0] == "frozen"
        async with AdminClient(f"{url}/fleets/teacher") as of_teacher:
            assert await of_teacher.policy_version() == "frozen"
            await of_teacher.update_policy(write_weights(tmp_path, "t1"))
            assert [record.policy_version for record in await of_teacher.workers()] == ["t1"]
        assert (await ask("big")).choices[0].policy_versions[0][0] == "t1"
        assert (await ask(None)).choices[0].policy_versions[0][0] == "v1"
        assert sorted(str(record.policy_version) for record in await admin.workers()) == ["t1", "v1", "v1"]
        cards = {card["id"]: card["max_model_len"] for card in await client.models()}
        assert cards == {"policy": 4096, "default": 4096, "big": 8192, "teacher": 8192}
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/fleets/nobody/health") as unknown:
                assert unknown.status == 404
            async with session.get(f"{url}/fleets/teacher/metrics") as metrics:
                assert workers["teacher"].url in await metrics.text()
    records = [json.loads((tmp_path / f"control.json{end}").read_text()) for end in ("", ".teacher")]
    assert [record["checkpoint"]["version"] for record in records] == ["v1", "t1"]


@pytest.mark.parametrize(("name", "text"), [("a/b", "http://w"), ("", "http://w"), ("teacher", " , ")])
def test_a_fleet_needs_a_name_for_paths_and_a_worker(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"frontend\.fleet"):
        urls_of(name, text)


def test_a_fleets_workers_are_parted_by_commas_or_blanks() -> None:
    assert urls_of("teacher", "http://a,http://b http://c") == ["http://a", "http://b", "http://c"]
