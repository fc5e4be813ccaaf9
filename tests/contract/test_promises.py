"""Every engine keeps the promises of `rollplane.engines.base`; one test per engine and promise."""

from pathlib import Path

import pytest

from rollplane.testing import CHECKS, Check, check_engine, run_check
from tests.contract.engines import ENGINES

# What an engine may lack, by name: a check that stops applying to an engine is a lost promise, not a pass.
LACKS: dict[str, set[str]] = {
    "mock-instant": {
        "an_aborted_unary_request_keeps_its_tokens",  # it is done before an abort can reach it
        "masks_are_the_support",
        "routes_begin_where_asked",
    },
    "mock-paced": {"masks_are_the_support", "routes_begin_where_asked"},
    "mock-moe": set(),
    "mock-bare": {
        "masks_are_the_support",
        "routes_begin_where_asked",
        "salts_separate_caches",
        "kv_events_tell_what_is_cached",
        "adapters_load_serve_and_go",
    },
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ENGINES)
async def test_promise(name: str, check: Check, tmp_path: Path) -> None:
    subject = ENGINES[name](tmp_path)
    await subject.engine.start()
    try:
        why = await run_check(check, subject)
    finally:
        await subject.engine.close()

    assert (why is not None) == (check.__name__ in LACKS[name]), why


@pytest.mark.parametrize("name", ENGINES)
async def test_all_promises_on_one_engine(name: str, tmp_path: Path) -> None:
    report = await check_engine(lambda: ENGINES[name](tmp_path))

    assert set(report.not_applicable) == LACKS[name]
    assert len(report.kept) == len(CHECKS) - len(LACKS[name])
