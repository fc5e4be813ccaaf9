"""Tokens per second through a real vLLM engine on the CPU: what stands before it may not cost any.

    python bench/throughput.py --group rs --rounds 60 [--append FILE]        # about 28 s per round
    python bench/throughput.py --group python --rounds 60 [--append FILE]    # about 16 s per round

`rs`: vLLM's Rust server, asked directly, through Rollplane's frontend and sidecar worker, and through NVIDIA Dynamo's
frontend and sidecar, all before one engine. `python`: vLLM's Python server, and our worker with vLLM in its process, an
engine each. 32 clients ask for 64 tokens each, one request after the other. The stacks take turns, each round beginning
with another one.

Two figures per round. `steady`: once every client has had three answers, the tokens that the engine itself counts in
`--seconds`, over that time. `drained`: all tokens of the round over all of its time, from its first request to the last
answer of those that were under way when its time was over: a rollout that starts at once and is waited for. A round whose
engine counts more or less tokens than were answered is an error. Printed: by stack the mean, and the mean of its rounds'
ratios to the first stack with the 95 % bounds of that mean (Student's t). `--append`: rounds are added to the file as they
end, and those that are in it count too, so that a long measurement may be made in parts; of other `--seconds` they are
refused. It needs the environments of `make vllm-env`.
"""

import argparse
import asyncio
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from load import PATH, Load, bodies
from stacks import Rack, Stack, interpreter, rack, wait_until_serving

