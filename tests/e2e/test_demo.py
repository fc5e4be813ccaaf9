"""The demo, whole: real processes, HTTP, learning, its figures and its end."""

import json
import subprocess
import sys

import pytest
from tests.e2e.commands import demo

from rollplane.demo import recompute

STEPS = 6  # two more than the first update in flight
FLEET_LOG = "fleet.log"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    command = demo("--steps", str(STEPS), "--workers", "2", "--out", str(out), imitation_steps=40)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(out / FLEET_LOG).read_text()[-4000:]}"
    assert "Mismatch KL" in done.stdout
    return out


@pytest.fixture(scope="module")
def report(run_dir):
    return json.loads((run_dir / "report.json").read_text())


@pytest.mark.timeout(300)
class TestAFewStepsInFloat32:
    def test_no_request_is_lost(self, report):
        assert report["requests"] == 2 * 128 + STEPS * 16
        assert report["lost_requests"] == 0

    def test_with_both_replays_the_trainer_computes_the_engines_log_probabilities(self, report):
        assert report["mismatch_kl"]["both"] < 1e-9
        assert all(step["kl"] < 1e-9 for step in report["steps"] if step["kl"] is not None)
        assert report["mismatch_kl"]["none"] > 1e-5, "without the masks it cannot"

    def test_replay_corrects_the_routing_stress_in_bfloat16(self, report):
        stress = report["stress_mismatch_kl"]
        assert stress["none"] > 20 * stress["both"] > 0
        assert stress["both"] < min(stress["routes"], stress["mask"])

    def test_the_previous_policy_is_told_from_the_right_one(self, report):
        assert report["previous_policy"]["steps"] == [1, 2, 3]
        assert report["previous_policy"]["ratio"] > 50

    def test_every_policy_made_tokens(self, report):
        made_tokens = [version for version in report["policy_versions"] if version != "v4"]
        assert made_tokens == ["v0", "v1", "v2", "v3", "v5", "v6"], "v4 came in flight: it may have come too late"
        settled = [step for step in report["steps"] if "in_flight" not in step]
        assert all(step["policy_versions"] == [f"v{step['step']}"] for step in settled)

    def test_an_update_in_flight_marks_every_token(self, report):
        (flight,) = [step for step in report["steps"] if "in_flight" in step]
        versions = flight["in_flight"]["versions"]
        assert list(versions) == ["v3", "v4"]
        assert sum(part["tokens"] for part in versions.values()) == flight["tokens"]
        assert all(part["kl"] < 1e-9 for part in versions.values() if part["kl"] is not None)

    def test_the_figures_come_from_the_saved_files(self, run_dir, report, monkeypatch, capsys):
        monkeypatch.setattr(sys, "argv", ["rollplane.demo.recompute", str(run_dir)])
        assert recompute.main() == 0
        again = json.loads(capsys.readouterr().out)
        for name in ("none", "routes", "mask", "both"):
            for figure in ("mismatch_kl", "stress_mismatch_kl"):
                assert again[figure][name] == pytest.approx(report[figure][name], rel=1e-6)
        for name in ("kl_right", "kl_previous", "ratio"):
            assert again["previous_policy"][name] == pytest.approx(report["previous_policy"][name], rel=1e-6)

    def test_the_page_is_there(self, run_dir):
        assert (run_dir / "report.html").read_text().count("<svg") == 3
