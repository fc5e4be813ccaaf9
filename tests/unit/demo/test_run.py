"""Facts about a run's directory and its checks."""

from pathlib import Path

import pytest

from rollplane.demo import run
from rollplane.errors import InvalidRequest


def options(out, **changes):
    return run.Options(**{"steps": 5, "seed": 0, "workers": 1, "out": out, "engine_dtype": "float32", **changes})


def test_an_earlier_run_is_replaced(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "before.npz").write_bytes(b"old")
    (tmp_path / "report.json").write_text("{}")
    run._prepare(options(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "rollouts"]
    assert not any((tmp_path / "rollouts").iterdir())


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InvalidRequest, match=r"holds \['thesis.tex'\], which no run of the demo made"):
        run._prepare(options(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("name", ["checkpoints", "report.json"])
def test_what_no_run_can_replace_is_said_and_left_alone(tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "precious").mkdir(parents=True)
    out = tmp_path / "out"
    out.mkdir()
    if name == "checkpoints":
        (out / name).symlink_to(elsewhere)
    else:
        (out / name).mkdir()
    with pytest.raises(InvalidRequest, match="cannot be a run's directory"):
        run._prepare(options(out))
    assert (elsewhere / "precious").is_dir()
    assert (out / name).exists()


def test_a_directory_that_cannot_be_made_is_said():
    with pytest.raises(InvalidRequest, match="/proc/x cannot be a run's directory"):
        run._prepare(options(Path("/proc/x")))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 4}, "steps must be at least 5, got 4"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"engine_dtype": "float16"}, "engine_dtype must be bfloat16 or float32, got 'float16'"),
    ],
)
def test_options_that_no_run_can_have_are_refused(tmp_path, changes, says):
    with pytest.raises(InvalidRequest, match=says):
        run._prepare(options(tmp_path, **changes))


def report(**changes):
    return {
        "options": {"engine_dtype": "float32"},
        "lost_requests": 0,
        "mismatch_kl": {"both": 2e-14},
        "stress_mismatch_kl": {"none": 1.6e-3, "both": 1.2e-5},
        "previous_policy": {"ratio": 213.0},
        "steps": [
            {"kl": 1e-14},
            {"kl": None, "in_flight": {"versions": {"v3": {"kl": 1e-14}, "v4": {"kl": None}}}},
        ],
        **changes,
    }


def test_the_checks_of_a_good_run_hold():
    checks = run._checks(report())
    assert len(checks) == 4
    assert all(checks.values())


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"lost_requests": 1}, "no_request_lost"),
        ({"stress_mismatch_kl": {"none": 2e-4, "both": 1.2e-5}}, "stress_gain_at_least_20"),
        ({"previous_policy": {"ratio": 49.0}}, "previous_policy_at_least_50_times_worse"),
        ({"mismatch_kl": {"both": 2e-9}}, "float32_kl_below_1e-9"),
        ({"steps": [{"kl": 2e-9}]}, "float32_kl_below_1e-9"),
        ({"steps": [{"kl": None, "in_flight": {"versions": {"v3": {"kl": 2e-9}}}}]}, "float32_kl_below_1e-9"),
    ],
)
def test_each_check_can_break(changes, broken):
    assert [name for name, held in run._checks(report(**changes)).items() if not held] == [broken]


def test_a_bfloat16_engine_is_not_held_to_float32():
    assert "float32_kl_below_1e-9" not in run._checks(report(options={"engine_dtype": "bfloat16"}))
