"""The figures of a proof again, from the files it kept: `python -m rollplane.prove.recompute DIR`, `rollplane prove --recompute`.

Read are `dense/checkpoints/v0` to `v3` with `dense/step-0.npz` to `step-3.npz`, `lora/base` and `lora/adapters/v0` to `v3` with
`lora/step-0.npz` to `step-3.npz`, `image` with its model, pictures, adapters and `rollout-v1.npz` to `-v3.npz`, and `moe` as
`rollplane.demo.recompute` reads it, with `moe/rollouts/in-flight.npz`; runs that are not there are left out.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from rollplane.demo.figures import in_flight_figures
from rollplane.demo.recompute import print_figures
from rollplane.demo.recompute import recompute as recompute_moe
from rollplane.demo.rollouts import Rollouts
from rollplane.errors import NotFound
from rollplane.prove.policy import compare, load_policy
from rollplane.prove.record import REPORT
from rollplane.prove.runs import STEPS, with_adapter

RELATIVE: Final = 1e-3
ABSOLUTE_KL: Final = 1e-10
"""Within which a figure is the same: sums in float32 depend on the processor."""


def recompute(directory: Path) -> dict[str, Any]:
    """By run: `mismatch_kl` and `previous_kl` per step (None for the first), in nats; for moe the demo's figures and `in_flight`.

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
        if (directory / "image").is_dir():
            from rollplane.demo.image.run import recompute as recompute_images

            found["image"] = recompute_images(directory / "image")
        if (directory / "moe").is_dir():
            moe = directory / "moe"
            policies = {name: moe / "checkpoints" / name for name in ("v0", "v1")}
            flight = in_flight_figures(Rollouts.load(moe / "rollouts" / "in-flight.npz"), policies)
            found["moe"] = {**recompute_moe(moe), "in_flight": flight}
    except OSError as error:
        raise NotFound(f"{directory} does not hold a whole proof: {error}") from None
    if not found:
        raise NotFound(f"{directory} holds no proof")
    return found


def differences(directory: Path, again: dict[str, Any]) -> list[str]:
    """What a proof's report says otherwise than the figures recomputed; empty where they agree.

    Raises:
        NotFound: there is no report.
    """
    try:
        runs = msgspec.json.decode((directory / REPORT).read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError) as error:
        raise NotFound(f"{directory / REPORT} cannot be read: {error}") from None
    found = []
    for run in runs:
        name = run["name"].split("-")[0]
        if name not in again:
            found.append(f"{name}: reported, but its files are not there")
            continue
        told = _told_moe(run["figures"]) if name == "moe" else _told(run["steps"])
        for where, value in _numbers(again[name]):
            said = told.get(where)
            if said is None or not math.isclose(value, said, rel_tol=RELATIVE, abs_tol=ABSOLUTE_KL):
                found.append(f"{name}: {where} is {value:.6g}, the report says {said}")
    return found


def _told(steps: list[dict[str, Any]]) -> dict[str, float]:
    return dict(_numbers({name: [step[name] for step in steps] for name in ("mismatch_kl", "previous_kl")}))


def _told_moe(figures: dict[str, Any]) -> dict[str, float]:
    named = {"mismatch_kl": figures["mismatch_kl_before_training"]}
    rest = {name: figures[name] for name in ("stress_mismatch_kl", "previous_policy", "in_flight")}
    return dict(_numbers({**named, **rest}))


def _numbers(tree: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a tree with its path; None and text are left out."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _numbers(value, f"{path}.{key}".lstrip("."))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _numbers(value, f"{path}[{i}]")
    elif isinstance(tree, int | float):
        yield path, float(tree)


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
