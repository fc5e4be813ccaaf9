"""Mixed load and abuse for a long while, and whether anything is left of it afterwards.

    python bench/soak.py [--minutes 20] [--update-s 10] [--engine embedded|mock|vllm] [--workers 1] [--clients 8]
        [--seed 0] [--json FILE]

A frontend and its workers, a process each. Clients roll out without pause: unary and streamed, one choice or several,
truncated or not, on the base model or an adapter, some asked for twice under an idempotency key. Meanwhile the weights change
every 10 s in each pause mode, an adapter is loaded again every 3 s, requests are aborted, streams hung up on, bodies cut
short or malformed, and some requests bring a deadline that cannot be kept: those 504 are the only 5xx that are meant.

Checked: every status is one that its request may get; every answer keeps the contract (our client checks it) and names
policy versions that were published; at the end no request, lease or task is left, one generation per adapter, and memory is
flat: the resident size of no process grew by more than a tenth and 32 MiB from the second quarter of the run to its end.

`--engine vllm` wants vLLM's environment: `.venv-vllm/bin/python bench/soak.py --engine vllm`. Exits with 1 on any finding.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.soak_server import Holding, SoakServer, serving

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.base import Engine
from rollplane.errors import RollplaneError

GENERATE = "/inference/v1/generate"
ADAPTER = "adapter"
RELOAD_S, PAUSE_S, ABUSE_S, SAMPLE_S = 3.0, 17.0, 0.3, 5.0
OVERTIME_S = 60.0
"""How much longer a short soak on a busy machine goes on until it has done something of each kind."""
SETTLE_S = 30.0
GROWTH, GROWTH_BYTES = 0.10, 32 * 2**20
CLIENT_ERRORS = frozenset({400, 404, 409, 413, 415, 422})


# -- engines ------------------------------------------------------------------------------------------------------------


def embedded_engine(model: str) -> Engine:
    """One thread of torch: several workers share a machine."""
    from rollplane.engines.embedded.engine import EmbeddedEngine
    from rollplane.engines.embedded.settings import EmbeddedSettings

    settings = EmbeddedSettings(
        model=model, policy_version="v0", max_model_len=512, max_num_seqs=16, threads=1, max_loras=4
    )
    return EmbeddedEngine(settings)


def mock_engine(model: str) -> Engine:
    """With steps of a millisecond, so that requests overlap with what is done to them."""
    from rollplane.engines.mock.engine import MockEngine
    from rollplane.engines.mock.settings import MockSettings

    return MockEngine(MockSettings(policy_version="v0", max_model_len=512, step_s=0.001, sampling_mask=True))


def vllm_engine(model: str) -> Engine:
    """vLLM in process, on a CPU."""
    from rollplane.engines.vllm.inprocess import VllmEngine
    from rollplane.engines.vllm.settings import VllmSettings

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else most of the machine's memory
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    arguments = ("--enforce-eager", "--block-size", "32", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "6")
    settings = VllmSettings(
        model=model,
        policy_version="v0",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        engine_args=arguments,
    )
    return VllmEngine(settings)


ENGINES: dict[str, Callable[[str], Engine]] = {
    "embedded": embedded_engine,
    "mock": mock_engine,
    "vllm": vllm_engine,
}


@dataclass(frozen=True)
class Files:
    """What a run loads: checkpoints and adapters of one tiny model, below `root`."""

    root: Path
    model: Path
    checkpoints: list[Path]
    adapters: list[Path]


def write_adapter(path: Path, *, fill: float) -> None:
    """One LoRA matrix pair, for an engine that looks no further."""
    weights = "base_model.model.layers.0.q_proj.lora_{}.weight"
    pair = {weights.format("A"): np.full((2, 4), fill, np.float32), weights.format("B"): np.ones((4, 2), np.float32)}
    save_file(pair, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))


def make_files(engine: str, root: Path) -> Files:
    """Tiny random ones; the mock's hold names only."""
    if engine == "mock":
        checkpoints = [root / f"weights-{i}" for i in range(2)]
        adapters = [root / f"adapter-{i}" for i in range(2)]
        for path in (*checkpoints, *adapters):
            path.mkdir()
        for path in checkpoints:
            (path / "mock_weights.json").write_text(json.dumps({"weights": path.name}))
        for i, path in enumerate(adapters):
            write_adapter(path, fill=1.0 + i)
        return Files(root, checkpoints[0], checkpoints, adapters)
    from tests.models import tiny

    kind = "qwen3-moe" if engine == "embedded" else "qwen3"
    checkpoints = [tiny.MAKERS[kind](root / f"weights-{i}", seed=i) for i in range(2)]
    adapters = [tiny.MAKERS["lora"](root / f"adapter-{i}", base=checkpoints[0], seed=10 + i) for i in range(2)]
    return Files(root, checkpoints[0], checkpoints, adapters)


