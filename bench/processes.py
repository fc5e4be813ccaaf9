"""Requests per second of a frontend that is one process, or several behind one port (`--processes`).

    python bench/processes.py [--processes 1,2] [--load 256/64] [--rounds 5] [--clients 2]

Two workers with the mock engine behind each frontend; client processes of 16 requests at once each, which only receive.
Fresh connections every round, since the system gives each to one process for good. Medians. A machine needs more cores
than processes here for the figure to say anything: clients and workers use some too.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
from tests.real import processes

from load import PATH, Load, bodies, median
from stacks import ROLLPLANE, Stack, rack, wait_until_serving

AT_ONCE = 16


def ask(url: str, sent: list[bytes], requests: int) -> float:
    """One client process: seconds for so many requests."""

    async def work() -> float:
        left = iter(range(requests))
        headers = {"content-type": "application/json"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:

            async def client() -> None:
                for i in left:
                    async with session.post(url + PATH, data=sent[i % len(sent)], headers=headers) as answered:
                        if answered.status != 200 or not await answered.read():
                            raise RuntimeError(f"{url} answered {answered.status}")

            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(client())
            return time.perf_counter() - began

    return asyncio.run(work())


async def ready(stacks: dict[int, Stack]) -> None:
    """Return once all serve."""
    async with aiohttp.ClientSession() as session:
        for stack in stacks.values():
            await wait_until_serving(session, stack)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--load", default="256/64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400, help="of each client in a round")
    args = parser.parse_args()
    prompt, output = (int(part) for part in args.load.split("/"))
    load = Load(prompt, output, AT_ONCE, args.requests)
    sent = bodies(load, "unary")
    counts = [int(part) for part in args.processes.split(",")]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    context = multiprocessing.get_context("spawn")
    with rack() as made, ProcessPoolExecutor(args.clients, mp_context=context) as pool:
        stacks = {}
        for count in counts:
            (port,) = processes.free_ports(1)
            command = [*ROLLPLANE, "serve", "--processes", str(count), "--workers", "2", "--port", str(port)]
            options = ["--served-model-name", "roll", "--engine-option", "vocab_tokens=1024"]
            pid = made.run([*command, *options, "--max-model-len", "40000"], f"serve-{count}")
            stacks[count] = Stack(f"{count} processes", "mock", f"http://127.0.0.1:{port}", {"serve": pid})
        asyncio.run(ready(stacks))
        for number in range(-1, args.rounds):  # the first warms up
            for count, stack in stacks.items():
                began = time.perf_counter()
                asked = [pool.submit(ask, stack.url, sent, args.requests) for _ in range(args.clients)]
                for one in asked:
                    one.result()
                if number >= 0:
                    rates[count].append(args.clients * args.requests / (time.perf_counter() - began))
    print(f"{load}, {args.clients} clients, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    first = median(rates[counts[0]])
    for count, found in rates.items():
        print(f"  {count} processes: {median(found):7.0f} requests/s, {median(found) / first:.2f}")


if __name__ == "__main__":
    main()
