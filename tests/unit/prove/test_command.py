"""What the command says where vLLM is not here, and where it cannot write."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollplane.cli.commands import app
from rollplane.prove import command
from rollplane.prove.record import Run, Step


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without any environment, and an interpreter without vLLM or plots."""
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("vllm", "matplotlib") else find(name)
    )
    return tmp_path


def test_what_makes_vllm_is_named(bare: Path) -> None:
    found = CliRunner().invoke(app, ["prove", "--run", "dense", "--engine", "vllm"])

    assert found.exit_code == 2
    assert "make vllm-env" in found.output
    assert "--vllm-python" in found.output


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--vllm-python", "absent"), "absent is no program that can be run"),
        (("--run", "soup"), "run must be one of dense, lora, image, moe, got 'soup'"),
        (("--recompute",), "holds no proof"),
    ],
)
def test_options_that_nothing_can_run_with_end_with_2(bare: Path, option: tuple[str, ...], says: str) -> None:
    found = CliRunner().invoke(app, ["prove", "--engine", "vllm", *option])

    assert found.exit_code == 2
    assert says in found.output


def test_a_proof_without_vllm_says_what_is_left_out_and_what_serves_instead(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prove_all(names: list[str], place: Path, *, engine: str, **_: object) -> list[Run]:
        step = Step(step=0, policy_version="v0", mismatch_kl=1e-4)
        return [Run(name=name, engine=engine, dtype="bfloat16", steps=[step]) for name in names]

    monkeypatch.setattr(command, "prove_all", prove_all)

    found = CliRunner().invoke(app, ["prove", "--json", "proof.json"])

    assert found.exit_code == 0, found.output
    assert "image: left out" in found.output
    assert "dense, lora: over the embedded engine, vLLM is not here" in found.output
    runs = json.loads((bare / "proof.json").read_text())
    assert [(run["name"], run["engine"]) for run in runs] == [(n, "embedded") for n in ("dense", "lora", "moe")]


def test_a_run_that_breaks_off_is_told_by_its_own_engine(bare: Path) -> None:
    found = CliRunner().invoke(app, ["prove", "--run", "image", "--json", "proof.json"])

    assert found.exit_code == 1
    assert "make vllm-env" in found.output
    [run] = json.loads((bare / "proof.json").read_text())
    assert (run["engine"], run["dtype"], run["passed"]) == ("vllm-rs", "float32", False)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(bare: Path) -> None:
    (bare / "file").touch()

    found = CliRunner().invoke(app, ["prove", "--recompute", "--json", "file/proof.json"])

    assert found.exit_code == 2
    assert "cannot be written" in found.output