# -- the run ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What was done and what was found."""

    url: str
    files: Files
    rng: random.Random
    vocabulary: int = 200
    answers: Counter[str] = field(default_factory=Counter)
    did: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    published: set[str] = field(default_factory=lambda: {"v0"})
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def find(self, text: str) -> None:
        """A finding; many of one kind are one line."""
        if not self.findings[text]:
            print(f"finding: {text}", file=sys.stderr, flush=True)
        self.findings[text] += 1

    @property
    def whole(self) -> bool:
        """Whether rollouts were answered, weights and the adapter changed, and malformed bodies refused."""
        refused = any(name.startswith("malformed 4") for name in self.answers)
        return (
            refused and self.answers["rollout ok"] > 10 and min(self.did["update keep"], self.did["adapter reload"]) > 0
        )

    async def wait(self, seconds: float) -> bool:
        """Whether to go on after so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)
        return not self.stopping.is_set()

    def prompt(self) -> list[int]:
        """Some prompts share a prefix, for the caches."""
        head = [7] * 32 if self.rng.random() < 0.5 else []
        return head + [self.rng.randrange(3, self.vocabulary) for _ in range(self.rng.randrange(1, 64))]

    def sampling(self) -> dict[str, Any]:
        """Parameters of all kinds."""
        return {
            "max_tokens": self.rng.choice([1, 8, 32, 96]),
            "n": self.rng.choice([1, 1, 1, 3]),
            "logprobs": self.rng.choice([0, 0, 3]),
            "seed": self.rng.randrange(2**31),
            "ignore_eos": True,
            **self.rng.choice([{}, {"top_k": 8}, {"top_p": 0.9, "temperature": 0.7}, {"min_p": 0.05}]),
        }


async def roll_out(run: Run, client: Client) -> None:
    """One client: asks until the end."""
    while not run.stopping.is_set():
        options: dict[str, Any] = {"sampling_params": run.sampling()}
        if run.rng.random() < 0.4:
            options["model"] = ADAPTER
        if run.rng.random() < 0.2:
            options["idempotency_key"] = f"key-{run.rng.randrange(10**9)}"
        if run.rng.random() < 0.2:
            options["session_id"] = f"session-{run.rng.randrange(50)}"
        prompt = run.prompt()
        try:
            if run.rng.random() < 0.4:
                async with client.stream(prompt, **options) as stream:
                    async for _ in stream:
                        pass
                answer = stream.response
            else:
                answer = await client.generate(prompt, **options)
                if "idempotency_key" in options and answer.choices[0].finish_reason != "abort":
                    again = await client.generate(prompt, **options)
                    if [c.token_ids.tolist() for c in again.choices] != [c.token_ids.tolist() for c in answer.choices]:
                        run.find("a key asked for again gave another answer")
        except RollplaneError as error:
            run.answers[f"rollout {error.code}"] += 1
            run.find(f"a rollout ended with {error.code}: {error.message[:120]}")
            continue
        run.answers["rollout ok"] += 1
        for choice in answer.choices:
            unknown = {version for version, _ in choice.policy_versions} - run.published
            if unknown:
                run.find(f"an answer of versions {sorted(unknown)} that nobody published")


async def update(run: Run, admin: AdminClient, every_s: float) -> None:
    """New weights every so often; abort is rare, for it ends rollouts."""
    step = 0
    while await run.wait(every_s):
        step += 1
        path = run.files.checkpoints[step % len(run.files.checkpoints)]
        mode = ("keep", "keep", "wait", "keep", "abort")[step % 5]
        run.published.add(f"v{step}")
        try:
            await admin.update_policy(str(path), version=f"v{step}", mode=mode, clear_cache=step % 3 == 0)
            run.did[f"update {mode}"] += 1
        except RollplaneError as error:
            run.find(f"an update ({mode}) failed with {error.code}: {error.message[:200]}")


async def reload(run: Run, admin: AdminClient) -> None:
    """The adapter's other files every `RELOAD_S`."""
    step = 0
    while await run.wait(RELOAD_S):
        step += 1
        try:
            await admin.load_adapter(ADAPTER, str(run.files.adapters[step % len(run.files.adapters)]))
            run.did["adapter reload"] += 1
        except RollplaneError as error:
            run.find(f"an adapter reload failed with {error.code}: {error.message[:200]}")


