"""Pauses, labels, resets and adapters mean what they say, through every hop that carries them."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.fleets import fleet_of
from tests.e2e.hops import FULL_HOPS, HOPS, chain
from tests.e2e.server_support import Served, eventually
from tests.e2e.test_fleet_adapters import write_adapter

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.mock.settings import Fault, MockSettings
from rollplane.errors import EngineFailed, NotFound

PROMPT = list(range(100, 180))  # five blocks of 16
SLOW = MockSettings(step_s=0.002)


def ask(prompt: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": prompt or PROMPT, "sampling_params": {"seed": 3, "ignore_eos": True, **sampling}}


async def post(edge: Served, path: str, body: Any = None) -> tuple[int, Any]:
    async with edge.post(path, body if body is not None else {}) as answer:
        content = await answer.read()
        return answer.status, json.loads(content) if content.startswith(b"{") else None


async def running(engine: Any, count: int) -> None:
    async def there() -> bool:
        return int((await engine.health()).running) == count

    await eventually(there)


@pytest.mark.parametrize("hops", FULL_HOPS)
async def test_a_refused_reset_keeps_the_cache_and_one_that_preempts_drops_it(hops: str) -> None:
    async with chain(hops, SLOW) as made:
        long = asyncio.create_task(made.edge.generate(ask(max_tokens=3000)))
        await running(made.engine, 1)

        async def cached() -> int:
            tree = await made.edge.generate(ask(max_tokens=1))
            return int(tree["usage"]["prompt_tokens_details"]["cached_tokens"])

        await eventually(lambda: _positive(cached()))
        status, answer = await post(made.edge, "/reset_prefix_cache")
        assert (status, answer["error"]["details"]["reset"]) == (409, False)
        assert await cached() > 0
        status, answer = await post(made.edge, "/reset_prefix_cache?reset_running_requests=true")
        assert (status, answer["success"]) == (200, True)
        again = asyncio.create_task(cached())
        assert await again == 0
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


async def _positive(count: Any) -> bool:
    return bool(await count > 0)


@pytest.mark.parametrize("hops", HOPS)
async def test_a_label_between_pause_and_resume_ends_none_of_sixteen_samples(hops: str) -> None:
    async with chain(hops, SLOW) as made:
        samples = [asyncio.create_task(made.edge.generate(ask([5, 6, i], max_tokens=300))) for i in range(16)]
        await running(made.engine, 16)
        for path, body in (
            ("/pause?mode=keep&clear_cache=false", None),
            ("/update_weight_version", {"new_version": "step_7"}),
            ("/resume", None),
        ):
            assert (await post(made.edge, path, body))[0] == 200
        choices = [(await sample)["choices"][0] for sample in samples]

    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert {len(choice["token_ids"]) for choice in choices} == {300}
    assert all(choice["policy_versions"][-1][0] == "step_7" for choice in choices)


@pytest.mark.parametrize("hops", HOPS)
async def test_a_drain_returns_though_a_request_came_while_paused(hops: str) -> None:
    """What ran is finished by it, what came meanwhile is served at the resume."""
    async with chain(hops, SLOW) as made:
        kept = asyncio.create_task(made.edge.generate(ask(max_tokens=60)))
        await running(made.engine, 1)
        assert (await post(made.edge, "/pause?mode=keep&clear_cache=false"))[0] == 200
        late = asyncio.create_task(made.edge.generate(ask([7, 8], max_tokens=5)))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert (await post(made.edge, "/pause?mode=wait&clear_cache=false"))[0] == 200
            assert len((await kept)["choices"][0]["token_ids"]) == 60
        assert not late.done()
        assert (await post(made.edge, "/resume"))[0] == 200
        assert len((await late)["choices"][0]["token_ids"]) == 5


async def test_parallel_loads_and_unloads_end_alike_on_all_workers_and_as_the_last_call_says(tmp_path: Path) -> None:
    """20 loads and 20 unloads of one name, some of the same contents."""
    paths = [write_adapter(tmp_path, f"a{i}", value=float(i + 1)) for i in range(5)]
    async with fleet_of([MockSettings()] * 3) as fleet, AdminClient(fleet.frontend.url, attempts=1) as admin:
        ended: list[str] = []

        async def load(i: int) -> None:
            await admin.load_adapter("tuned", paths[i % 5])
            ended.append(paths[i % 5])

        async def unload() -> None:
            with contextlib.suppress(NotFound):
                await admin.unload_adapter("tuned")
                ended.append("")

        async with asyncio.timeout(30):
            await asyncio.gather(*(each for i in range(20) for each in (load(i), unload())))

        async def settled() -> bool:
            records = [record for worker in fleet.workers for record in await worker.worker.adapters()]
            return all(record.state == "ready" for record in records)

        await eventually(settled)
        found = [[(r.name, r.path) for r in await worker.worker.adapters()] for worker in fleet.workers]
        assert found[0] == found[1] == found[2] == ([("tuned", ended[-1])] if ended[-1] else [])
        assert [(record.name, record.path) for record in await admin.adapters()] == found[0]
        # Whatever came last, the name can be loaded and asked for.
        await admin.load_adapter("tuned", paths[0])
        async with Client(fleet.frontend.url) as client:
            sampling = {"max_tokens": 3, "ignore_eos": True}
            answers = [await client.generate([5, i], sampling_params=sampling, model="tuned") for i in range(6)]
        assert {tuple(answer.choices[0].token_ids.shape) for answer in answers} == {(3,)}
        assert all(worker.engine.calls("generate") for worker in fleet.workers)


async def test_an_adapter_that_failed_and_could_not_be_rolled_back_is_routable_once_it_is_loaded_again(
    tmp_path: Path,
) -> None:
    """The load fails on one worker and the unloading on the other; each later success means servable everywhere."""
    lost = MockSettings(faults=(Fault(kind="fail", operation="unload_adapter", times=2),))
    refusing = MockSettings(faults=(Fault(kind="fail", operation="load_adapter"),))
    path = write_adapter(tmp_path, "a1", value=1.0)
    async with (
        fleet_of([lost, refusing]) as fleet,
        Client(fleet.frontend.url, attempts=1) as client,
        AdminClient(fleet.frontend.url, attempts=1) as admin,
    ):
        sampling = {"max_tokens": 3, "ignore_eos": True}
        with pytest.raises(EngineFailed):
            await admin.load_adapter("tuned", path)
        with pytest.raises(NotFound):
            await client.generate([5, 6], sampling_params=sampling, model="tuned")
        for _ in range(2):
            record = await admin.load_adapter("tuned", path)
            assert record.state == "ready"
            before = [worker.engine.calls("generate") for worker in fleet.workers]
            await fleet.until(lambda: all(member.routable for member in fleet.fleet.members))
            for i in range(8):
                await client.generate([5, 6, i], sampling_params=sampling, model="tuned")
            after = [worker.engine.calls("generate") for worker in fleet.workers]
            assert all(b > a for a, b in zip(before, after, strict=True))
