"""The plot and the table of a proof."""

import io
from pathlib import Path

from rich.console import Console

from rollplane.prove.command import table_of
from rollplane.prove.plot import write_plot
from rollplane.prove.record import Run, Step

STRESS = {"none": 1.5e-3, "routes": 1.3e-3, "mask": 2.6e-4, "both": 1.2e-5}
FLIGHT = {"mixed_answers": 8, "versions": {"v0": {"tokens": 20, "kl": 1.25e-4, "kl_after_boundary": None}}}


def proof() -> list[Run]:
    steps = [
        Step(step=0, policy_version="v0", mismatch_kl=2e-4, reward=0.5),
        Step(step=1, policy_version="v1", mismatch_kl=1e-13, previous_kl=0.1),
    ]
    moe = Run(name="moe-routed-replay", engine="embedded", dtype="bfloat16", steps=steps[:1])
    moe.figures = {"stress_mismatch_kl": STRESS, "mismatch_kl_before_training": STRESS, "in_flight": FLIGHT}
    return [Run(name="dense-broadcast", engine="vllm", dtype="bfloat16", steps=steps), moe]


def test_the_plot_names_every_run_and_replay(tmp_path: Path) -> None:
    write_plot(proof(), tmp_path / "proof.svg")
    text = (tmp_path / "proof.svg").read_text()

    assert [name for name in ("dense", "moe", "masks", "both", "policy before") if name not in text] == []


def test_the_plot_does_without_a_run_of_replays(tmp_path: Path) -> None:
    write_plot(proof()[:1], tmp_path / "proof.svg")

    assert "masks" not in (tmp_path / "proof.svg").read_text()


def test_the_table_says_what_held_in_flight_and_keeps_huge_ratios_short() -> None:
    said = io.StringIO()
    Console(file=said, width=110).print(table_of(proof()))

    assert "20 tokens, own keys" in said.getvalue()
    assert "over 100,000x" in said.getvalue()