async def pause(run: Run, admin: AdminClient) -> None:
    """Paused for a moment now and then, with a flush; an update may be under way, which then says so."""
    while await run.wait(PAUSE_S):
        try:
            await admin.pause("keep")
            await run.wait(0.2)
            await admin.resume()
            run.did["pause"] += 1
        except RollplaneError as error:
            if error.status != 409:
                run.find(f"a pause failed with {error.code}: {error.message[:120]}")
            run.did["pause refused"] += 1


def malformed(rng: random.Random, prompt: list[int]) -> tuple[bytes, dict[str, str]]:
    """A body that no server should take, and its headers."""
    json_type = {"Content-Type": "application/json"}
    good = {"token_ids": prompt, "sampling_params": {"max_tokens": 4}}
    trees: list[Any] = [
        [],
        None,
        {},
        {"token_ids": prompt},
        {**good, "token_ids": []},
        {**good, "token_ids": [*prompt, True]},
        {**good, "token_ids": [*prompt, 10**9]},
        {**good, "token_ids": [1] * 600},
        {**good, "model": "nobody"},
        {**good, "sampling_params": {"max_tokens": 0}},
        {**good, "sampling_params": {"temperature": -1}},
        {**good, "sampling_params": {"no_such_parameter": 1}},
        {**good, "sampling_params": {"n": 10**6}},
        {**good, "stream_options": {"include_usage": True}},
        {**good, "features": {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {}}},
        {**good, "rollplane": {"policy_version": "never"}},
    ]
    kind = rng.randrange(len(trees) + 4)
    if kind < len(trees):
        return json.dumps(trees[kind]).encode(), json_type
    whole = json.dumps(good).encode()
    return [
        (whole[: rng.randrange(1, len(whole))], json_type),
        (rng.randbytes(64), {"Content-Type": "application/msgpack"}),
        (whole, {"Content-Type": "text/plain"}),
        (b"[" * 5000, json_type),
    ][kind - len(trees)]


async def abuse(run: Run, session: aiohttp.ClientSession) -> None:
    """Bad bodies, hang-ups, aborts, deadlines that cannot be kept, bodies that stop half-way."""
    acts: list[Callable[[], Awaitable[None]]] = [
        functools.partial(_post_malformed, run, session),
        functools.partial(_post_malformed, run, session),
        functools.partial(_hang_up, run, session),
        functools.partial(_abort, run, session),
        functools.partial(_too_late, run, session),
        functools.partial(_stop_half_way, run),
        functools.partial(_look, run, session),
    ]
    while await run.wait(ABUSE_S):
        try:
            await run.rng.choice(acts)()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            run.find(f"abuse met {type(error).__name__}: {error}")


async def _post_malformed(run: Run, session: aiohttp.ClientSession) -> None:
    content, headers = malformed(run.rng, run.prompt())
    async with session.post(run.url + GENERATE, data=content, headers=headers) as answer:
        text = await answer.text()
        run.answers[f"malformed {answer.status}"] += 1
        if answer.status not in CLIENT_ERRORS:
            run.find(f"a malformed body got {answer.status}: {content[:80]!r} {text[:120]}")


