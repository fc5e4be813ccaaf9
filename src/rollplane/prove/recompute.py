"""The figures of a proof again, from the files it kept: `python -m rollplane.prove.recompute DIR`.

Read are `dense/checkpoints/v0` to `v3` with `dense/step-0.npz` to `step-3.npz`, `lora/base` and `lora/adapters/v0` to `v3` with
`lora/step-0.npz` to `step-3.npz`, and `moe` as `rollplane.demo.recompute` reads it; runs that are not there are left out.
"""

import sys
from pathlib import Path
from typing import Any

from rollplane.demo.recompute import print_figures
from rollplane.demo.recompute import recompute as recompute_moe
from rollplane.demo.rollouts import Rollouts
from rollplane.errors import NotFound
from rollplane.prove.policy import compare, load_policy
from rollplane.prove.runs import STEPS, with_adapter


def recompute(directory: Path) -> dict[str, Any]:
    """By run: `mismatch_kl` and `previous_kl` per step (None for the first), in nats; for moe the demo's figures.

    Raises:
        NotFound: nothing is there, or a file of a run is missing.
    """
    found: dict[str, Any] = {}
    try:
        if (directory / "dense").is_dir():
            dense = directory / "dense"
            found["dense"] = _figures(
                dense, lambda version, rollouts: compare(load_policy(dense / "checkpoints" / version), rollouts).kl
            )
        if (directory / "lora").is_dir():
            lora = directory / "lora"
            found["lora"] = _figures(
                lora, lambda version, rollouts: with_adapter(lora / "base", lora / "adapters" / version, rollouts)
            )
        if (directory / "moe").is_dir():
            found["moe"] = recompute_moe(directory / "moe")
    except OSError as error:
        raise NotFound(f"{directory} does not hold a whole proof: {error}") from None
    if not found:
        raise NotFound(f"{directory} holds no proof")
    return found


def _figures(directory: Path, kl: Any) -> dict[str, list[float | None]]:
    rollouts = [Rollouts.load(directory / f"step-{step}.npz") for step in range(STEPS + 1)]
    return {
        "mismatch_kl": [kl(f"v{step}", each) for step, each in enumerate(rollouts)],
        "previous_kl": [kl(f"v{step - 1}", each) if step else None for step, each in enumerate(rollouts)],
    }


def main() -> int:
    """Print the figures as JSON; exit code 1 where the proof is not whole, 2 on a wrong call."""
    return print_figures(recompute, module="rollplane.prove.recompute")


if __name__ == "__main__":
    sys.exit(main())
