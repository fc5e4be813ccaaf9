"""The runs with a dense policy: weights by broadcast, and adapters from disk. Rollouts and checkpoints stay in the run's directory."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from prometheus_client.parser import text_string_to_metric_families

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.client.weights import WeightSender
from rollplane.demo.rollouts import Rollouts
from rollplane.errors import EngineProtocolError
from rollplane.prove.adapter import Adapter
from rollplane.prove.policy import (
    GROUP,
    LEARNING_RATE,
    OUTPUT_TOKENS,
    compare,
    lay_out,
    load_policy,
    make_policy,
    prompts_of,
    sampling_of,
    save_policy,
    train,
)
from rollplane.prove.record import Run, Step
from rollplane.prove.worker import EngineName, OneWorker

STEPS = 3
REQUEST_TIMEOUT_S = 300.0
LONG_TOKENS = 1500
"""Of the request that an adapter's swap must neither delay nor change."""
ADAPTER = "policy"
ADAPTER_LEARNING_RATE = 2e-2


def run_dense(out: Path, *, engine: EngineName, python: str, dtype: str, seed: int) -> Run:
    """Three optimizer steps, each policy sent from the trainer's memory; v0 to v3.

    Raises:
        RollplaneError: the worker, a request or an update failed.
    """
    run = Run(name="dense-broadcast", engine=engine, dtype=dtype)
    model = make_policy(seed=seed)
    checkpoints = out / "checkpoints"
    save_policy(model, checkpoints / "v0")

    async def learn(url: str) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        async with Client(url, timeout_s=REQUEST_TIMEOUT_S) as client, WeightSender([url]) as sender:
            for step in range(STEPS + 1):
                version, began = f"v{step}", time.monotonic()
                if step:
                    reports = await sender.send(dict(model.state_dict()), version=version)
                    run.figures[f"digest_{version}"] = next(iter(reports.values())).digest
                rollouts = await sample(client, step, seed=seed)
                rollouts.save(out / f"step-{step}.npz")
                record = judged(rollouts, step, model, checkpoints, began=began)
                hold_versions(record, rollouts, version)
                run.steps.append(record)
                if step < STEPS:
                    train(model, optimizer, rollouts)
                    save_policy(model, checkpoints / f"v{step + 1}")

    log = out / "worker.log"
    with OneWorker(checkpoints / "v0", engine=engine, dtype=dtype, root=out, log=log, python=python) as worker:
        asyncio.run(learn(worker.base_url))
    return run


def run_adapters(out: Path, *, engine: EngineName, python: str, dtype: str, seed: int) -> Run:
    """Three optimizer steps on an adapter; each saved once, loaded under one name, flipped while a long request runs, drained.

    Raises:
        RollplaneError: the worker, a request or a load failed.
    """
    run = Run(name="lora-filesystem", engine=engine, dtype=dtype)
    model = make_policy(seed=seed)
    base = save_policy(model, out / "base")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapter = Adapter(model, seed=seed)
    root = out / "adapters"
    # A new adapter changes nothing, and then v0 could not be told from the base: it begins a little away from zero.
    with torch.no_grad():
        for _, up in adapter.factors.values():
            up.copy_(torch.randn(up.shape, generator=torch.Generator().manual_seed(seed)) * 0.05)
    adapter.save(root / "v0")

    async def learn(url: str) -> None:
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=ADAPTER_LEARNING_RATE, weight_decay=0.0)
        async with Client(url, timeout_s=REQUEST_TIMEOUT_S) as client, AdminClient(url) as admin:
            for step in range(STEPS + 1):
                version, began = f"v{step}", time.monotonic()
                failures, seconds = await swap(client, admin, root / version, step, url=url)
                rollouts = await sample(client, step, seed=seed, model=ADAPTER)
                rollouts.save(out / f"step-{step}.npz")
                previous_kl = None
                if step:
                    kept = out / "adapters" / f"v{step - 1}"
                    previous_kl = with_adapter(base, kept, rollouts)
                record = Step(
                    step=step,
                    policy_version=version,
                    mismatch_kl=compare(model, rollouts).kl,
                    previous_kl=previous_kl,
                    reward=float(rollouts.rewards.mean()),
                    tokens=int(rollouts.output_tokens.sum()),
                    seconds=time.monotonic() - began,
                    failures=failures,
                ).judge()
                run.figures[f"load_seconds_{version}"] = seconds
                run.steps.append(record)
                if step < STEPS:
                    train(model, optimizer, rollouts)
                    adapter.save(root / f"v{step + 1}")
            left = [(each.generation, each.state) for each in await admin.adapters() if each.state != "gone"]
            run.figures["generations_left"] = left
            if len(left) != 1:
                run.failures.append(f"after the last swap {left} are left, not one generation")

    log = out / "worker.log"
    with OneWorker(base, engine=engine, dtype=dtype, root=out, log=log, adapters=True, python=python) as worker:
        asyncio.run(learn(worker.base_url))
    return run