async def _hang_up(run: Run, session: aiohttp.ClientSession) -> None:
    body = {"token_ids": run.prompt(), "sampling_params": {"max_tokens": 400, "ignore_eos": True}}
    if run.rng.random() < 0.5:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(run.rng.random() / 4), session.post(run.url + GENERATE, json=body) as answer:
                await answer.read()
    else:
        async with session.post(run.url + GENERATE, json={**body, "stream": True}) as answer:
            await answer.content.readany()
            answer.close()
    run.did["hang-up"] += 1


async def _abort(run: Run, session: aiohttp.ClientSession) -> None:
    name = f"abort-{run.rng.randrange(10**9)}"
    body = {
        "request_id": name,
        "token_ids": run.prompt(),
        "sampling_params": {"max_tokens": 400, "ignore_eos": True},
        "stream": True,
    }
    async with session.post(run.url + GENERATE, json=body) as answer:
        await answer.content.readany()
        async with session.post(f"{run.url}/engine/abort_request", json={"request_id": name}) as said:
            run.answers[f"abort {said.status}"] += 1
            if said.status >= 500:
                run.find(f"an abort got {said.status}: {(await said.text())[:120]}")
        await answer.read()
    run.did["abort"] += 1


async def _too_late(run: Run, session: aiohttp.ClientSession) -> None:
    sampling = {"max_tokens": 400, "ignore_eos": True}
    body = {"token_ids": run.prompt(), "sampling_params": sampling, "rollplane": {"deadline_s": 0.001}}
    async with session.post(run.url + GENERATE, json=body) as answer:
        run.answers[f"too late {answer.status}"] += 1
        if answer.status not in (200, 504):
            run.find(f"a deadline got {answer.status}: {(await answer.text())[:120]}")


async def _stop_half_way(run: Run) -> None:
    host, _, port = run.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode())
    writer.write(b'Content-Length: 500\r\n\r\n{"token_ids": [1, 2')
    await writer.drain()
    await run.wait(run.rng.random())
    writer.close()
    run.did["body cut short"] += 1


async def _look(run: Run, session: aiohttp.ClientSession) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/rl/workers"):
        async with session.get(run.url + path) as answer:
            await answer.read()
            run.answers[f"{path} {answer.status}"] += 1
            if answer.status != 200:
                run.find(f"{path} got {answer.status}")


async def sample(run: Run, servers: list[SoakServer], started: float) -> None:
    """Memory of every process, at once and every `SAMPLE_S`."""
    every_s = 0.0
    while await run.wait(every_s):
        every_s = SAMPLE_S
        for each in servers:
            holding = await asyncio.to_thread(each.holds)
            run.memory[each.name].append((time.monotonic() - started, holding.memory_bytes))


# -- what is left -------------------------------------------------------------------------------------------------------


async def settled(run: Run, servers: list[SoakServer], before: dict[str, Holding]) -> dict[str, Holding]:
    """What every process holds once it came to rest, or after `SETTLE_S`; what it then has too much of is a finding."""
    deadline = time.monotonic() + SETTLE_S
    async with aiohttp.ClientSession() as session:
        while True:
            left = [text for each in servers for text in await _left(each, before[each.name], session)]
            if not left or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
    for text in left:
        run.find(f"left after {SETTLE_S:g} s: {text}")
    return {each.name: await asyncio.to_thread(each.holds) for each in servers}


async def _left(server: SoakServer, before: Holding, session: aiohttp.ClientSession) -> list[str]:
    async with session.get(f"{server.url}/metrics") as answer:
        text = await answer.text()
    values: dict[str, float] = Counter()
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] += float(value)
            values[name] = float(value)
    found = []
    zero = ("rollplane_requests_in_flight", "rollplane_requests_running", "rollplane_requests_waiting")
    for name in (*zero, "rollplane_adapter_leases", "rollplane_adapters_not_dropped", "rollplane_worker_sequences"):
        if values[name]:
            found.append(f"{server.name}: {name} is {values[name]:g}")
    if values["rollplane_adapter_generations"] > 1:
        found.append(f"{server.name}: {values['rollplane_adapter_generations']:g} adapter generations of one name")
    now = await asyncio.to_thread(server.holds)
    ours = 2  # this question's own connection: a task and what serves it
    for name, count in now.tasks.items():
        if count > before.tasks.get(name, 0) + ours:
            found.append(f"{server.name}: {count} tasks of {name}, {before.tasks.get(name, 0)} before")
    return found


