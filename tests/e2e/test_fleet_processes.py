"""A fleet of real processes: a worker killed with requests in flight, restarted, and brought to the fleet's policy."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from tests.e2e.fleets import write_weights
from tests.e2e.server_support import eventually

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client

START_S, STOP_S = 120.0, 30.0
TOKENS = 150
"""Three seconds of the engines' steps here: time to see that all run and to end a worker, on a busy machine too."""
SAMPLING: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}


@contextlib.asynccontextmanager
async def serving(*arguments: str, log: Path, command: str = "serve") -> AsyncIterator[tuple[Process, str]]:
    """`rollplane serve` (or another command) and its URL."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollplane.cli.main", command, *arguments, stdin=PIPE, stdout=PIPE, stderr=output
        )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        assert line, f"no ready line; see {log}"
        yield process, str(json.loads(line)["url"])
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()


def children(pid: int) -> dict[str, int]:
    """The pid of each child by the name in its ready file: `worker-0`, `frontend`."""
    found: dict[str, int] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
            name = next((n for n in ("worker-0", "worker-1", "worker-2", "frontend") if f"{n}.json" in command), None)
            if name is not None:
                found[name] = int(child)
    return found


async def placed(url: str, count: int) -> None:
    """Return once so many sequences are at the workers, some at each."""

    async def so_many() -> bool:
        async with session.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("rollplane_worker_sequences{")]
        return sum(found) == count and min(found) > 0

    async with aiohttp.ClientSession() as session:
        await eventually(so_many)


async def test_no_request_is_lost_when_one_of_three_workers_is_killed(tmp_path: Path) -> None:
    """And the restarted worker serves nothing before it has the policy that the others have."""
    log = tmp_path / "log"
    options = ["--workers", "3", "--port", "0", "--backoff-s", "0.05", "--engine-option", "step_s=0.02"]
    async with (
        serving(*options, log=log) as (process, url),
        Client(url, timeout_s=60.0) as client,
        AdminClient(url) as admin,
    ):
        await admin.update_policy(write_weights(tmp_path, "v1"))
        tasks = [
            asyncio.create_task(client.generate([5, 6, i], sampling_params={**SAMPLING, "seed": i}, request_id=f"r{i}"))
            for i in range(24)
        ]
        await placed(url, 24)
        assert not any(task.done() for task in tasks)
        os.kill(children(process.pid)["worker-0"], signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        assert [answer.choices[0].token_ids.size for answer in answers] == [TOKENS] * 24
        assert {version for answer in answers for version, _ in answer.choices[0].policy_versions} == {"v1"}
        moved = [answer for answer in answers if answer.served_by.attempt > 1]
        assert moved
        # The same seed gives the same tokens on another worker.
        again = await client.generate([5, 6, 0], sampling_params={**SAMPLING, "seed": 0})
        assert again.choices[0].token_ids.tolist() == answers[0].choices[0].token_ids.tolist()
        async with asyncio.timeout(START_S):
            while any(record.error for record in await admin.workers()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        assert {record.policy_version for record in await admin.workers()} == {"v1"}
        assert len({record.instance_id for record in await admin.workers()}) == 3


async def test_a_stopped_worker_gets_no_requests_and_loses_none(tmp_path: Path) -> None:
    """SIGSTOP: every connection to it stays open, and nothing comes back."""
    log = tmp_path / "log"
    options = ["--workers", "2", "--port", "0", "--silent-s", "2", "--engine-option", "step_s=0.02"]
    async with (
        serving(*options, log=log) as (process, url),
        Client(url, timeout_s=60.0) as client,
        AdminClient(url) as admin,
    ):

        def ask(i: int) -> asyncio.Task[Any]:
            return asyncio.create_task(client.generate([5, 6, i], sampling_params={**SAMPLING, "seed": i}))

        running = [ask(i) for i in range(12)]
        await placed(url, 12)
        assert not any(task.done() for task in running)
        stopped = children(process.pid)["worker-0"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*running)
            assert {answer.choices[0].token_ids.size for answer in answers} == {TOKENS}
            moved = [answer for answer in answers if answer.served_by.attempt > 1]
            assert moved
            left = [record for record in await admin.workers() if record.error]
            assert len(left) == 1
            assert "cannot be reached" in str(left[0].error)
            answers = await asyncio.gather(*(ask(i) for i in range(12)))
            assert {answer.served_by.attempt for answer in answers} == {1}
            assert len({answer.served_by.instance for answer in answers}) == 1
        finally:
            os.kill(stopped, signal.SIGCONT)
        async with asyncio.timeout(START_S):
            while any(record.error for record in await admin.workers()):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(ask(i) for i in range(12)))
        assert len({answer.served_by.instance for answer in answers}) == 2
