"""When a step passes."""

import math

import pytest

from rollplane.prove.moe import judge_stress
from rollplane.prove.record import Run, Step


def step(**changes: float) -> Step:
    figures: dict[str, float] = {"mismatch_kl": 3e-4, "previous_kl": 3e-2, **changes}
    return Step(step=1, policy_version="v1", **figures).judge()  # type: ignore[arg-type]


def test_a_step_passes_within_both_limits() -> None:
    assert step().passed


@pytest.mark.parametrize("kl", [1e-3, math.nan, math.inf])
def test_a_mismatch_at_the_limit_or_of_no_size_fails(kl: float) -> None:
    assert not step(mismatch_kl=kl, previous_kl=1e9).passed


def test_a_policy_that_cannot_be_told_from_the_one_before_fails() -> None:
    failed = step(previous_kl=3e-4 * 49)

    assert not failed.passed
    assert "previous policy" in failed.failures[0]


def test_a_run_without_steps_or_with_a_failure_of_its_own_has_not_passed() -> None:
    run = Run(name="dense", engine="mock", dtype="float32")
    assert not run.passed
    run.steps.append(step())
    assert run.passed
    run.failures.append("left over")
    assert run.tree()["passed"] is False


def test_the_tree_has_a_figure_and_a_version_per_step() -> None:
    tree = Run(name="dense", engine="mock", dtype="float32", steps=[step()]).tree()

    assert (tree["mismatch_kl"], tree["policy_versions"]) == ([3e-4], ["v1"])
    assert tree["steps"][0]["passed"] is True


def test_replays_that_gain_too_little_fail_the_stress() -> None:
    assert judge_stress({"mask": 3e-4, "both": 1.2e-5}) == []
    assert judge_stress({"mask": 3e-4, "both": 3e-5}) != []
