"""Placement over real HTTP, beside vLLM's own router: the same mock workers, the same requests, one router after the other.

    scripts/make_vllm_router_env.sh
    python bench/routing_served.py [--rounds 3] [--slow 4] [--no-hints] [--policy NAME ...]

Eight mock workers and a router, each a process of its own. The load is `groups` of bench/routing.py: 64 prompts of 4,096
tokens, each its own, 16 samples of each as 16 requests, all sent within 1 s; 8 workers of 128 slots, 20,000 prompt
tokens/s, 20 ms a step, blocks of 16; output lengths seeded in 64..1024. Every router gets the same bytes: the group's
name is in the body (`rollplane.group_id`) and in the header `X-Session-ID`, unless `--no-hints` leaves both out.

`--slow`: the mock's seconds are so many times longer, so that processes that share few cores are late by less of them; what is
printed is divided by it. `first token`: from sending to the end of the prompt's computation, on the machine's clock,
where the worker notes it. kv_aware follows the workers' KV events on ZMQ, in vLLM's wire; `hits` are the placements for
which its index, fed by nothing else, knew a cached prefix. kv_aware+affinity: with its session affinity, by the same header.
A round runs every router once, with one seed. Printed are medians over the rounds, and their spread. CPU: of the router, of
the workers together (theirs read JSON, ours the hop's msgpack) and of this driver, milliseconds per request.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.events import Event, PromptEvent
from rollplane.protocol.kv_events import BlocksRemoved, BlocksStored, KvEvent
from rollplane.protocol.request import GenerateRequest

WORKERS, SLOTS, BLOCK_TOKENS = 8, 128, 16
PREFILL_TOKENS_PER_S, STEP_S = 20_000.0, 0.02
GROUPS, SAMPLES, PROMPT_TOKENS, SHORTEST, LONGEST = 64, 16, 4096, 64, 1024
START_S = 90.0
ROOT = Path(__file__).resolve().parent.parent
OURS = ("prefix_aware", "least_loaded", "round_robin")
THEIRS = ("cache_aware", "kv_aware", "kv_aware+affinity", "sticky_least_loaded")


# -- a worker -----------------------------------------------------------------------------------------------------------


class NotingEngine(MockEngine):
    """The mock engine, noting when each prompt was computed; requests are told apart by their seeds."""

    def __init__(self, settings: MockSettings) -> None:
        super().__init__(settings)
        self.computed: dict[int, float] = {}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """See `Engine.generate`."""
        async for event in super().generate(request):
            if isinstance(event, PromptEvent):
                self.computed[request.sampling.get("seed", -1)] = time.monotonic()
            yield event


async def publish(engine: MockEngine, port: int) -> None:
    """KV events as vLLM publishes them."""
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    published = context.socket(zmq.PUB)
    published.setsockopt(zmq.SNDHWM, 100_000)
    published.bind(f"tcp://127.0.0.1:{port}")
    number = 0
    async for events in engine.kv_events():
        payload = msgspec.msgpack.encode([time.time(), [wire_event(event) for event in events], 0])
        await published.send_multipart([b"", number.to_bytes(8, "big"), payload])
        number += 1


def wire_event(event: KvEvent) -> dict[str, Any]:
    """One event as vLLM writes it."""
    if isinstance(event, BlocksStored):
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": event.token_ids.tolist(),
            "block_size": event.block_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": "GPU"}
    return {"type": "AllBlocksCleared"}


async def serve_worker(args: argparse.Namespace) -> None:
    """A mock worker until SIGTERM; then its notes go to a file."""
    import uvicorn

    from rollplane.config import ServerSettings
    from rollplane.server.app import create_app
    from rollplane.server.auth import KeyRing
    from rollplane.server.metrics import Metrics
    from rollplane.server.service import Service
    from rollplane.worker import Worker, WorkerSettings

    engine = NotingEngine(
        MockSettings(
            max_model_len=8192,
            max_num_seqs=SLOTS,
            block_tokens=BLOCK_TOKENS,
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S / args.slow,
            step_s=STEP_S * args.slow,
        )
    )
    worker = Worker(engine, settings=WorkerSettings(name=f"worker-{args.worker_port}", isolate_by_version=False))
    await worker.start()
    service = Service(
        role="worker",
        engine=worker,
        admin=worker,
        worker=worker,
        settings=ServerSettings(),
        keys=KeyRing(),
        metrics=Metrics(),
    )
    publishing = asyncio.create_task(publish(engine, args.kv_port))
    config = uvicorn.Config(
        create_app(service), host="127.0.0.1", port=args.worker_port, log_config=None, access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again once it has stopped, before the notes
    server.config.timeout_graceful_shutdown = 1
    await server.serve()
    publishing.cancel()
    notes = {"computed": engine.computed, "prefilled": engine._core.counters["prompt_tokens_computed"]}
    args.notes.write_text(json.dumps(notes))


# -- a run --------------------------------------------------------------------------------------------------------------


class Sent:
    """One request: its body, when it is due, and when it was sent and answered."""

    def __init__(self, body: bytes, *, group: str, seed: int, due_s: float) -> None:
        self.body = body
        self.group = group
        self.seed = seed
        self.due_s = due_s
        self.at = 0.0


def load_of(seed: int, *, hints: bool, longest: int) -> list[Sent]:
    """The requests of the `groups` workload."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(GROUPS):
        tokens = rng.integers(3, 32_000, PROMPT_TOKENS).tolist()
        for _ in range(SAMPLES):
            one = int(rng.integers(2**31))
            sampling = {
                "max_tokens": int(rng.integers(SHORTEST, longest + 1)),
                "ignore_eos": True,
                "temperature": 1.0,
                "seed": one,
            }
            body: dict[str, Any] = {"token_ids": tokens, "sampling_params": sampling}
            if hints:
                body["rollplane"] = {"group_id": f"g{group}"}
            found.append(Sent(msgspec.json.encode(body), group=f"g{group}", seed=one, due_s=float(rng.uniform())))
    return sorted(found, key=lambda sent: sent.due_s)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


