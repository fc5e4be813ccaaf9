"""GRPO over a Rollplane fleet: the whole loop in one file.

The task: read six digits, write them in reverse. The policy starts as the copy of a noisy demonstrator, right about a
third of the time, and learns by group-relative policy optimisation: every step asks the fleet for a group of answers
per problem, rewards exact matches, trains on the difference within each group, and hands the new weights back.

The engine samples in bfloat16 and the trainer computes in float32. What keeps the two the same policy is in the
answers: the experts that every token was routed to, the ids that survived top-p, the sampling log-probabilities and
the policy version of every token. The loop replays the first two and checks the last.
"""

import asyncio
import math
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rollplane.client.replay import mismatch
from rollplane.demo.figures import in_flight_figures, mismatch_kl, score
from rollplane.demo.models import EXPERTS, save_model
from rollplane.demo.rollouts import Rollouts, collect
from rollplane.errors import RollplaneError

PAD, EOS, BOS, SEPARATOR, DIGIT_0 = 0, 1, 2, 3, 4
VOCABULARY = 16
DIGITS = 6
NOISE = 0.18  # share of digits that the demonstrator gets wrong: the start is right about (1 - 0.18) ** 6 of the time

PROBLEMS, GROUP = 16, 8  # per step: prompts, and answers to each
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "max_tokens": DIGITS + 1, "stop_token_ids": [EOS]}
LEARNING_RATE = 2e-4
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
GRADIENT_NORM = 1.0

EVALUATION_PROBLEMS = 128  # answered GROUP times each, before and after
SAVED_STEPS = (1, 2, 3)  # rollouts and checkpoints that stay for `rollplane.demo.recompute`
FIRST_IN_FLIGHT, IN_FLIGHT_EVERY = 4, 4  # steps whose new weights arrive while their rollouts run
TRICKLE = 2  # requests at a time in such a step, so that the rollout outlasts the reading of the checkpoint
MEASURED_EVERY = 5  # steps between mismatch measurements in all four settings

Problem = tuple[list[int], list[int]]
Advance = Callable[[], None]


class StepFailed(RollplaneError):
    """A step lost a request, got an answer of a policy it must not have, or broke an invariant of the contract."""

    code = "demo_step_failed"


@dataclass
class Progress:
    """What a run has seen; becomes the report."""

    reward_before: float = math.nan
    reward_after: float = math.nan
    steps: list[dict[str, Any]] = field(default_factory=list)
    policy_versions: set[str] = field(default_factory=set)
    requests: int = 0
    answered: int = 0


# -- the task ------------------------------------------------------------------------------------------------------


def make_problem(rng: random.Random) -> Problem:
    """A prompt and its one right answer."""
    digits = [DIGIT_0 + rng.randrange(10) for _ in range(DIGITS)]
    return [BOS, *digits, SEPARATOR], [*reversed(digits), EOS]


def demonstrate(answer: list[int], rng: random.Random) -> list[int]:
    """The answer as the noisy demonstrator gives it."""
    return [
        DIGIT_0 + rng.randrange(10) if token >= DIGIT_0 and rng.random() < NOISE / 0.9 else token for token in answer
    ]


