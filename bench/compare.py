"""What one rollout costs: Rollplane beside NVIDIA Dynamo, on the same mock vLLM server or the same real one.

    python bench/compare.py [--rounds 5] [--loads 256/64,2048/1024,8192/8192] [--modes unary,msgpack,stream] [--json FILE]
    python bench/compare.py --engine vllm-rs,vllm-python --loads 256/64 --rounds 5

Every stack stands in front of one server: a mock that sends one token per message, as fast as it can (`mock-per-token`) or
each when it is made (`mock-stepwise`), one that sends the whole answer at once (`mock-whole`), or vLLM's Rust server over a
real engine with a tiny model. `vllm-python` is vLLM's Python server beside our worker with vLLM in its process, each with an
engine of its own. Tokens per second through a real engine, with their bounds: `bench/throughput.py`. Rounds of two seconds
and more go through the stacks in turn; each figure is the median of its rounds. CPU is that of the stack's own processes,
user and system, as /proc counts it; neither the engine's nor this client's. `routes` and `masks` need an engine that has
them: the mock engine inside the worker, with a mixture of 48 layers x 8 experts; vLLM's gRPC services carry neither, so
Dynamo has no row.
A row of `--json` has also the CPU of each process and the time that a client needs to read one answer.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from load import Load, Mode, Outcome, bodies, median, percentile, run
from stacks import Rack, Stack, interpreter, rack, wait_until_serving

PER_TOKEN, STEPWISE, WHOLE, IN_WORKER, VLLM, PYTHON = (
    "mock-per-token",
    "mock-stepwise",
    "mock-whole",
    "mock-in-worker",
    "vllm-rs",
    "vllm-python",
)
ENGINES = {
    "per-token": PER_TOKEN,
    "stepwise": STEPWISE,
    "whole": WHOLE,
    "in-worker": IN_WORKER,
    "vllm-rs": VLLM,
    "vllm-python": PYTHON,
}
CONCURRENCY = {256: 32, 2048: 16, 8192: 8}
REQUESTS = {256: 256, 2048: 64, 8192: 16}
ROUND_S = 2.0
"""The least time of a round. So many requests are some tenths of a second of the cheapest stack, which begins with caches
that the stack before it has filled; a server under load is warm."""
SERVED_BY: dict[str, tuple[Mode, ...]] = {
    PER_TOKEN: ("unary", "msgpack", "stream", "features"),
    STEPWISE: ("unary", "msgpack", "stream"),
    WHOLE: ("unary", "msgpack"),
    IN_WORKER: ("routes", "masks"),
    VLLM: ("unary", "msgpack", "stream"),
    PYTHON: ("unary", "msgpack", "stream"),
}
DYNAMO_SPEAKS: tuple[Mode, ...] = ("unary", "msgpack", "features")
"""For `msgpack` it is asked for JSON, which is what it has."""
DYNAMO_MS = {
    (PER_TOKEN, 256): 1.84,
    (PER_TOKEN, 2048): 22.0,
    (PER_TOKEN, 8192): 197.0,
    (WHOLE, 256): 0.57,
    (WHOLE, 2048): 2.3,
    (WHOLE, 8192): 20.0,
}
"""Dynamo's CPU per unary request, by engine and prompt, where the bars of this comparison were set; printed beside what it is here."""


@dataclass(frozen=True)
class Case:
    """One stack under one load in one mode."""

    stack: Stack
    load: Load
    mode: Mode


def start(engine: str, made: Rack) -> list[Stack]:
    """The stacks in front of one engine."""
    if engine == IN_WORKER:
        worker, worker_pid = made.mock_worker(name="moe-worker")
        url, pid = made.frontend([worker], name="moe-frontend")
        return [Stack("rollplane", engine, url, {"frontend": pid, "worker": worker_pid})]
    if engine == VLLM:
        served = made.vllm_rs(arguments=["--max-num-seqs", "64"])
        direct = Stack("vllm-rs", engine, served.http_url, {"server": served.pid}, msgpack=False)
        ours, theirs = made.rollplane(served, kind=engine), made.dynamo(served, kind=engine)
        return [direct, made.vllm_router(direct), ours, made.rollplane_worker(served, kind=engine), theirs]
    if engine == PYTHON:
        python = made.vllm_python()
        return [python, made.vllm_router(python), made.vllm_worker()]
    mock = made.mock(tokens_per_message=0 if engine == WHOLE else 1, name=engine, stepwise=engine == STEPWISE)
    return [
        made.rollplane(mock, kind=engine),
        made.rollplane_worker(mock, kind=engine),
        made.dynamo(mock, kind=engine),
    ]


def cases(stacks: list[Stack], engine: str, loads: list[Load], modes: list[Mode]) -> Iterator[list[Case]]:
    """What is measured in turns, one list after the other."""
    for load in loads:
        for mode in modes:
            if mode not in SERVED_BY[engine]:
                continue
            able = [
                stack
                for stack in stacks
                if (stack.name != "dynamo" or mode in DYNAMO_SPEAKS) and (mode != "stream" or stack.streams)
            ]
            yield [
                Case(stack, load, mode)
                for stack in able
                if mode != "msgpack" or stack.msgpack or stack.name == "dynamo"
            ]


