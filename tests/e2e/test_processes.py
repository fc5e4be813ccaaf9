"""Several processes of a frontend behind one port: whichever a connection leads to, the answer is that of one server."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.fleets import write_weights
from tests.e2e.server_support import eventually
from tests.e2e.test_fleet_processes import serving

from rollplane.client.admin import AdminClient

OPTIONS = ["--workers", "2", "--processes", "3", "--port", "0", "--backoff-s", "0.05", "--engine-option", "step_s=0.01"]
GENERATE = "/inference/v1/generate"


def body(**fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 8, "ignore_eos": True, **fields.pop("sampling", {})}
    return {"token_ids": [5, 6, 7], "sampling_params": sampling, **fields}


async def ask(url: str, path: str = GENERATE, sent: Any = None) -> tuple[int, Any]:
    """One request over a connection of its own: the system chooses the process."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        if sent is None:
            async with session.get(url + path) as answer:
                return answer.status, await answer.text()
        async with session.post(url + path, json=sent) as answer:
            return answer.status, await answer.json()


def processes_of(pid: int) -> dict[int, int]:
    """The pid of each process of the frontend by its number."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
            for i in range(3):
                if ("frontend.json" if i == 0 else f"frontend-{i}.json") in command:
                    found[i] = int(child)
    return found


async def counted(url: str, name: str) -> float:
    status, page = await ask(url, "/metrics")
    assert status == 200, page
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


async def test_processes_act_as_one_and_outlive_each_other(tmp_path: Path) -> None:
    async with serving(*OPTIONS, log=tmp_path / "log") as (process, url), AdminClient(url) as admin:
        # A policy update is known to every process once it is answered.
        for name in ("v1", "v2"):
            assert (await admin.update_policy(write_weights(tmp_path, name))).policy_version == name
            wanted = body(rollplane={"min_policy_version": name})
            answers = await asyncio.gather(*(ask(url, sent=wanted) for _ in range(16)))
            assert [status for status, _ in answers] == [200] * 16
            assert {answer["choices"][0]["policy_versions"][0][0] for _, answer in answers} == {name}

        # An id is live once, wherever its requests arrive.
        same = body(request_id="same", sampling={"max_tokens": 300})
        answers = await asyncio.gather(*(ask(url, sent=same) for _ in range(9)))
        assert len({str(answer["choices"][0]["token_ids"]) for _, answer in answers}) == 1
        others = [body(request_id="other", sampling={"max_tokens": 300 + i}) for i in range(9)]
        statuses = Counter(status for status, _ in await asyncio.gather(*(ask(url, sent=each) for each in others)))
        assert statuses == {200: 1, 409: 8}

        # So is an idempotency key, whose answer is kept.
        async with aiohttp.ClientSession(headers={"Idempotency-Key": "k"}) as session:
            kept = set()
            for _ in range(6):
                async with session.post(url + GENERATE, json=body(sampling={"temperature": 1.0})) as answer:
                    kept.add(str((await answer.json())["choices"][0]["token_ids"]))
        assert len(kept) == 1

        # What runs anywhere can be ended from anywhere.
        tasks = [
            asyncio.create_task(ask(url, sent=body(request_id=f"long-{i}", sampling={"max_tokens": 3000})))
            for i in range(6)
        ]

        async def all_run() -> bool:
            return await counted(url, "rollplane_requests_in_flight ") == 6

        await eventually(all_run)
        status, said = await ask(url, "/engine/abort_request", {"request_id": "long-0"})
        assert (status, said["aborted"]) == (200, 1)
        status, said = await ask(url, "/abort_requests", {})
        assert status == 200, said
        ended = [answer["choices"][0]["finish_reason"] for _, answer in await asyncio.gather(*tasks)]
        assert ended == ["abort"] * 6

        # One page counts what all of them served.
        before = await counted(url, "rollplane_requests_total{")
        await asyncio.gather(*(ask(url, sent=body()) for _ in range(10)))
        assert await counted(url, "rollplane_requests_total{") == before + 10

        # A follower's end frees its ids; the owner's end holds up administration, not requests.
        pids = processes_of(process.pid)
        assert sorted(pids) == [0, 1, 2]
        tasks = [
            asyncio.create_task(ask(url, sent=body(request_id=f"left-{i}", sampling={"max_tokens": 3000})))
            for i in range(9)
        ]
        await eventually(lambda: _has(url, 9))
        os.kill(pids[2], signal.SIGKILL)

        async def the_others_run() -> bool:
            left = sum(not task.done() for task in tasks)
            restarted = processes_of(process.pid).get(2, pids[2]) != pids[2]
            return restarted and await _is(lambda: counted(url, "rollplane_requests_in_flight "), left)

        await eventually(the_others_run, seconds=20.0)
        lost = [i for i, task in enumerate(tasks) if task.done()]
        running = [task for task in tasks if not task.done()]
        assert all(isinstance(tasks[i].exception(), aiohttp.ClientError) for i in lost)
        for i in lost:
            status, answer = await ask(url, sent=body(request_id=f"left-{i}"))
            assert (status, len(answer["choices"][0]["token_ids"])) == (200, 8)
        await ask(url, "/abort_requests", {})
        await asyncio.gather(*running)

        os.kill(pids[0], signal.SIGKILL)
        reached = 0
        for _ in range(12):
            with contextlib.suppress(aiohttp.ClientError):  # a connection that the dead process had been given
                status, answer = await ask(url, sent=body())
                assert status == 200, answer
                reached += 1
        assert reached >= 8

        await eventually(lambda: _administered(url), seconds=20.0)
        assert (await admin.update_policy(write_weights(tmp_path, "v3"))).policy_version == "v3"
        answers = await asyncio.gather(*(ask(url, sent=body(rollplane={"policy_version": "v3"})) for _ in range(12)))
        assert [status for status, _ in answers] == [200] * 12


async def _has(url: str, count: int) -> bool:
    return await counted(url, "rollplane_requests_in_flight ") == count


async def test_the_limits_of_a_fleet_hold_for_all_processes_together(tmp_path: Path) -> None:
    limits = ["--max-running", "3", "--max-waiting", "2"]
    async with serving(*OPTIONS, *limits, log=tmp_path / "log") as (_, url):
        asked = [body(sampling={"max_tokens": 300, "seed": i}) for i in range(12)]
        answers = await asyncio.gather(*(ask(url, sent=each) for each in asked))
        assert Counter(status for status, _ in answers) == {200: 5, 429: 7}
        refusal = next(answer for status, answer in answers if status == 429)
        assert "the limit is 2" in refusal["error"]["message"]
        # All have left: there is room again.
        answers = await asyncio.gather(*(ask(url, sent=body()) for _ in range(3)))
        assert [status for status, _ in answers] == [200] * 3


async def test_what_the_owner_had_let_in_counts_again_after_it_was_killed(tmp_path: Path) -> None:
    """Two processes, so that one follower has all that outlives the owner."""
    options = ["--workers", "1", "--processes", "2", "--port", "0", "--backoff-s", "0.05"]
    options += ["--engine-option", "step_s=0.02", "--max-running", "3"]
    async with serving(*options, log=tmp_path / "log") as (process, url):

        async def long(i: int) -> int:
            try:
                status, _ = await ask(url, sent=body(request_id=f"long-{i}", sampling={"max_tokens": 3000}))
            except aiohttp.ClientError:
                return 0  # it was at the owner
            return status

        def running() -> Any:
            return counted(url, 'rollplane_queue_running{fleet="default"')

        lost: list[asyncio.Task[int]] = []
        kept: list[asyncio.Task[int]] = []
        while not kept:  # the system chooses the process
            lost = [asyncio.create_task(long(i)) for i in range(3)]
            await eventually(lambda: _is(running, 3))
            owner = processes_of(process.pid)[0]
            os.kill(owner, signal.SIGKILL)
            await eventually(lambda: _administered(url), seconds=20.0)  # by then the others have met its end
            kept = [task for task in lost if not task.done()]
        await eventually(lambda: _is(running, len(kept)))
        more = [asyncio.create_task(long(10 + i)) for i in range(3)]
        await eventually(lambda: _is(running, 3))
        assert await counted(url, "rollplane_queue_waiting{") == len(kept)
        status, _ = await ask(url, "/abort_requests", {})
        assert status == 200
        await asyncio.gather(*kept)
        await ask(url, "/abort_requests", {})
        assert await asyncio.gather(*kept, *more) == [200] * (len(kept) + 3)
        await eventually(lambda: _is(running, 0))


async def _is(count: Any, wanted: float) -> bool:
    try:
        return bool(await count() == wanted)
    except (aiohttp.ClientError, AssertionError):
        return False


async def _administered(url: str) -> bool:
    try:
        return (await ask(url, "/v1/rl/workers"))[0] == 200
    except aiohttp.ClientError:
        return False


async def test_a_frontend_of_its_own_may_have_several_processes_too(tmp_path: Path) -> None:
    async with serving("--engine", "mock", "--port", "0", log=tmp_path / "worker", command="worker") as (_, worker):
        arguments = ["--workers", worker, "--processes", "2", "--port", "0"]
        async with serving(*arguments, log=tmp_path / "log", command="frontend") as (process, url):
            answers = await asyncio.gather(*(ask(url, sent=body()) for _ in range(6)))
            assert [status for status, _ in answers] == [200] * 6
            assert len([i for i in processes_of(process.pid) if i < 2]) == 2
            status, said = await ask(url, "/pause", {})
            assert status == 200, said


@pytest.mark.parametrize("count", ["0", "65"])
async def test_a_count_outside_its_limits_is_refused(count: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no ready line"):
        async with serving("--processes", count, log=tmp_path / "log"):
            pass
    assert "frontend.processes" in (tmp_path / "log").read_text()
