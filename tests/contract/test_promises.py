"""Every engine keeps the promises of `rollplane.engines.base`; one test per engine and promise."""

from pathlib import Path

import pytest
from tests.contract.engines import ENGINES

from rollplane.testing import CHECKS, Check, check_engine, run_check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ENGINES)
async def test_promise(name: str, check: Check, tmp_path: Path) -> None:
    case = ENGINES[name]
    subject = case.make(tmp_path)
    await subject.engine.start()
    try:
        why = await run_check(check, subject)
    finally:
        await subject.engine.close()

    assert (why is not None) == (check.__name__ in case.lacks), why


@pytest.mark.parametrize("name", ["mock-instant", "mock-moe"])
async def test_all_promises_on_one_engine(name: str, tmp_path: Path) -> None:
    case = ENGINES[name]

    report = await check_engine(lambda: case.make(tmp_path))

    assert set(report.not_applicable) == case.lacks
    assert len(report.kept) == len(CHECKS) - len(case.lacks)


def test_what_an_engine_lacks_is_named_like_a_check() -> None:
    names = {check.__name__ for check in CHECKS}

    assert [name for name, case in ENGINES.items() if not case.lacks <= names] == []
