"""The image run: a policy that sees learns to name colours, through preprocessed features all the way.

    python -m rollplane.demo.image.run [--out runs/image] [--seed 0] [--json FILE] [--through dynamo]

vLLM's render route makes features of four pictures and is stopped; then a frontend, our gRPC sidecar and vLLM's Rust server
serve the policy; or, through dynamo, NVIDIA Dynamo's frontend and our worker on its runtime before the same server. The task is verifiable: see a picture, say its colour's letter. Three steps, each: roll out on every picture,
hold the trainer's log-probabilities to the engine's, train a LoRA on the same pixels, load it as the adapter's next
generation, and ask the same probe as before the update. Rollouts and adapters stay in `out`.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.client.dynamo import DynamoClient
from rollplane.client.replay import mismatch
from rollplane.demo.image.dynamo import dynamo_deployment
from rollplane.demo.image.model import DIRECTORY, IMAGE_PIXELS, SPECIAL_TOKENS, make_policy
from rollplane.demo.image.pictures import COLOURS, Rendered, render
from rollplane.demo.image.servers import SidecarFleet, renderer, rust_server
from rollplane.demo.image.trainer import Trainer
from rollplane.errors import InvalidRequest, RollplaneError, Unavailable

ADAPTER: Final = "seer"
STEPS: Final = 3
CHOICES: Final = 32
"""Samples per picture and step."""
TOKENS: Final = 2
KL_LIMIT: Final = 1e-3
PREVIOUS_RATIO: Final = 50.0
PROBE_CHOICES, PROBE_SEED = 8, 7
REQUEST_S: Final = 120.0
LISTED_TRIES, LISTED_PAUSE_S = 200, 0.1
"""A deployment's frontend learns of a new adapter a moment after the worker has it."""

Rollouts = Client | DynamoClient


class ImageStep(msgspec.Struct, kw_only=True):
    """One step: weights of `version` made the rollout on which the next ones were trained.

    `reward`: share of right tokens, 0 to 1. `mismatch_kl`, `previous_kl`: k3, nats, of the rollout under the weights that made it
    and under the ones before. `probe_before`, `probe_after`: reward of the same seeded requests, one per picture, before and after the update.
    """

    step: int
    version: str
    reward: float
    mismatch_kl: float
    previous_kl: float
    probe_before: float
    probe_after: float
    failures: list[str] = msgspec.field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Nothing failed."""
        return not self.failures


class ImageReport(msgspec.Struct, kw_only=True):
    """The run. `reward_before`: of the first policy's rollout."""

    name: str = "image"
    steps: list[ImageStep]
    policy_versions: list[str]
    reward_before: float
    reward_after: float
    passed: bool

    def plain(self) -> dict[str, Any]:
        """As JSON, with `mismatch_kl` per step beside the steps."""
        tree: dict[str, Any] = msgspec.to_builtins(self)
        tree["mismatch_kl"] = [step.mismatch_kl for step in self.steps]
        for one, step in zip(tree["steps"], self.steps, strict=True):
            one["passed"] = step.passed
        return tree


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout: per picture, token ids int32 [choices, T] and the engine's log-probabilities float32 of the same shape."""

    tokens: list[NDArray[np.int32]]
    logprobs: list[NDArray[np.float32]]
    generations: set[int | None]


def run_image(
    out: Path,
    *,
    vllm_env: Path = Path(".venv-vllm"),
    vllm_rs: Path = Path(".cache/vllm-rs/vllm-rs-0.31.0"),
    dynamo_env: Path | None = None,
    seed: int = 0,
) -> ImageReport:
    """The whole run; about two minutes on two cores, most of it two starts of vLLM.

    Args:
        out: directory of the run, made here; absent or empty.
        vllm_env: an environment with vLLM 0.31 (`scripts/make_vllm_env.sh`).
        vllm_rs: the binary of vLLM's Rust server (`scripts/fetch_vllm_rs.sh`).
        dynamo_env: an environment with Dynamo (`scripts/make_dynamo_env.sh`): the rollouts go through its frontend. None: through
            a frontend of ours.

    Raises:
        InvalidRequest: `out` holds something, or a part is missing.
        Unavailable: a server did not start, with the end of its log.
    """
    out = out.resolve()
    if out.exists() and any(out.iterdir()):
        raise InvalidRequest(f"{out} is not empty")
    adapters = out / "adapters"
    adapters.mkdir(parents=True)
    torch.set_num_threads(1)  # vLLM's engine shares these cores
    transformers.utils.logging.disable_progress_bar()
    model = make_policy(out / DIRECTORY, seed=seed)
    vllm_env, vllm_rs = vllm_env.absolute(), vllm_rs.absolute()
    with renderer(model, vllm_env=vllm_env, log=out / "renderer.log") as url:
        pictures = render(url, model=str(model), side=IMAGE_PIXELS)
    (out / "pictures.json").write_bytes(msgspec.json.encode(pictures))
    trainer = Trainer(model, pictures=pictures, support=support(), seed=seed)
    with contextlib.ExitStack() as stack:
        grpc, http = stack.enter_context(
            rust_server(model, vllm_env=vllm_env, vllm_rs=vllm_rs, adapters=adapters, log=out / "vllm-rs.log")
        )
        if dynamo_env is None:
            fleet = stack.enter_context(
                SidecarFleet(model, grpc_endpoint=grpc, http_endpoint=http, root=adapters, log=out / "fleet.log")
            )
            rollouts: Rollouts = Client(fleet.base_url, timeout_s=REQUEST_S)
            admin = AdminClient(fleet.base_url)
        else:
            urls = stack.enter_context(
                dynamo_deployment(
                    model,
                    dynamo_env=dynamo_env.absolute(),
                    grpc_endpoint=grpc,
                    http_endpoint=http,
                    root=adapters,
                    logs=out,
                )
            )
            rollouts = DynamoClient(urls.frontend_url, timeout_s=REQUEST_S)
            admin = AdminClient(urls.worker_url)
        report = asyncio.run(_learn(rollouts, admin, trainer, pictures, out=out, seed=seed))
    if dynamo_env is not None:
        report.name = "image-dynamo"
    (out / "report.json").write_text(json.dumps(report.plain(), indent=1) + "\n")
    return report


