"""Tokens per second through a real vLLM engine on the CPU: what stands before it may not cost any.

    python bench/throughput.py --group rs --rounds 60 [--append FILE]        # about 25 s per round
    python bench/throughput.py --group python --rounds 60 [--append FILE]    # about 12 s per round

`rs`: vLLM's Rust server, asked directly, through Rollplane's frontend and sidecar worker, and through NVIDIA Dynamo's
frontend and sidecar, all before one engine. `python`: vLLM's Python server, and our worker with vLLM in its process, an
engine each. 32 clients ask for 64 tokens each, one request after the other, for `--seconds`; then what is under way is
finished, and the round's figure is all tokens over all of its time. The stacks take turns, each round beginning with
another one. Printed: by stack the mean, and the mean of its rounds' ratios to the first stack with the 95 % bounds of that
mean (Student's t). `--append`: rounds are added to the file as they end, and those that are in it count too, so that a
long measurement may be made in parts. It needs the environments of `make vllm-env`.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import time
from pathlib import Path

import aiohttp
import msgspec

from load import PATH, Load, bodies
from stacks import Rack, Stack, interpreter, rack, wait_until_serving

LOAD = Load(prompt=64, output=64, concurrency=32, requests=0)
T_975 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.179, 2.145, 2.12, 2.101, 2.086)
"""Student's 97.5 % for 1..10, 12, 14, 16, 18, 20 degrees of freedom; 2.04 up to 60, 2.0 beyond."""


def start(group: str, made: Rack) -> list[Stack]:
    """The stacks of a group; the first is what the others are held to."""
    if group == "python":
        return [made.vllm_python(), made.vllm_worker()]
    served = made.vllm_rs(arguments=["--max-num-seqs", "64"])
    direct = Stack("vllm-rs", group, served.http_url, {"server": served.pid}, msgpack=False)
    return [direct, made.rollplane(served, kind=group), made.dynamo(served, kind=group)]


async def round_of(session: aiohttp.ClientSession, stack: Stack, sent: list[bytes], *, seconds: float) -> float:
    """Tokens per second of one round."""
    headers = {"content-type": "application/json"}
    answers: list[bytes] = []
    ends = time.perf_counter() + seconds

    async def client(which: int) -> None:
        while time.perf_counter() < ends:
            async with session.post(stack.url + PATH, data=sent[which % len(sent)], headers=headers) as answered:
                answers.append(await answered.read())
                if answered.status != 200:
                    raise RuntimeError(f"{stack.name} answered {answered.status}: {answers[-1][:300]!r}")

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for which in range(LOAD.concurrency):
            group.create_task(client(which))
    took_s = time.perf_counter() - began
    for answer in (answers[0], answers[-1]):
        if len(msgspec.json.decode(answer)["choices"][0]["token_ids"]) != LOAD.output:
            raise RuntimeError(f"{stack.name} answered another number of tokens: {answer[:300]!r}")
    return len(answers) * LOAD.output / took_s


async def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """Rounds as tokens per second by stack."""
    sent: dict[str, list[bytes]] = {}
    found: list[dict[str, float]] = []
    with rack() as made:
        stacks = start(args.group, made)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            for stack in stacks:
                sent[stack.name] = bodies(LOAD, "unary", model=await wait_until_serving(session, stack))
            for stack in stacks:
                await round_of(session, stack, sent[stack.name], seconds=args.seconds)  # warms up
            for number in range(args.rounds):
                turn = number % len(stacks)
                rates = {}
                for stack in stacks[turn:] + stacks[:turn]:
                    rates[stack.name] = await round_of(session, stack, sent[stack.name], seconds=args.seconds)
                found.append(rates)
                if args.append is not None:
                    line = {"group": args.group, "seconds": args.seconds, "tokens_per_s": rates}
                    with args.append.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    return found


def bounds(ratios: list[float]) -> tuple[float, float]:
    """The 95 % bounds of their mean."""
    if len(ratios) < 2:
        return math.nan, math.nan
    free = len(ratios) - 1
    t = T_975[free - 1] if free <= 10 else T_975[10 + (free - 11) // 2] if free <= 20 else 2.086 if free < 30 else 2.04
    t = 2.0 if free >= 60 else t
    half = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.mean(ratios) - half, statistics.mean(ratios) + half


def report(rounds: list[dict[str, float]]) -> None:
    """Print a line per stack."""
    first = next(iter(sorted(rounds[0], key=lambda name: not name.startswith("vllm"))))
    print(f"{len(rounds)} rounds, 32 at once x 64 tokens, load average {os.getloadavg()[0]:.2f}\n{interpreter()}")
    for name in sorted(rounds[0], key=lambda name: name != first):
        mean = statistics.mean(each[name] for each in rounds)
        ratios = [each[name] / each[first] for each in rounds]
        low, high = bounds(ratios)
        print(f"  {name:22s} {mean:8.1f} tokens/s, of {first} {statistics.mean(ratios):.3f} ({low:.3f} to {high:.3f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--group", choices=["rs", "python"], default="rs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--append", type=Path, help="add rounds to this file, and report all in it")
    args = parser.parse_args()
    rounds = asyncio.run(measure(args)) if args.rounds else []
    if args.append is not None:
        lines = [json.loads(line) for line in args.append.read_text(encoding="utf-8").splitlines()]
        rounds = [line["tokens_per_s"] for line in lines if line["group"] == args.group]
    report(rounds)


if __name__ == "__main__":
    main()
