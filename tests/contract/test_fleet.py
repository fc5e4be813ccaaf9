"""What a fleet promises holds over every engine: two workers of one kind, updated apart, behind a router."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.contract.engines import ENGINES
from tests.unit.rl.local_workers import LocalWorker

from rollplane.errors import PreconditionFailed
from rollplane.rl.fleet import Fleet
from rollplane.router.router import Router
from rollplane.testing.requests import answer, make_request


async def versions_of(router: Router, **options: Any) -> set[str]:
    asked = [make_request([5, 6, i], max_tokens=3, options=options, request_id=f"r{i}") for i in range(4)]
    answers = await asyncio.gather(*(answer(router, request) for request in asked))
    return {str(version) for one in answers for version, _ in one.choices[0].policy_versions}


@pytest.mark.parametrize("name", ENGINES)
async def test_bounded_staleness_is_kept(name: str, tmp_path: Path) -> None:
    fleet = Fleet(epoch=1)
    router = Router(fleet)
    workers = [LocalWorker(f"http://w{i}", engine=ENGINES[name].make(tmp_path / str(i)).engine) for i in range(2)]
    try:
        for worker in workers:
            await worker.start()
            fleet.add(worker)
        await workers[0].worker.set_policy_version("newer")
        await workers[0].refresh()
        assert await versions_of(router, max_policy_lag=0) == {"newer"}
        assert "newer" in await versions_of(router, max_policy_lag=1)
        workers[0].cut()
        with pytest.raises(PreconditionFailed, match="behind the newest, 'newer'"):
            await versions_of(router, max_policy_lag=0)
        assert await versions_of(router, max_policy_lag=1) == {workers[1].worker.version}
    finally:
        await router.close()