def support() -> list[int]:
    """The first letters of the colours as token ids: what sampling is restricted to."""
    return [letter_id(name[0]) for name in COLOURS]


def letter_id(letter: str) -> int:
    """Ids of printable ASCII follow the special ones; see `model._bytes_tokenizer`."""
    return len(SPECIAL_TOKENS) + ord(letter) - ord("!")


async def _learn(
    rollouts: Rollouts, administration: AdminClient, trainer: Trainer, pictures: list[Rendered], *, out: Path, seed: int
) -> ImageReport:
    steps: list[ImageStep] = []
    async with rollouts as client, administration as admin:
        generation = await _publish(trainer, admin, out / "adapters" / "v0")
        await _until_listed(client)
        generations = {"v0": generation}
        rollout = await sample(client, pictures, choices=CHOICES, seed=1000 * seed)
        probe = await sample(client, pictures, choices=PROBE_CHOICES, seed=PROBE_SEED)
        _keep(rollout, out / "rollout-v0.npz")
        first = rewards_of(rollout)
        kl, failures = _held_to(trainer, rollout, generation, name="v0")
        for number in range(1, STEPS + 1):
            version = f"v{number}"
            before = trainer.weights()
            trainer.learn(rollout.tokens, rewards_of(rollout))
            generation = generations[version] = await _publish(trainer, admin, out / "adapters" / version)
            probe_before = probe
            rollout = await sample(client, pictures, choices=CHOICES, seed=1000 * seed + 100 * number)
            probe = await sample(client, pictures, choices=PROBE_CHOICES, seed=PROBE_SEED)
            _keep(rollout, out / f"rollout-{version}.npz")
            kl, found = _held_to(trainer, rollout, generation, name=version)
            failures += found
            with torch.no_grad():
                previous = trainer.score_with(before, rollout.tokens).numpy()
            previous_kl = mismatch(previous, np.stack(rollout.logprobs)).kl
            if previous_kl < PREVIOUS_RATIO * kl:
                failures.append(
                    f"the weights before {version} disagree by {previous_kl:.1e} only: {kl:.1e} shows little"
                )
            if _same(probe_before, probe):
                failures.append(f"the probe is answered after the update to {version} as before it")
            steps.append(
                ImageStep(
                    step=number,
                    version=version,
                    reward=float(rewards_of(rollout).mean()),
                    mismatch_kl=kl,
                    previous_kl=previous_kl,
                    probe_before=float(rewards_of(probe_before).mean()),
                    probe_after=float(rewards_of(probe).mean()),
                    failures=failures,
                )
            )
            failures = []
    reward_before, reward_after = float(first.mean()), steps[-1].reward
    return ImageReport(
        steps=steps,
        policy_versions=list(generations),
        reward_before=reward_before,
        reward_after=reward_after,
        passed=all(step.passed for step in steps) and reward_after > reward_before,
    )


def recompute(out: Path) -> dict[str, list[float]]:
    """`mismatch_kl` and `previous_kl` of every step again, from the model, the pictures, the adapters and the rollouts in `out`.

    Raises:
        OSError: a file of the run is missing.
    """
    pictures = msgspec.json.decode((out / "pictures.json").read_bytes(), type=list[Rendered])
    trainer = Trainer(out / DIRECTORY, pictures=pictures, support=support(), seed=0)
    found: dict[str, list[float]] = {"mismatch_kl": [], "previous_kl": []}
    for number in range(1, STEPS + 1):
        with np.load(out / f"rollout-v{number}.npz") as kept:
            tokens, logprobs = list(kept["tokens"]), kept["logprobs"]
        for name, version in (("mismatch_kl", number), ("previous_kl", number - 1)):
            trainer.load(out / "adapters" / f"v{version}")
            with torch.no_grad():
                found[name].append(mismatch(trainer.score(tokens).numpy(), logprobs).kl)
    return found