async def until_answered(url: str) -> None:
    """Wait for a 200."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)


def router_command(policy: str, *, port: int, workers: list[int], kv_ports: list[int], metrics_port: int) -> list[str]:
    """The router's process."""
    urls = [f"http://127.0.0.1:{one}" for one in workers]
    if policy in OURS:
        return [
            *(sys.executable, "-m", "rollplane.cli.main", "frontend", "--port", str(port), "--router", policy),
            *("--workers", ",".join(urls), "--log-level", "warning"),
        ]
    name, _, affinity = policy.partition("+")
    command = [
        *(str(ROOT / ".venv-vllm-router/bin/vllm-router"), "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", name, "--worker-urls", *urls, "--prometheus-port", str(metrics_port)),
        *("--worker-startup-check-interval", "1", "--log-level", "warning"),
    ]
    if name == "kv_aware":
        for url, kv_port in zip(urls, kv_ports, strict=True):
            command += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{kv_port}"]
        command += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", "mock"]
    if affinity:
        command += ["--kv-aware-session-affinity-ttl-secs", "600"]
    return command


async def event_hits(port: int) -> float:
    """Placements of kv_aware for which its index of KV events knew a cached prefix."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith('vllm_router_kv_placement_lookups_total{result="hit"}'):
                return float(line.rpartition(" ")[2])
    return 0.0


async def run(policy: str, seed: int, args: argparse.Namespace, root: Path) -> dict[str, float]:
    """One load through one router."""
    *ports, port, metrics_port = free_ports(2 * WORKERS + 2)
    workers, kv_ports = ports[:WORKERS], ports[WORKERS:]
    hits = 0.0
    processes: list[subprocess.Popen[bytes]] = []
    with (root / f"{policy}.log").open("wb") as log:
        try:
            for one, kv_port in zip(workers, kv_ports, strict=True):
                command = [
                    *(sys.executable, __file__, "--worker-port", str(one), "--kv-port", str(kv_port)),
                    *("--slow", str(args.slow), "--notes", str(root / f"{one}.json")),
                ]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))  # noqa: ASYNC220 - short
            for one in workers:
                await until_answered(f"http://127.0.0.1:{one}/health")
            command = router_command(policy, port=port, workers=workers, kv_ports=kv_ports, metrics_port=metrics_port)
            router = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220 - short
            processes.append(router)
            url = f"http://127.0.0.1:{port}"
            await until_answered(f"{url}/health")
            await asyncio.sleep(2.0)  # their router says healthy before it has looked at the workers
            load = load_of(seed, hints=args.hints, longest=args.longest)
            everyone = [*(process.pid for process in processes), os.getpid()]
            before = [cpu_s(pid) for pid in everyone]
            made_s = await send(url, load, args)
            spent_s = [cpu_s(pid) - had for pid, had in zip(everyone, before, strict=True)]
            if policy.startswith("kv_aware"):
                hits = await event_hits(metrics_port)
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGTERM)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()
    computed: dict[str, float] = {}
    counts, prefilled = [], 0
    for one in workers:
        notes = json.loads((root / f"{one}.json").read_text())
        computed |= notes["computed"]
        counts.append(len(notes["computed"]))
        prefilled += notes["prefilled"]
    first = [computed[str(sent.seed)] - sent.at for sent in load]
    return {
        "first": statistics.mean(first) / args.slow,
        "p95": sorted(first)[int(len(first) * 0.95)] / args.slow,
        "makespan": made_s / args.slow,
        "load": max(counts) / statistics.mean(counts),
        "prefilled": prefilled / (GROUPS * PROMPT_TOKENS),
        "cpu_ms": 1000 * spent_s[-2] / len(load),
        "workers_cpu_ms": 1000 * sum(spent_s[:-2]) / len(load),
        "driver_cpu_ms": 1000 * spent_s[-1] / len(load),
        "hits": hits,
    }


async def send(url: str, load: list[Sent], args: argparse.Namespace) -> float:
    """Send every request when it is due and wait for all answers; seconds from the first due time to the last answer."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def ask(sent: Sent) -> None:
            headers = {"Content-Type": "application/json"}
            if args.hints:
                headers["X-Session-ID"] = sent.group
            sent.at = time.monotonic()
            async with session.post(f"{url}/inference/v1/generate", data=sent.body, headers=headers) as answer:
                text = await answer.read()
                if answer.status != 200:
                    raise SystemExit(f"{answer.status}: {text[:300]!r}")

        began = time.monotonic()
        tasks = []
        for sent in load:
            await asyncio.sleep(max(began + sent.due_s * args.slow - time.monotonic(), 0))
            tasks.append(asyncio.create_task(ask(sent)))
        await asyncio.gather(*tasks)
        return time.monotonic() - began


