"""The mismatch figures of a run, from the files it saved: `python -m rollplane.demo.recompute DIR`.

DIR holds `checkpoints/v0` to `v3`, `rollouts/before.npz` and `rollouts/step-1.npz` to `step-3.npz`, and for the routing
stress `checkpoints/stress` and `rollouts/stress.npz`. Checkpoints are safetensors with a config; rollouts are the
arrays of `rollplane.demo.rollouts.Rollouts`. Nothing else is read.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from rollplane.demo.figures import measure, mismatch_kl, pooled_kl
from rollplane.demo.grpo import SAVED_STEPS
from rollplane.demo.models import load_model
from rollplane.demo.rollouts import Rollouts
from rollplane.errors import NotFound, RollplaneError


def recompute(directory: Path) -> dict[str, Any]:
    """The figures of the run in `directory`, all in nats:

    - `mismatch_kl`: {none, routes, mask, both}, on the rollouts before training.
    - `stress_mismatch_kl`: the same four on the routing stress.
    - `previous_policy`: the rollouts of steps 1 to 3 scored with the weights that made them (`kl_right`), and with
      those of the policy before (`kl_previous`), both replayed; `ratio` of the two.

    Raises:
        NotFound: a file of the run is missing.
    """
    checkpoints, saved = directory / "checkpoints", directory / "rollouts"
    for needed in (checkpoints / "v0", saved / "before.npz", checkpoints / "stress", saved / "stress.npz"):
        if not needed.exists():
            raise NotFound(f"{needed} is missing: {directory} does not hold a finished run")
    before = mismatch_kl(load_model(checkpoints / "v0"), Rollouts.load(saved / "before.npz"))
    stress = mismatch_kl(load_model(checkpoints / "stress"), Rollouts.load(saved / "stress.npz"))
    right, previous = [], []
    for step in SAVED_STEPS:
        rollouts = Rollouts.load(saved / f"step-{step}.npz")
        right.append(measure(load_model(checkpoints / f"v{step}"), rollouts))
        previous.append(measure(load_model(checkpoints / f"v{step - 1}"), rollouts))
    kl_right, kl_previous = pooled_kl(right), pooled_kl(previous)
    return {
        "mismatch_kl": before,
        "stress_mismatch_kl": stress,
        "previous_policy": {
            "steps": list(SAVED_STEPS),
            "kl_right": kl_right,
            "kl_previous": kl_previous,
            "ratio": kl_previous / kl_right,
        },
    }


def main() -> int:
    """Print the figures as JSON; exit code 1 where the run is not whole, 2 on a wrong call."""
    return print_figures(recompute, module="rollplane.demo.recompute")


def print_figures(of: Callable[[Path], Any], *, module: str) -> int:
    """Print as JSON what `of` makes of the directory on the command line of `module`; the exit code, as `main`'s."""
    if len(sys.argv) != 2:
        sys.stderr.write(f"usage: python -m {module} DIR\n")
        return 2
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    try:
        figures = of(Path(sys.argv[1]))
    except RollplaneError as error:
        sys.stderr.write(f"recompute: {error.message}\n")
        return 1
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
