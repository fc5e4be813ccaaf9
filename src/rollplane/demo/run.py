"""One run of the demo from nothing to its report: imitate, serve, learn, stress, recompute, report."""

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.demo import grpo
from rollplane.demo.fleet import Fleet
from rollplane.demo.models import make_model, save_model
from rollplane.demo.phases import Phases
from rollplane.demo.recompute import recompute
from rollplane.demo.report import print_report, write_report
from rollplane.demo.stress import OUTPUT_TOKENS, PROMPT_TOKENS, SEQUENCES, roll_out_stress, save_stress_model
from rollplane.errors import InvalidRequest

IMITATION_STEPS = 150
REQUEST_TIMEOUT_S = 120.0
MAX_MODEL_LEN = 64

FP32_KL_LIMIT = 1e-9
STRESS_GAIN = 20.0
PREVIOUS_POLICY_RATIO = 50.0
_NONE: dict[str, Any] = {"versions": {}}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is asked for.

    Attributes:
        steps: policy updates, at least 5: the checks need steps 1 to 3, and step 4 updates in flight.
        seed: of the model, the problems and the sampling.
        workers: engines behind the frontend.
        out: directory of the run; must be absent, empty, or an earlier run's.
        engine_dtype: `bfloat16` or `float32`.
    """

    steps: int
    seed: int
    workers: int
    out: Path
    engine_dtype: str


def run(options: Options, console: Console) -> dict[str, Any]:
    """Run the demo and return its report, which also lies in `out`.

    Raises:
        StepFailed: a step lost a request, mixed versions unmarked or broke an invariant; the message names it.
        RollplaneError: options, files or fleet.
    """
    started = time.monotonic()
    options = replace(options, out=options.out.resolve())  # the fleet's processes read the paths, too
    _prepare(options)
    torch.set_num_threads(1)  # the engines share these cores
    transformers.utils.logging.disable_progress_bar()
    with Phases(console) as phases:
        model = _imitate(options, phases)
        progress = _learn(options, model, phases)
        _stress(options, phases)
        phase = phases.begin("recompute from saved files", total=None)
        figures = recompute(options.out)
        phase.end()
    report = {
        "options": {**asdict(options), "out": str(options.out)},
        "reward_before": progress.reward_before,
        "reward_after": progress.reward_after,
        "reward": [step["reward"] for step in progress.steps],
        **figures,
        "policy_versions": sorted(progress.policy_versions, key=grpo.number_of),
        "requests": progress.requests,
        "lost_requests": progress.requests - progress.answered,
        "mixed_answers": sum(step["in_flight"]["mixed_answers"] for step in progress.steps if "in_flight" in step),
        "tokens_per_second": sum(step["tokens"] for step in progress.steps)
        / sum(step["rollout_seconds"] for step in progress.steps),
        "seconds": time.monotonic() - started,
        "steps": progress.steps,
    }
    report["checks"] = _checks(report)
    write_report(report, options.out)
    print_report(report, console)
    console.print(f"report: {options.out / 'report.html'}")
    return report


def _prepare(options: Options) -> None:
    """An empty run directory; what an earlier run left there goes, anything else stays and is an error."""
    for field, least in (("steps", grpo.FIRST_IN_FLIGHT + 1), ("workers", 1)):
        if getattr(options, field) < least:
            raise InvalidRequest(f"{field} must be at least {least}, got {getattr(options, field)}", param=field)
    if options.engine_dtype not in ("bfloat16", "float32"):
        raise InvalidRequest(
            f"engine_dtype must be bfloat16 or float32, got {options.engine_dtype!r}", param="engine_dtype"
        )
    made = {"checkpoints", "rollouts", "report.json", "report.html"}
    made |= {f"{fleet}.{kind}" for fleet in ("fleet", "stress") for kind in ("log", "ready")}
    if options.out.exists():
        foreign = sorted(path.name for path in options.out.iterdir() if path.name not in made)
        if foreign:
            raise InvalidRequest(f"{options.out} holds {foreign[:3]}, which no run of the demo made", param="out")
    try:
        for name in ("checkpoints", "rollouts"):
            if (options.out / name).exists():
                shutil.rmtree(options.out / name)
            (options.out / name).mkdir(parents=True)
        for name in made - {"checkpoints", "rollouts"}:
            (options.out / name).unlink(missing_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{options.out} cannot be a run's directory: {error}", param="out") from error


def _imitate(options: Options, phases: Phases) -> Any:
    phase = phases.begin("imitate a noisy demonstrator", total=IMITATION_STEPS)
    model = make_model(vocabulary=grpo.VOCABULARY, top_k=2, seed=options.seed, eos=grpo.EOS, pad=grpo.PAD)
    grpo.imitate(model, seed=options.seed, steps=IMITATION_STEPS, advance=phase.advance)
    save_model(model, options.out / "checkpoints" / "v0")
    return model


def _learn(options: Options, model: Any, phases: Phases) -> grpo.Progress:
    starting = phases.begin("start the fleet", total=None)
    fleet = Fleet(
        options.out / "checkpoints" / "v0",
        workers=options.workers,
        dtype=options.engine_dtype,
        slots=max(grpo.GROUP, -(-grpo.PROBLEMS * grpo.GROUP // options.workers)),
        max_model_len=MAX_MODEL_LEN,
        log=options.out / "fleet.log",
    )

    async def learn(advance: Callable[[str], None]) -> grpo.Progress:
        async with (
            Client(fleet.base_url, timeout_s=REQUEST_TIMEOUT_S) as client,
            AdminClient(fleet.base_url) as admin,
        ):
            return await grpo.learn(
                client,
                admin,
                model,
                steps=options.steps,
                seed=options.seed,
                out=options.out,
                advance=advance,
            )

    with fleet:
        starting.end()
        return asyncio.run(learn(phases.begin("GRPO", total=options.steps).advance))


def _stress(options: Options, phases: Phases) -> None:
    phase = phases.begin("routing stress", total=None)
    fleet = Fleet(
        save_stress_model(options.out / "checkpoints" / "stress"),
        workers=1,
        dtype="bfloat16",
        slots=SEQUENCES,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS,
        log=options.out / "stress.log",
    )

    async def roll_out() -> None:
        async with Client(fleet.base_url, timeout_s=REQUEST_TIMEOUT_S) as client:
            (await roll_out_stress(client)).save(options.out / "rollouts" / "stress.npz")

    with fleet:
        asyncio.run(roll_out())
    phase.end()


def _checks(report: dict[str, Any]) -> dict[str, bool]:
    """What every run must show; a broken one makes the exit code 1."""
    stress = report["stress_mismatch_kl"]
    checks = {
        "no_request_lost": report["lost_requests"] == 0,
        "stress_gain_at_least_20": stress["none"] >= STRESS_GAIN * stress["both"],
        "previous_policy_at_least_50_times_worse": report["previous_policy"]["ratio"] >= PREVIOUS_POLICY_RATIO,
    }
    if report["options"]["engine_dtype"] == "float32":
        parts = [
            part for step in report["steps"] for part in (step, *step.get("in_flight", _NONE)["versions"].values())
        ]
        measured = [report["mismatch_kl"]["both"], *(part["kl"] for part in parts if part["kl"] is not None)]
        checks["float32_kl_below_1e-9"] = max(measured) < FP32_KL_LIMIT
    return checks