LOAD = Load(prompt=64, output=64, concurrency=32, requests=0)
SETTLED_ANSWERS = 3
"""Answers that every client has had before the engine's tokens are counted."""
TOKENS, STEPS = COUNTS = ("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
T_975 += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
T_975 += (2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
"""Student's 97.5 % for 1 to 30 degrees of freedom; more count as 30, which makes bounds wider by 4 % at most."""


def start(group: str, made: Rack) -> list[Stack]:
    """The stacks of a group; the first is what the others are held to."""
    if group == "python":
        return [made.vllm_python(), made.vllm_worker()]
    served = made.vllm_rs(arguments=["--max-num-seqs", "64"])
    direct = Stack("vllm-rs", group, served.http_url, {"server": served.pid}, msgpack=False)
    return [direct, made.rollplane(served, kind=group), made.dynamo(served, kind=group)]


@dataclass(frozen=True)
class Round:
    """Tokens per second, and the engine's steps per token of a request (1 is the least)."""

    steady: float
    drained: float
    steps: float


class Line(msgspec.Struct):
    """A round as `--append` writes it."""

    group: str
    seconds: float
    rounds: dict[str, Round]


async def counted(session: aiohttp.ClientSession, url: str) -> tuple[float, float, float]:
    """The engine's own counts of tokens and of steps, and when they were read."""
    async with session.get(f"{url}/metrics") as answered:
        page = await answered.text()
    found = dict.fromkeys(COUNTS, 0.0)
    for line in page.splitlines():
        if (name := line.partition("{")[0]) in found:
            found[name] += float(line.rpartition(" ")[2])
    return found[TOKENS], found[STEPS], time.perf_counter()


async def round_of(
    session: aiohttp.ClientSession, stack: Stack, sent: list[bytes], *, engine_url: str, seconds: float
) -> Round:
    """One round."""
    headers = {"content-type": "application/json"}
    answers: list[bytes] = []
    had = [0] * LOAD.concurrency
    settled, over = asyncio.Event(), asyncio.Event()

    async def client(which: int) -> None:
        while not over.is_set():
            async with session.post(stack.url + PATH, data=sent[which % len(sent)], headers=headers) as answered:
                answers.append(await answered.read())
                if answered.status != 200:
                    raise RuntimeError(f"{stack.name} answered {answered.status}: {answers[-1][:300]!r}")
            had[which] += 1
            if min(had) >= SETTLED_ANSWERS:
                settled.set()

    tokens_before, _, began_s = await counted(session, engine_url)
    async with asyncio.TaskGroup() as group:
        for which in range(LOAD.concurrency):
            group.create_task(client(which))
        await settled.wait()
        first = await counted(session, engine_url)
        await asyncio.sleep(seconds)
        last = await counted(session, engine_url)
        over.set()
    took_s = time.perf_counter() - began_s
    for answer in (answers[0], answers[-1]):
        if len(msgspec.json.decode(answer)["choices"][0]["token_ids"]) != LOAD.output:
            raise RuntimeError(f"{stack.name} answered another number of tokens: {answer[:300]!r}")
    made = len(answers) * LOAD.output
    tokens_after, _, _ = await counted(session, engine_url)
    if tokens_after - tokens_before != made:
        raise RuntimeError(f"{stack.name} answered {made} tokens, its engine made {tokens_after - tokens_before:.0f}")
    tokens, steps, window_s = (after - before for before, after in zip(first, last, strict=True))
    return Round(tokens / window_s, made / took_s, steps * LOAD.concurrency / tokens)


async def measure(args: argparse.Namespace) -> list[dict[str, Round]]:
    """Rounds by stack."""
    sent: dict[str, list[bytes]] = {}
    found: list[dict[str, Round]] = []
    with rack() as made:
        stacks = start(args.group, made)
        urls = [stacks[0].url] * len(stacks) if args.group == "rs" else [stack.url for stack in stacks]
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            for stack in stacks:
                sent[stack.name] = bodies(LOAD, "unary", model=await wait_until_serving(session, stack))

            async def one(which: int) -> Round:
                stack = stacks[which]
                body = sent[stack.name]
                return await round_of(session, stack, body, engine_url=urls[which], seconds=args.seconds)

            for which in range(len(stacks)):
                await one(which)  # warms up
            for number in range(args.rounds):
                order = [(number + i) % len(stacks) for i in range(len(stacks))]
                rates = {stacks[which].name: await one(which) for which in order}
                found.append(rates)
                if args.append is not None:
                    with args.append.open("ab") as file:
                        file.write(msgspec.json.encode(Line(args.group, args.seconds, rates)) + b"\n")
    return found


def bounds(ratios: list[float]) -> tuple[float, float]:
    """The 95 % bounds of their mean."""
    if len(ratios) < 2:
        return math.nan, math.nan
    free = len(ratios) - 1
    half = T_975[min(free, len(T_975)) - 1] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.mean(ratios) - half, statistics.mean(ratios) + half


def earlier(file: Path, *, group: str, seconds: float) -> list[dict[str, Round]]:
    """The rounds of a group in a file.

    Raises:
        ValueError: a line that is no round, or one of another length.
    """
    found = []
    for number, text in enumerate(file.read_bytes().splitlines(), 1):
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        if line.group != group:
            continue
        if line.seconds != seconds:
            raise ValueError(f"{file}, line {number}: a round of {line.seconds:g} s, not of {seconds:g}")
        found.append(line.rounds)
    return found


def report(rounds: list[dict[str, Round]]) -> None:
    """Print a line per stack and figure."""
    names = sorted(rounds[0], key=lambda name: (not name.startswith("vllm"), name))
    first = names[0]
    print(f"{len(rounds)} rounds, 32 at once x 64 tokens, load average {os.getloadavg()[0]:.2f}\n{interpreter()}")
    for figure in ("steady", "drained"):
        for name in names:
            mean = statistics.mean(getattr(each[name], figure) for each in rounds)
            ratios = [getattr(each[name], figure) / getattr(each[first], figure) for each in rounds]
            low, high = bounds(ratios)
            print(
                f"  {figure:8s} {name:22s} {mean:8.1f} tokens/s, of {first} {statistics.mean(ratios):.3f} ({low:.3f} to {high:.3f})"
            )
    for name in names:
        print(
            f"  steps    {name:22s} {statistics.mean(each[name].steps for each in rounds):.3f} per token of a request"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--group", choices=["rs", "python"], default="rs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--append", type=Path, help="add rounds to this file, and report all in it")
    args = parser.parse_args()
    rounds: list[dict[str, Round]] = []
    try:
        if args.append is not None and args.append.exists():
            rounds = earlier(args.append, group=args.group, seconds=args.seconds)
    except ValueError as error:
        parser.error(str(error))
    if args.rounds:
        rounds += asyncio.run(measure(args))
    if not rounds:
        parser.error("no rounds to report")
    report(rounds)


if __name__ == "__main__":
    main()
