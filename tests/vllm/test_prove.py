"""The proof's dense run over real vLLM, as its command runs it. The other runs: `rollplane prove`, in `.ci/full`."""

import json
import subprocess
import sys
from pathlib import Path


def test_weights_from_a_trainers_memory_are_the_ones_that_vllm_samples_with(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    command = [sys.executable, "-m", "rollplane.cli.main", "prove", "--run", "dense", "--engine", "vllm"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "proof"), "--json", str(out)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = json.loads(out.read_text())

    assert run["passed"] is True
    assert run["policy_versions"] == ["v0", "v1", "v2", "v3"]
    assert max(run["mismatch_kl"]) < 1e-3
    assert all(step["previous_kl"] >= 50 * step["mismatch_kl"] for step in run["steps"][1:])