def imitate(model: Any, *, seed: int, steps: int, advance: Advance) -> None:
    """Supervised fine-tuning on the noisy demonstrator: the policy that GRPO starts from."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(steps):
        rows = [(prompt, demonstrate(answer, rng)) for prompt, answer in (make_problem(rng) for _ in range(128))]
        ids = torch.tensor([prompt + answer for prompt, answer in rows])
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 10) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, -(DIGITS + 1) :]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, -(DIGITS + 1) :].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        advance()
    model.eval()


# -- one rollout ---------------------------------------------------------------------------------------------------


async def roll_out(
    client: Any,
    problems: list[Problem],
    *,
    name: str,
    seed: int,
    allowed: list[str],
    progress: Progress,
    meanwhile: Callable[[], Awaitable[object]] | None = None,
) -> Rollouts:
    """Ask the fleet for a group of answers to every problem, and check what came back.

    Args:
        client: a `rollplane.client.Client`.
        problems: each is one request of `GROUP` samples.
        name: for request ids and errors, such as `step 7`.
        seed: of the sampling.
        allowed: the policy versions that may have made tokens, oldest first.
        progress: counts requests and versions.
        meanwhile: awaited while the requests run, such as a policy update.

    Raises:
        StepFailed: naming the step.
    """
    at_once = asyncio.Semaphore(len(problems) if meanwhile is None else TRICKLE)

    async def ask(index: int, prompt: list[int]) -> list[Any]:
        async with at_once:
            response = await client.generate(
                prompt,
                sampling_params={**SAMPLING, "n": GROUP, "seed": seed + index * GROUP, "logprobs": 0},
                request_id=f"{name}-{index}".replace(" ", "-"),
                group_id=f"{name}-{index}".replace(" ", "-"),
                routed_experts=True,
                sampling_mask=True,
                min_policy_version=allowed[0],
            )
        if sorted(choice.index for choice in response.choices) != list(range(GROUP)):
            raise StepFailed(f"{name}: request {index} came back with {len(response.choices)} of {GROUP} answers")
        return sorted(response.choices, key=lambda choice: int(choice.index))

    tasks = [asyncio.create_task(ask(index, prompt)) for index, (prompt, _) in enumerate(problems)]
    progress.requests += len(tasks)
    try:
        if meanwhile is not None:
            await meanwhile()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    progress.answered += len(outcomes) - len(failures)
    if failures:
        raise StepFailed(f"{name}: {len(failures)} of {len(tasks)} requests were lost; the first: {failures[0]!r}")

    prompts = [prompt for prompt, _ in problems for _ in range(GROUP)]
    choices = [choice for group in outcomes if not isinstance(group, BaseException) for choice in group]
    for index, choice in enumerate(choices):
        if choice.finish_reason not in ("stop", "length") or not len(choice.token_ids):
            raise StepFailed(
                f"{name}: answer {index} ended by {choice.finish_reason!r} with {len(choice.token_ids)} tokens"
            )
        check_versions(choice.policy_versions, allowed=allowed, name=f"{name}: answer {index}")
        progress.policy_versions.update(version for version, _ in choice.policy_versions)
    try:
        rollouts = collect(prompts, choices, experts=EXPERTS, vocabulary=VOCABULARY)
    except ValueError as error:
        raise StepFailed(f"{name}: {error}") from error
    for index, (_, answer) in enumerate(pair for pair in problems for _ in range(GROUP)):
        rollouts.rewards[index] = float(choices[index].token_ids.tolist() == answer)
    return rollouts


def check_versions(spans: Iterable[tuple[str, int | None]], *, allowed: list[str], name: str) -> None:
    """The versions of one answer are allowed ones, oldest first, with known boundaries.

    Raises:
        StepFailed: they are not.
    """
    spans = list(spans)
    made_by = [version for version, _ in spans]
    if made_by not in ([version] for version in allowed) and made_by != allowed:
        raise StepFailed(f"{name} was made by {made_by}; allowed: {allowed}, in this order")
    if any(first is None for _, first in spans):
        raise StepFailed(f"{name} mixes {made_by} without saying where")


def number_of(version: str) -> int:
    """The place of a version of this run in their sequence: 7 for `v7`."""
    return int(version.removeprefix("v"))


# -- learning ------------------------------------------------------------------------------------------------------


def advantages(rewards: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How much better each answer is than the others of its group, in standard deviations; float32 [B]."""
    groups = rewards.reshape(-1, GROUP)
    centred = groups - groups.mean(1, keepdims=True)
    return np.asarray((centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(-1), dtype=np.float32)


def train(model: Any, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> np.ndarray[Any, Any]:
    """One clipped policy-gradient step; returns the log-probabilities before it, float32 [N].

    The ratio is taken against the log-probability that the engine recorded for each token, so tokens of an older
    policy (an update in flight) are weighted by how much likelier the present policy makes them.
    """
    ours = score(model, rollouts, routes=True, mask=True)
    ratio = (ours - torch.from_numpy(rollouts.logprobs)).exp()
    advantage = torch.from_numpy(advantages(rollouts.rewards)[rollouts.choice_of_token])
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    optimizer.zero_grad()
    (-objective.mean()).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    return np.asarray(ours.detach().numpy())


async def learn(
    client: Any,
    admin: Any,
    model: Any,
    *,
    steps: int,
    seed: int,
    out: Path,
    advance: Callable[[str], None],
) -> Progress:
    """Run GRPO until `steps` are done.

    Args:
        client: a `rollplane.client.Client` of the fleet, which serves checkpoint `v0`.
        admin: a `rollplane.client.AdminClient` of the fleet.
        model: the trainer's model, with the weights of `v0`.
        steps: policy updates to make.
        seed: of problems and sampling.
        out: directory for `checkpoints/` and `rollouts/`.
        advance: told once per step, with a line about it.

    Raises:
        StepFailed: naming the step.
    """
    progress = Progress()
    rng = random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    checkpoints = out / "checkpoints"

    async def update(version: str) -> None:
        try:
            await admin.update_policy(str(checkpoints / version), version=version, mode="keep", step=number_of(version))
        except RollplaneError as error:
            raise StepFailed(f"step {number_of(version)}: the update to {version} failed: {error.message}") from error

    async def evaluate(name: str, version: str) -> float:
        fixed = random.Random(99)  # the same problems before and after
        problems = [make_problem(fixed) for _ in range(EVALUATION_PROBLEMS)]
        rollouts = await roll_out(client, problems, name=name, seed=10**9, allowed=[version], progress=progress)
        rollouts.save(out / "rollouts" / f"{name}.npz")
        return float(rollouts.rewards.mean())

    progress.reward_before = await evaluate("before", "v0")
    for step in range(steps):
        started = time.monotonic()
        version, previous = f"v{step}", f"v{step - 1}"
        in_flight = step >= FIRST_IN_FLIGHT and (step - FIRST_IN_FLIGHT) % IN_FLIGHT_EVERY == 0
        if step and not in_flight:
            await update(version)
        updated = time.monotonic()
        rollouts = await roll_out(
            client,
            [make_problem(rng) for _ in range(PROBLEMS)],
            name=f"step {step}",
            seed=(seed * steps + step + 1) * 10**4,
            allowed=[previous, version] if in_flight else [version],
            progress=progress,
            meanwhile=partial(update, version) if in_flight else None,
        )
        rolled_out = time.monotonic()
        if step in SAVED_STEPS:
            rollouts.save(out / "rollouts" / f"step-{step}.npz")
        record: dict[str, Any] = {
            "step": step,
            "reward": float(rollouts.rewards.mean()),
            "tokens": int(rollouts.output_tokens.sum()),
            "update_seconds": updated - started,  # next to nothing where the update comes during the rollout
            "rollout_seconds": rolled_out - updated,
            "policy_versions": sorted({version for spans in rollouts.versions for version, _ in spans}, key=number_of),
        }
        if in_flight:
            record["in_flight"] = in_flight_figures(rollouts, {previous: checkpoints / previous, version: model})
        elif step % MEASURED_EVERY == 0 or step == steps - 1:
            record["mismatch_kl"] = mismatch_kl(model, rollouts)
        ours = train(model, optimizer, rollouts)
        record["kl"] = (
            record["in_flight"]["versions"][version]["kl"] if in_flight else mismatch(ours, rollouts.logprobs).kl
        )
        save_model(model, checkpoints / f"v{step + 1}")
        if step - 1 > max(SAVED_STEPS):
            shutil.rmtree(checkpoints / previous)
        record["seconds"] = time.monotonic() - started
        progress.steps.append(record)
        advance(f"reward {record['reward']:.2f}")
    await update(f"v{steps}")
    if steps - 1 > max(SAVED_STEPS):
        shutil.rmtree(checkpoints / f"v{steps - 1}")
    progress.reward_after = await evaluate("after", f"v{steps}")
    return progress
