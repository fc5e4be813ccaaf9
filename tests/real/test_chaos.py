"""Faults under load, in short: bench/chaos.py holds every promise. Its three minutes are run by hand."""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench/chaos.py"


async def chaos(*arguments: str, limit_s: float) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(BENCH), *arguments, stdout=PIPE, stderr=STDOUT)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), limit_s)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return process.returncode, output.decode()


async def test_killed_stopped_and_cut_off_workers_break_no_promise_while_the_policy_changes(tmp_path: Path) -> None:
    options = ["--seconds", "10", "--workers", "4", "--clients", "8", "--seed", "5", "--logs", str(tmp_path)]
    status, said = await chaos(*options, limit_s=120.0)
    assert status == 0, said
    assert "every promise held" in said
    assert "updates: confirmed" in said
    assert "fault: " in said


@pytest.mark.full
async def test_three_minutes_of_chaos_on_six_workers_break_no_promise(tmp_path: Path) -> None:
    status, said = await chaos("--seconds", "180", "--logs", str(tmp_path), limit_s=420.0)
    assert status == 0, said