async def swap(client: Any, admin: Any, path: Path, step: int, *, url: str) -> tuple[list[str], float]:
    """Load an adapter while a long request runs on the generation before; what went wrong, and how long the load took.

    When the name flipped is the worker's word: beside an engine that takes every core, a reader here may see the answer of the
    load, and the tokens, seconds after they were sent.
    """
    if not step:
        began = time.monotonic()
        await admin.load_adapter(ADAPTER, str(path), step=step)
        return [], time.monotonic() - began
    failures: list[str] = []
    sampling = {"max_tokens": LONG_TOKENS, "ignore_eos": True, "seed": step, "logprobs": 0}
    tokens, opened = 0, time.monotonic()
    async with client.stream(prompts_of(0, seed=0)[0], sampling_params=sampling, model=ADAPTER) as stream:
        deltas = stream.__aiter__()
        tokens += len((await anext(deltas)).token_ids)
        began = time.monotonic()
        loading = asyncio.create_task(admin.load_adapter(ADAPTER, str(path), step=step))
        async for delta in deltas:
            tokens += len(delta.token_ids)
        ran = time.monotonic() - opened
        record = await loading
        response = stream.response
    seconds = max(await ready_at(url, record.generation) - began, 0.0)
    if seconds > ran / 2:
        failures.append(f"the load took {seconds:.2f} s beside a request of {ran:.2f} s: it waited for it")
    if tokens != LONG_TOKENS:
        failures.append(f"the long request has {tokens} of {LONG_TOKENS} tokens")
    generation = response.served_by.adapter_generation
    if generation is None or generation >= record.generation:
        failures.append(f"the long request ended on generation {generation}, it began before {record.generation}")
    return failures, seconds


async def ready_at(url: str, generation: int) -> float:
    """When a worker began to serve a generation of the adapter, by this process's `time.monotonic`.

    Raises:
        EngineProtocolError: its metrics do not say.
    """
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answered:
        text, now = await answered.text(), time.monotonic()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            asked = sample.labels.get("generation") == str(generation) and sample.labels.get("state") == "ready"
            if sample.name == "rollplane_adapter_state_age_seconds" and asked:
                return now - sample.value
    raise EngineProtocolError(f"the worker's metrics do not say how long it has served generation {generation}")


def with_adapter(base: Path, path: Path, rollouts: Rollouts) -> float:
    """The mismatch KL of a base and an adapter, both from disk."""
    model = load_policy(base)
    Adapter(model).load(path)
    return compare(model, rollouts).kl


async def sample(client: Any, step: int, *, seed: int, model: str | None = None) -> Rollouts:
    """One step's answers: `GROUP` to each prompt.

    Raises:
        EngineProtocolError: an answer of another length than was asked for.
    """
    prompts = prompts_of(step, seed=seed)
    responses = await asyncio.gather(
        *(
            client.generate(prompt, sampling_params=sampling_of(i, step, seed=seed), model=model)
            for i, prompt in enumerate(prompts)
        )
    )
    choices = [choice for response in responses for choice in response.choices]
    short = [len(choice.token_ids) for choice in choices if len(choice.token_ids) != OUTPUT_TOKENS]
    if short:
        raise EngineProtocolError(f"step {step}: answers of {short[:3]} tokens, {OUTPUT_TOKENS} were asked for")
    return lay_out([prompt for prompt in prompts for _ in range(GROUP)], choices)


def judged(rollouts: Rollouts, step: int, model: Any, checkpoints: Path, *, began: float) -> Step:
    """The step's record: the trainer's model of now, and the one before from its checkpoint."""
    previous = compare(load_policy(checkpoints / f"v{step - 1}"), rollouts).kl if step else None
    return Step(
        step=step,
        policy_version=f"v{step}",
        mismatch_kl=compare(model, rollouts).kl,
        previous_kl=previous,
        reward=float(rollouts.rewards.mean()),
        tokens=int(rollouts.output_tokens.sum()),
        seconds=time.monotonic() - began,
    ).judge()


def hold_versions(record: Step, rollouts: Rollouts, version: str) -> None:
    """Every answer was made by this version alone."""
    others = {str(spans) for spans in rollouts.versions if [name for name, _ in spans] != [version]}
    if others:
        record.failures.append(f"answers were made by {sorted(others)[:3]}, not by {version}")
