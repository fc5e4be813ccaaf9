"""The mixture-of-experts run: the demo's loop for a few steps, one of them updated in flight, and the routing stress."""

from pathlib import Path
from typing import Any, Final

from rich.console import Console

from rollplane.demo.figures import SETTINGS
from rollplane.demo.run import Options, run
from rollplane.prove.record import REPLAY_GAIN, Run, Step

STEPS: Final = 5
"""The fifth (step 4) gets its weights while its rollouts run."""


def run_moe(out: Path, *, seed: int, console: Console) -> Run:
    """Five steps of GRPO with both replays over the embedded engine in bfloat16; the mismatch with and without each replay.

    Raises:
        RollplaneError: see `rollplane.demo.run.run`.
    """
    report = run(Options(steps=STEPS, seed=seed, workers=1, out=out, engine_dtype="bfloat16"), console=console)
    found = Run(name="moe-routed-replay", engine="embedded", dtype="bfloat16")
    found.steps = [_step(step) for step in report["steps"]]
    stress = report["stress_mismatch_kl"]
    found.figures = {
        "replayed": list(SETTINGS),
        "stress_mismatch_kl": stress,
        "mismatch_kl_before_training": report["mismatch_kl"],
        "previous_policy": report["previous_policy"],
        "mixed_answers": report["mixed_answers"],
        "report": str(out / "report.html"),
    }
    found.failures = judge_stress(stress) + [name for name, held in report["checks"].items() if not held]
    if not report["mixed_answers"]:
        found.failures.append("no answer lived through the update in flight")
    return found


def judge_stress(stress: dict[str, float]) -> list[str]:
    """What the routing stress fails to show."""
    if stress["mask"] >= REPLAY_GAIN * stress["both"]:
        return []
    return [
        f"stress: both replays leave {stress['both']:.2e}, over 1/{REPLAY_GAIN:g} of {stress['mask']:.2e} by masks alone"
    ]


def _step(record: dict[str, Any]) -> Step:
    return Step(
        step=record["step"],
        policy_version=record["policy_versions"][-1],
        mismatch_kl=record["kl"],
        reward=record["reward"],
        tokens=record["tokens"],
        seconds=record["seconds"],
    ).judge()
