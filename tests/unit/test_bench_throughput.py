"""What `bench/throughput.py` makes of the rounds that are there; measuring needs vLLM."""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
ROUND = {"steady": 2.0, "drained": 1.0, "steps": 1.1}


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import throughput

    return throughput


def test_rounds_of_a_file_are_reported_and_others_refused_before_anything_is_measured(
    tmp_path: Path, throughput: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rounds"
    line = {"group": "rs", "seconds": 5.0, "rounds": {"vllm-rs": ROUND, "rollplane": ROUND}}
    file.write_text(f"{json.dumps(line)}\n" * 3)

    def refusal(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["throughput.py", "--append", str(file), *words])
        with pytest.raises(SystemExit, match="2"):
            throughput.main()
        return capsys.readouterr().err

    monkeypatch.setattr(sys, "argv", ["throughput.py", "--rounds", "0", "--append", str(file)])
    throughput.main()
    assert "3 rounds" in capsys.readouterr().out
    assert "no rounds to report" in refusal("--rounds", "0", "--group", "python")

    monkeypatch.setattr(throughput, "measure", None)
    assert "line 1: a round of 5 s, not of 10" in refusal("--seconds", "10")
    with file.open("a") as more:
        more.write('{"group":"rs","seconds":5.0,"tokens_per_s":{"vllm-rs":1.0}}\n')  # as it was once
    assert "line 4: Object missing required field `rounds`" in refusal()


@pytest.mark.parametrize(("count", "t"), [(2, 12.706), (12, 2.201), (14, 2.160), (31, 2.042), (61, 2.042)])
def test_bounds_are_never_narrower_than_students(count: int, t: float, throughput: Any) -> None:
    ratios = [1.0 + 0.01 * i for i in range(count)]
    low, high = throughput.bounds(ratios)
    assert (high - low) / 2 == pytest.approx(t * statistics.stdev(ratios) / math.sqrt(count))