async def _publish(trainer: Trainer, admin: AdminClient, path: Path) -> int:
    """Save the adapter and serve it from now on; its generation."""
    record = await admin.load_adapter(ADAPTER, str(trainer.save(path)))
    return record.generation


async def _until_listed(client: Rollouts) -> None:
    for _ in range(LISTED_TRIES):
        if ADAPTER in {card["id"] for card in await client.models()}:
            return
        await asyncio.sleep(LISTED_PAUSE_S)
    raise Unavailable(f"{client!r} did not list the adapter {ADAPTER!r} after it was loaded")


async def sample(client: Rollouts, pictures: list[Rendered], *, choices: int, seed: int) -> Sampled:
    """Ask about every picture at once.

    Raises:
        RollplaneError: a request failed; nothing is left out.
    """
    letters = support()

    async def ask(index: int, picture: Rendered) -> Any:
        return await client.generate(
            picture.token_ids,
            features=picture.features,
            model=ADAPTER,
            sampling_params={
                "n": choices,
                "max_tokens": TOKENS,
                "temperature": 1.0,
                "allowed_token_ids": letters,
                "logprobs": 0,
                "seed": seed + 10_000 * index,
                "ignore_eos": True,
            },
        )

    answers = await asyncio.gather(*(ask(i, picture) for i, picture in enumerate(pictures)))
    return Sampled(
        tokens=[np.stack([choice.token_ids for choice in answer.choices]) for answer in answers],
        logprobs=[np.stack([choice.logprobs.values for choice in answer.choices]) for answer in answers],
        generations={answer.served_by.adapter_generation for answer in answers},
    )


def rewards_of(rollout: Sampled) -> NDArray[np.float64]:
    """Share of a choice's tokens that are its picture's letter, [pictures, choices]."""
    return np.stack([(tokens == letter).mean(axis=1) for tokens, letter in zip(rollout.tokens, support(), strict=True)])


def _held_to(trainer: Trainer, rollout: Sampled, generation: int, *, name: str) -> tuple[float, list[str]]:
    """The mismatch KL of a rollout under the weights that should have made it, and what is wrong with it."""
    with torch.no_grad():
        own = trainer.score(rollout.tokens).numpy()
    kl = mismatch(own, np.stack(rollout.logprobs)).kl
    failures = []
    if not kl < KL_LIMIT:
        failures.append(f"trainer and engine disagree about {name} by {kl:.1e}, the limit is {KL_LIMIT:.0e}")
    if rollout.generations != {generation}:
        failures.append(f"{name} is generation {generation}, the rollout is of {rollout.generations}")
    return kl, failures


def _keep(rollout: Sampled, path: Path) -> None:
    """One array [pictures, choices, T] each."""
    np.savez_compressed(path, tokens=np.stack(rollout.tokens), logprobs=np.stack(rollout.logprobs))


def _same(first: Sampled, second: Sampled) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first.logprobs, second.logprobs, strict=True))


def show(report: ImageReport) -> None:
    """A line per step."""
    for step in report.steps:
        verdict = "passed" if step.passed else "FAILED: " + "; ".join(step.failures)
        sys.stdout.write(
            f"step {step.step} ({step.version}): reward {step.reward:.3f}, probe {step.probe_before:.2f} -> "
            f"{step.probe_after:.2f}, mismatch KL {step.mismatch_kl:.1e}, under the previous policy {step.previous_kl:.1e}: "
            f"{verdict}\n"
        )
    word = "passed" if report.passed else "FAILED"
    sys.stdout.write(f"reward {report.reward_before:.3f} -> {report.reward_after:.3f}: {word}\n")


def main() -> int:
    """The exit code: 1 where a step failed, 2 where it could not run."""
    parser = argparse.ArgumentParser(description="A policy that sees learns to name colours.")
    parser.add_argument("--out", type=Path, default=Path("runs/image"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--through", choices=["rollplane", "dynamo"], default="rollplane", help="whose frontend")
    parser.add_argument("--dynamo-env", type=Path, default=Path(".venv-dynamo"))
    arguments = parser.parse_args()
    dynamo_env = arguments.dynamo_env if arguments.through == "dynamo" else None
    try:
        report = run_image(arguments.out, dynamo_env=dynamo_env, seed=arguments.seed)
    except RollplaneError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    show(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([report.plain()], indent=1) + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
