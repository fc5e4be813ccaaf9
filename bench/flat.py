"""CPU of a frontend per request behind which 1, 8 or 64 workers stand: it should not matter.

    python bench/flat.py [--workers 1,8,64] [--rounds 5] [--requests 512]

Workers with the mock engine, each on a port of its own, several to a process so that 64 fit on a small machine; a frontend
process for each count. The same load (256/64, one logprob per token, 32 at once) goes to the frontends in turns. CPU
milliseconds per request of the frontend's process alone, its following of all its workers included; medians of the rounds.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import aiohttp
import uvloop

from load import Load, bodies, median, run
from rollplane.config import ServerSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.ops import bind, make_server, prepare_process, url_of
from rollplane.server.service import Service
from rollplane.worker import Worker, WorkerSettings
from stacks import MODEL, Stack, interpreter, rack, wait_until_serving

LOAD = Load(prompt=256, output=64, concurrency=32, requests=0)
PER_PROCESS = 16


async def serve(count: int, pipe: Connection) -> None:
    """So many workers in this process, until told to stop."""
    running, urls = [], []
    for i in range(count):
        engine = MockEngine(MockSettings(model=MODEL, vocab_tokens=1024, max_model_len=4096))
        worker = Worker(engine, settings=WorkerSettings(name=f"worker-{i}"))
        await worker.start()
        settings = ServerSettings(port=0)
        service = Service(
            role="worker",
            engine=worker,
            admin=worker,
            worker=worker,
            settings=settings,
            keys=KeyRing(),
            metrics=Metrics(),
        )
        sock = bind(settings)
        server = make_server(create_app(service), settings)
        running.append(asyncio.create_task(server.serve(sockets=[sock])))
        urls.append(url_of(sock))
    prepare_process()
    await asyncio.sleep(0.5)
    pipe.send(urls)
    await asyncio.to_thread(pipe.recv)
    os._exit(0)


def serve_process(count: int, pipe: Connection) -> None:
    """The process of `serve`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(count, pipe))


@contextlib.contextmanager
def workers(count: int) -> Iterator[list[str]]:
    """The URLs of so many workers."""
    context = multiprocessing.get_context("spawn")
    pipes, started, urls = [], [], []
    try:
        for at in range(0, count, PER_PROCESS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_process, args=(min(PER_PROCESS, count - at), theirs), daemon=True)
            process.start()
            pipes.append(ours)
            started.append(process)
        for pipe in pipes:
            urls += pipe.recv()
        yield urls
    finally:
        for pipe, process in zip(pipes, started, strict=True):
            pipe.send("stop")
            process.join(10)


async def measure(counts: list[int], *, rounds: int, requests: int) -> None:
    """Print a line per count."""
    sent = bodies(LOAD, "unary")
    with rack() as made, contextlib.ExitStack() as started:
        stacks = {}
        for count in counts:
            url, pid = made.frontend(started.enter_context(workers(count)), name=f"frontend-{count}")
            stacks[count] = Stack(f"{count} workers", "mock", url, {"frontend": pid})
        costs_ms: dict[int, list[float]] = {count: [] for count in counts}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=LOAD.concurrency)) as session:
            for stack in stacks.values():
                await wait_until_serving(session, stack)
            await asyncio.sleep(2)
            for number in range(-1, rounds):  # the first warms up
                for count, stack in stacks.items():
                    before = stack.cpu_s()["frontend"]
                    await run(session, stack.url, sent, LOAD, "unary", requests=requests)
                    if number >= 0:
                        costs_ms[count].append((stack.cpu_s()["frontend"] - before) / requests * 1e3)
    print(
        f"{LOAD}, {requests} requests a round, {rounds} rounds, load average {os.getloadavg()[0]:.1f}\n{interpreter()}"
    )
    first = median(costs_ms[counts[0]])
    for count, found in costs_ms.items():
        print(
            f"  {count:3d} workers: {median(found):.2f} ms CPU of the frontend per request, {median(found) / first:.2f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=512)
    args = parser.parse_args()
    counts = [int(part) for part in args.workers.split(",")]
    asyncio.run(measure(counts, rounds=args.rounds, requests=args.requests))


if __name__ == "__main__":
    main()
