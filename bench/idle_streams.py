"""What an idle stream holds: 2,000 streams that have begun and wait, and the memory of the processes that serve them.

    python bench/idle_streams.py [--streams 2000]

A worker with the mock engine, and a frontend before it. Every stream gets its first tokens, then the policy is paused
(`keep`) and nothing moves. Resident memory of each process before the streams and while they wait.
"""

import argparse
import asyncio
import os
import resource
from pathlib import Path

import aiohttp
import msgspec

from stacks import Stack, rack, wait_until_serving

BODY = msgspec.json.encode(
    {
        "token_ids": [5] * 64,
        "sampling_params": {"max_tokens": 1_000, "ignore_eos": True, "logprobs": 1},
        "stream": True,
    }
)
AT_ONCE = 400


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measure(session: aiohttp.ClientSession, stack: Stack, admin: str, streams: int) -> None:
    """Print one line per process."""
    before = {name: rss_mb(pid) for name, pid in stack.pids.items()}
    room = asyncio.Semaphore(AT_ONCE)

    async def begin() -> aiohttp.ClientResponse:
        async with room:
            answer = await session.post(
                f"{stack.url}/inference/v1/generate", data=BODY, headers={"Content-Type": "application/json"}
            )
            if answer.status != 200 or not await answer.content.readline():
                raise SystemExit(f"{stack.url} answered {answer.status}: {await answer.text()}")
            return answer

    waiting = await asyncio.gather(*(begin() for _ in range(streams)))
    async with session.post(f"{admin}/engine/pause_generation", json={"mode": "keep"}) as answer:
        if answer.status != 200:
            raise SystemExit(f"pausing answered {answer.status}: {await answer.text()}")
    await asyncio.sleep(5)
    print(f"{stack.name}: {streams} streams wait, load average {os.getloadavg()[0]:.1f}")
    for name, pid in stack.pids.items():
        now = rss_mb(pid)
        each = (now - before[name]) * 1e3 / streams
        print(f"  {name:9s} {before[name]:6.0f} MB before, {now:6.0f} MB with them: {each:.0f} kB a stream")
    for one in waiting:
        one.close()


async def run(streams: int) -> None:
    """Both processes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with rack() as made:
        options = {"max_num_seqs": str(streams + 64), "step_s": "5"}
        worker, worker_pid = made.mock_worker(name="idle-worker", options=options)
        url, pid = made.frontend([worker], name="idle-frontend")
        stack = Stack("rollplane", "mock", url, {"frontend": pid, "worker": worker_pid})
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await wait_until_serving(session, stack)
            await measure(session, stack, worker, streams)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=2000)
    asyncio.run(run(parser.parse_args().streams))


if __name__ == "__main__":
    main()
