"""A fleet of the size that is promised: bench/many_workers.py holds every promise, on 64 workers with ports of their own."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench/many_workers.py"


@pytest.mark.full
async def test_sixty_four_workers_are_loaded_updated_killed_and_brought_back(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(BENCH), "--json", str(figures), stdout=PIPE, stderr=STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 420.0)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    said = output.decode()
    assert process.returncode == 0, said
    assert "every promise held" in said
    found = json.loads(figures.read_text())
    assert (found["workers"], found["killed"]) == (64, 16)
    assert found["update v1"]["told"] == dict.fromkeys(("stage", "pause", "apply", "settle"), 64)
