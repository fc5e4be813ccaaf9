"""A report held to the figures that its files give."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollplane.errors import NotFound
from rollplane.prove.recompute import differences, recompute

STRESS = {"none": 1.5e-3, "routes": 1.3e-3, "mask": 2.6e-4, "both": 1.2e-5}
FLIGHT = {"mixed_answers": 8, "versions": {"v0": {"tokens": 20, "kl": 1e-4, "kl_after_boundary": None}}}


def report(directory: Path) -> None:
    steps = [{"mismatch_kl": 2e-4, "previous_kl": None}, {"mismatch_kl": 3e-4, "previous_kl": 0.05}]
    figures = {
        "mismatch_kl_before_training": STRESS,
        "stress_mismatch_kl": STRESS,
        "previous_policy": {"steps": [1, 2, 3], "ratio": 190.0},
        "in_flight": FLIGHT,
    }
    runs = [
        {"name": "dense-broadcast", "steps": steps, "figures": {}},
        {"name": "moe-routed-replay", "steps": [], "figures": figures},
    ]
    (directory / "proof.json").write_text(json.dumps(runs))


def again(**changes: Any) -> dict[str, Any]:
    dense = {"mismatch_kl": [2e-4, 3e-4], "previous_kl": [None, 0.05]}
    moe = {
        "mismatch_kl": STRESS,
        "stress_mismatch_kl": STRESS,
        "previous_policy": {"steps": [1, 2, 3], "ratio": 190.0},
        "in_flight": FLIGHT,
    }
    return {"dense": dense | changes, "moe": moe}


def test_equal_figures_differ_in_nothing(tmp_path: Path) -> None:
    report(tmp_path)

    assert differences(tmp_path, again()) == []


def test_a_figure_that_the_files_do_not_give_is_named(tmp_path: Path) -> None:
    report(tmp_path)
    (other,) = differences(tmp_path, again(mismatch_kl=[2e-4, 3.1e-4]))

    assert other.startswith("dense: mismatch_kl[1] is 0.00031")


def test_a_reported_run_without_files_is_named(tmp_path: Path) -> None:
    report(tmp_path)

    assert differences(tmp_path, {"dense": again()["dense"]}) == ["moe: reported, but its files are not there"]


def test_a_directory_without_a_proof_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no proof"):
        recompute(tmp_path)
    with pytest.raises(NotFound, match="cannot be read"):
        differences(tmp_path, {})