async def measure(group: list[Case], *, rounds: int) -> list[dict[str, Any]]:
    """One row per case."""
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    costs_ms: dict[str, list[dict[str, float]]] = defaultdict(list)
    load, mode = group[0].load, group[0].mode
    sent = bodies(load, mode)
    connector = aiohttp.TCPConnector(limit=load.concurrency)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        for number in range(-1, rounds):  # the first warms up
            for case in group:
                name, said = case.stack.name, mode if case.stack.msgpack or mode != "msgpack" else "unary"
                before = case.stack.cpu_s()
                requests = load.requests if number >= 0 else min(load.requests, load.concurrency)
                seconds = ROUND_S if number >= 0 else 0.0
                outcome = await run(session, case.stack.url, sent, load, said, requests=requests, seconds=seconds)
                after = case.stack.cpu_s()
                requests = len(outcome.latencies_s)
                if number >= 0:
                    outcomes[name].append(outcome)
                    costs_ms[name].append({key: (after[key] - before[key]) / requests * 1e3 for key in before})
    rows = [
        {
            "stack": case.stack.name,
            "engine": case.stack.engine,
            "prompt": load.prompt,
            "output": load.output,
            "mode": mode,
            "cpu_ms_per_request": median([sum(each.values()) for each in costs_ms[case.stack.name]]),
            "requests_per_s": median([len(each.latencies_s) / each.wall_s for each in outcomes[case.stack.name]]),
            "p50_ms": 1e3 * median([percentile(each.latencies_s, 0.5) for each in outcomes[case.stack.name]]),
            "p99_ms": 1e3 * median([percentile(each.latencies_s, 0.99) for each in outcomes[case.stack.name]]),
            "bytes_per_answer": round(
                median([median(list(map(float, each.sizes))) for each in outcomes[case.stack.name]])
            ),
            "client_decode_ms": 1e3 * median([each.decode_s for each in outcomes[case.stack.name]]),
            "cpu_ms_by_process": {
                key: median([each[key] for each in costs_ms[case.stack.name]]) for key in case.stack.pids
            },
            "concurrency": load.concurrency,
            "rounds": [sum(each.values()) for each in costs_ms[case.stack.name]],
        }
        for case in group
    ]
    theirs = next((row["cpu_ms_per_request"] for row in rows if row["stack"] == "dynamo"), None)
    for row in rows:
        row["ratio_to_dynamo"] = row["cpu_ms_per_request"] / theirs if theirs else None
    return rows


HEAD = f"{'stack':17}{'engine':18}{'load':>10} {'mode':9}{'CPU ms':>9}{'ratio':>8}{'req/s':>8}{'p50 ms':>8}{'p99 ms':>8}{'kB':>8}"


def line(row: dict[str, Any]) -> str:
    """A row of the table; after it, the CPU of each process."""
    ratio = "" if row["ratio_to_dynamo"] is None else f"{row['ratio_to_dynamo']:.3f}"
    parts = ", ".join(f"{name} {value:.2f}" for name, value in row["cpu_ms_by_process"].items())
    return (
        f"{row['stack']:17}{row['engine']:18}{row['prompt']:>5}/{row['output']:<4} {row['mode']:9}"
        f"{row['cpu_ms_per_request']:>9.2f}{ratio:>8}{row['requests_per_s']:>8.1f}{row['p50_ms']:>8.1f}"
        f"{row['p99_ms']:>8.1f}{row['bytes_per_answer'] / 1e3:>8.1f}  {parts}; client {row['client_decode_ms']:.1f}"
    )


async def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every row."""
    rows: list[dict[str, Any]] = []
    loads = [parse_load(text, scale=args.scale) for text in args.loads.split(",")]
    print(
        f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, {args.rounds} rounds\n{interpreter()}\n{HEAD}"
    )
    for engine in (ENGINES[name] for name in args.engine.split(",")):
        with rack() as made:
            stacks = start(engine, made)
            async with aiohttp.ClientSession() as session:
                for stack in stacks:
                    await wait_until_serving(session, stack)
            for group in cases(stacks, engine, loads, args.modes.split(",")):
                found = await measure(group, rounds=args.rounds)
                rows += found
                for row in found:
                    print(line(row), flush=True)
                    known_ms = DYNAMO_MS.get((row["engine"], row["prompt"]))
                    if row["stack"] == "dynamo" and row["mode"] == "unary" and known_ms is not None:
                        print(f"{'':17}where the bars were set, Dynamo's figure was {known_ms:.2f} ms", flush=True)
    return rows


def parse_load(text: str, *, scale: float) -> Load:
    """PROMPT/OUTPUT as a load; `scale` of the usual requests per round."""
    prompt, output = (int(part) for part in text.split("/"))
    near = min(CONCURRENCY, key=lambda known: abs(known - prompt))
    return Load(prompt, output, CONCURRENCY[near], max(1, round(REQUESTS[near] * scale)))


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", default="per-token,whole,in-worker", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--loads", default="256/64,2048/1024,8192/8192")
    parser.add_argument("--modes", default="unary,msgpack,stream,features,routes,masks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the usual requests per round")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    rows = asyncio.run(compare(args))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
