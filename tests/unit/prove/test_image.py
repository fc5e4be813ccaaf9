"""The image run as one of the proof's runs."""

from pathlib import Path

import pytest

from rollplane.demo.image.run import ImageReport, ImageStep
from rollplane.prove import image
from rollplane.prove.command import chosen_runs, image_is_possible


def report(*, reward_after: float, failures: list[str] | None = None) -> ImageReport:
    step = ImageStep(
        step=1,
        version="v1",
        reward=reward_after,
        mismatch_kl=2e-13,
        previous_kl=0.2,
        probe_before=0.2,
        probe_after=0.5,
        failures=failures or [],
    )
    return ImageReport(
        steps=[step], policy_versions=["v0", "v1"], reward_before=0.3, reward_after=reward_after, passed=True
    )


def proof(monkeypatch: pytest.MonkeyPatch, found: ImageReport) -> image.Run:
    monkeypatch.setattr(image, "run_image", lambda out, **options: found)
    return image.run_images(Path("out"), vllm_env=Path("env"), vllm_rs=Path("vllm-rs"), seed=0)


def test_its_steps_are_the_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = proof(monkeypatch, report(reward_after=0.6)).tree()

    assert tree["passed"] is True
    assert (tree["name"], tree["mismatch_kl"], tree["policy_versions"]) == ("image-lora", [2e-13], ["v1"])
    assert tree["figures"]["probe_v1"] == {"before": 0.2, "after": 0.5}


def test_a_failure_of_a_step_and_a_reward_that_did_not_rise_fail_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not proof(monkeypatch, report(reward_after=0.6, failures=["no"])).passed
    assert "from 0.300 to 0.300" in proof(monkeypatch, report(reward_after=0.3)).failures[0]


def test_it_is_one_of_the_runs_and_needs_both_parts_of_vllm(tmp_path: Path) -> None:
    assert "image" in chosen_runs(None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").touch()
    assert not image_is_possible(vllm_env=tmp_path, vllm_rs=tmp_path / "rs")
    (tmp_path / "rs").touch()
    assert image_is_possible(vllm_env=tmp_path, vllm_rs=tmp_path / "rs")
