"""The soak, shortened: mixed load and abuse on a frontend and its workers leave nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def soak(tmp_path: Path, *words: str) -> dict[str, object]:
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--json", str(report), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert report.exists(), done.stderr[-3000:]
    found: dict[str, object] = json.loads(report.read_text())
    assert (found["findings"], done.returncode) == ({}, 0)
    return found


@pytest.mark.timeout(300)
def test_a_short_soak_on_the_mock_finds_nothing(tmp_path: Path) -> None:
    found = soak(tmp_path, "--engine", "mock", "--workers", "2", "--minutes", "0.1", "--update-s", "1.5")
    did, answers = found["did"], found["answers"]

    assert isinstance(did, dict)
    assert isinstance(answers, dict)
    assert did["update keep"] >= 1
    assert did["adapter reload"] >= 1
    assert answers["rollout ok"] > 10
    assert any(name.startswith("malformed 4") for name in answers)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_soak_of_a_minute_on_the_embedded_engine_finds_nothing(tmp_path: Path) -> None:
    soak(tmp_path, "--engine", "embedded", "--minutes", "1")