def grown(samples: list[tuple[float, int]]) -> tuple[int, int]:
    """Median bytes of the second quarter of the run, and of the last."""
    sizes = [size for _, size in samples]
    quarter = max(1, len(sizes) // 4)
    return int(statistics.median(sizes[quarter : 2 * quarter] or sizes[:1])), int(statistics.median(sizes[-quarter:]))


async def soak(arguments: argparse.Namespace, files: Files) -> tuple[Run, dict[str, Any]]:
    """The whole run."""
    make = [functools.partial(ENGINES[arguments.engine], str(files.model)) for _ in range(arguments.workers)]
    with serving(make, root=files.root) as servers:
        run = Run(servers[-1].url, files, random.Random(arguments.seed))
        async with AdminClient(run.url) as admin, Client(run.url) as client, aiohttp.ClientSession() as session:
            await admin.load_adapter(ADAPTER, str(files.adapters[0]))
            await client.generate([3, 4, 5], sampling_params={"max_tokens": 4}, model=ADAPTER)
            before = {each.name: each.holds() for each in servers}
            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(arguments.clients):
                    group.create_task(roll_out(run, client))
                group.create_task(update(run, admin, arguments.update_s))
                for work in (reload, pause):
                    group.create_task(work(run, admin))
                for _ in range(2):
                    group.create_task(abuse(run, session))
                group.create_task(sample(run, servers, started))
                await asyncio.sleep(arguments.minutes * 60)
                while not run.whole and time.monotonic() < started + arguments.minutes * 60 + OVERTIME_S:
                    await run.wait(0.1)
                run.stopping.set()
            seconds = time.monotonic() - started
        after = await settled(run, servers, before)
        memory = {}
        for name, samples in run.memory.items():
            early, late = grown(samples)
            memory[name] = {"first": samples[0][1], "second_quarter": early, "last_quarter": late}
            if late - early > max(GROWTH * early, GROWTH_BYTES):
                run.find(f"{name} grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB")
        report = {
            "engine": arguments.engine,
            "workers": arguments.workers,
            "seconds": round(seconds, 1),
            "load_average": os.getloadavg()[1],
            "answers": dict(sorted(run.answers.items())),
            "did": dict(sorted(run.did.items())),
            "memory_bytes": memory,
            "tasks": {
                name: {"before": sum(before[name].tasks.values()), "after": sum(after[name].tasks.values())}
                for name in after
            },
            "threads": {name: {"before": before[name].threads, "after": after[name].threads} for name in after},
            "files": {name: {"before": before[name].files, "after": after[name].files} for name in after},
            "findings": dict(run.findings),
        }
    return run, report


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    print(
        f"{report['engine']}, {report['workers']} worker(s), {report['seconds']:g} s, load {report['load_average']:.1f}"
    )
    for part in ("answers", "did"):
        print(f"{part}: " + ", ".join(f"{name} {count}" for name, count in report[part].items()))
    for name, sizes in report["memory_bytes"].items():
        first, early, late = (sizes[key] / 2**20 for key in ("first", "second_quarter", "last_quarter"))
        held = (
            f"{what} {report[what][name]['before']} before, {report[what][name]['after']} after"
            for what in ("tasks", "threads", "files")
        )
        print(f"{name}: {first:.0f}, {early:.0f}, {late:.0f} MiB (first, 2nd, last quarter); {'; '.join(held)}")
    for text, count in report["findings"].items():
        print(f"FINDING x{count}: {text}")
    print("passed" if not report["findings"] else "FAILED")


def main() -> int:
    """The exit code: 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--update-s", type=float, default=10.0, help="between two updates of the weights")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="embedded")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the report here")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rollplane-soak-")).resolve()
    try:
        _, report = asyncio.run(soak(arguments, make_files(arguments.engine, root)))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    show(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if report["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