def cpu_s(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main(args: argparse.Namespace) -> None:
    """Run every router in turn, round after round, and print the medians."""
    names = args.policy or [OURS[0], *THEIRS, OURS[1]]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="routing-") as folder:
        for seed in range(args.seed, args.seed + args.rounds):
            for name in names:
                result = await run(name, seed, args, Path(folder))
                found[name].append(result)
                said = ", ".join(f"{key} {value:.3f}" for key, value in result.items())
                print(f"round {seed} {name:20} {said}  (load average {os.getloadavg()[0]:.1f})", flush=True)
    hinted = "with" if args.hints else "without"
    print(f"\nmedians of {args.rounds} rounds, seconds of the mock's clock; {hinted} group names")
    print(
        f"{'router':34}{'first token':>12}{'(spread)':>15}{'p95':>8}{'makespan':>10}{'load':>7}{'prefilled':>11}"
        f"{'CPU ms: router':>16}{'workers':>9}{'driver':>8}{'hits':>7}"
    )
    middles = {name: {key: middle(results, key) for key in results[0]} for name, results in found.items()}
    for name, one in middles.items():
        who = f"rollplane {name}" if name in OURS else f"vllm-router {name}"
        spread = sorted(result["first"] for result in found[name])
        print(
            f"{who:34}{one['first']:12.3f}{f'({spread[0]:.2f}..{spread[-1]:.2f})':>15}{one['p95']:8.2f}"
            f"{one['makespan']:10.2f}{one['load']:7.2f}{one['prefilled']:11.2f}{one['cpu_ms']:16.2f}"
            f"{one['workers_cpu_ms']:9.2f}{one['driver_cpu_ms']:8.2f}{one['hits']:7.0f}"
        )
    compare(middles)


def middle(results: list[dict[str, float]], key: str) -> float:
    """The median of one figure."""
    return statistics.median(result[key] for result in results)


def compare(middles: dict[str, dict[str, float]]) -> None:
    """Our default policy beside the best of each figure of theirs, and beside round-robin."""
    ours = middles.get(OURS[0])
    theirs = {name: one for name, one in middles.items() if name in THEIRS}
    if ours is None:
        return
    for key in ("first", "makespan") if theirs else ():
        best = min(theirs, key=lambda name: theirs[name][key])
        print(f"{key}: {ours[key] / theirs[best][key]:.3f} of vllm-router's best there, {best}")
    if (turns := middles.get("round_robin")) is not None:
        print(
            f"round_robin to ours: first {turns['first'] / ours['first']:.2f}, makespan {turns['makespan'] / ours['makespan']:.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--slow", type=float, default=4.0)
    parser.add_argument(
        "--longest", type=int, default=LONGEST, help="longest output; short ones tell first tokens only"
    )
    parser.add_argument("--policy", choices=[*OURS, *THEIRS], action="append")
    parser.add_argument("--no-hints", dest="hints", action="store_false")
    parser.add_argument("--worker-port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kv-port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    uvloop.run(serve_worker(given) if given.worker_port else main(given))
