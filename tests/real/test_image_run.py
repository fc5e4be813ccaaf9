"""The image run on vLLM's renderer and its Rust server, through our own frontend and through Dynamo's."""

from pathlib import Path

import pytest
from tests.real.processes import DYNAMO_ENV, VLLM_ENV, VLLM_RS

from rollplane.demo.image.run import KL_LIMIT, PREVIOUS_RATIO, run_image


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dynamo_env", [None, DYNAMO_ENV], ids=["rollplane", "dynamo"])
def test_a_policy_that_sees_learns_colours_and_every_step_passes(tmp_path: Path, dynamo_env: Path | None) -> None:
    report = run_image(tmp_path / "run", vllm_env=VLLM_ENV, vllm_rs=VLLM_RS, dynamo_env=dynamo_env)

    assert [step.failures for step in report.steps] == [[], [], []]
    assert report.passed
    assert report.policy_versions == ["v0", "v1", "v2", "v3"]
    assert all(0 <= kl < KL_LIMIT for kl in report.plain()["mismatch_kl"])
    assert all(step.previous_kl > PREVIOUS_RATIO * step.mismatch_kl for step in report.steps)
    assert {path.name for path in (tmp_path / "run" / "adapters").iterdir()} == {"v0", "v1", "v2", "v3"}
    assert len(list((tmp_path / "run").glob("rollout-v*.npz"))) == 4
