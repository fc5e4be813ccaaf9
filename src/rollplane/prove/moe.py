"""The mixture-of-experts run: the demo's loop for a few steps, the routing stress, and an update under running requests."""

import asyncio
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.demo.figures import SETTINGS, in_flight_figures
from rollplane.demo.grpo import BOS, DIGIT_0, SEPARATOR, VOCABULARY
from rollplane.demo.models import EXPERTS
from rollplane.demo.rollouts import Rollouts, collect
from rollplane.demo.run import Options, run
from rollplane.prove.record import KL_LIMIT, REPLAY_GAIN, Run, Step
from rollplane.prove.worker import OneWorker

STEPS: Final = 5
"""The fewest that the demo's own checks need."""
IN_FLIGHT, IN_FLIGHT_TOKENS, TOKENS_BEFORE = 8, 900, 20
"""Requests that an update finds running, their length, and how long the first of them is when it comes."""


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
    figures = update_in_flight(out)
    found.figures["in_flight"] = figures
    found.failures += judge_in_flight(figures)
    return found


def judge_stress(stress: dict[str, float]) -> list[str]:
    """What the routing stress fails to show."""
    if stress["mask"] >= REPLAY_GAIN * stress["both"]:
        return []
    return [
        f"stress: both replays leave {stress['both']:.2e}, over 1/{REPLAY_GAIN:g} of {stress['mask']:.2e} by masks alone"
    ]


def update_in_flight(out: Path) -> dict[str, Any]:
    """An update (keep) from v0 to v1 under running requests; every token against the weights that its span names.

    Returns what `in_flight_figures` does; the rollouts stay in `rollouts/in-flight.npz`.
    """
    checkpoints = out / "checkpoints"

    async def roll_out(url: str) -> Rollouts:
        prompts = [[BOS, *(DIGIT_0 + (i + j) % 10 for j in range(6)), SEPARATOR] for i in range(IN_FLIGHT)]
        wanted: dict[str, Any] = {"routed_experts": True, "sampling_mask": True}
        sampling = {"max_tokens": IN_FLIGHT_TOKENS, "ignore_eos": True, "top_p": 0.95, "logprobs": 0}

        async with Client(url, timeout_s=300.0) as client, AdminClient(url) as admin:
            rest = [
                asyncio.create_task(client.generate(prompt, sampling_params={**sampling, "seed": i}, **wanted))
                for i, prompt in enumerate(prompts)
                if i
            ]
            async with client.stream(prompts[0], sampling_params={**sampling, "seed": 0}, **wanted) as stream:
                tokens = 0
                updating: asyncio.Task[object] | None = None
                async for delta in stream:
                    tokens += len(delta.token_ids)
                    if updating is None and tokens >= TOKENS_BEFORE:
                        update = admin.update_policy(str(checkpoints / "v1"), version="v1", mode="keep")
                        updating = asyncio.create_task(update)
                first = stream.response
            responses = [first, *await asyncio.gather(*rest)]
            if updating is not None:
                await updating
        return collect(prompts, [each.choices[0] for each in responses], experts=EXPERTS, vocabulary=VOCABULARY)

    log = out / "in-flight.log"
    with OneWorker(
        checkpoints / "v0", engine="embedded", dtype="bfloat16", root=checkpoints, log=log, context_tokens=1024
    ) as worker:
        rollouts = asyncio.run(roll_out(worker.base_url))
    rollouts.save(out / "rollouts" / "in-flight.npz")
    return in_flight_figures(rollouts, {name: checkpoints / name for name in ("v0", "v1")})


def judge_in_flight(figures: dict[str, Any]) -> list[str]:
    """What the update in flight fails to show. Tokens after the boundary lie over older keys and values and are not held to it."""
    failures = []
    if not figures["mixed_answers"]:
        failures.append("in flight: no answer has tokens of both versions")
    kl = figures["versions"]["v0"]["kl"]
    if kl is None or not kl < KL_LIMIT:
        failures.append(f"in flight: tokens before the boundary have mismatch KL {kl}, not under {KL_LIMIT:.0e}")
    return failures


def _step(record: dict[str, Any]) -> Step:
    return Step(
        step=record["step"],
        policy_version=record["policy_versions"][-1],
        mismatch_kl=record["kl"],
        reward=record["reward"],
        tokens=record["tokens"],
        seconds=record["seconds"],
    ).judge()
