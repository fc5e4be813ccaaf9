"""The proof's dense and LoRA runs over real vLLM, as its command runs them. The image run: `tests/real/test_image_run.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_what_a_trainer_hands_over_is_what_vllm_samples_with(tmp_path: Path) -> None:
    """Weights from memory by broadcast, adapters from a directory."""
    out = tmp_path / "proof.json"
    command = [sys.executable, "-m", "rollplane.cli.main", "prove", "--run", "dense", "--run", "lora"]
    done = subprocess.run(
        [*command, "--engine", "vllm", "--out", str(tmp_path / "proof"), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(out.read_text())

    assert [run["name"] for run in runs] == ["dense-broadcast", "lora-filesystem"]
    for run in runs:
        assert (run["engine"], run["passed"]) == ("vllm", True)
        assert run["policy_versions"] == ["v0", "v1", "v2", "v3"]
        assert max(run["mismatch_kl"]) < 1e-3
        assert all(step["previous_kl"] >= 50 * step["mismatch_kl"] for step in run["steps"][1:])
