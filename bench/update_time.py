"""From a trainer's save to an open fleet: a policy update of real weights while tokens are made, beside reading the file.

    python bench/update_time.py [--megabytes 256] [--workers 2] [--rounds 5]

`rollplane serve` with the embedded engine (on a CPU, float32, one thread) and a Qwen3 of the size wanted. Two checkpoints, as
a trainer saved them, are made current in turns by `POST /v1/rl/policy` while streams run, so that every update is one; the
second rounds' files are in the page cache, as just saved ones are. `read`: one pass over the same bytes into memory.
`update`: the call, from sending to its answer. `stage` of it goes on beside generation, `pause` is when no token is made
anywhere; `gap`: the longest time between two chunks of a stream that was running throughout.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
from tests.models.tiny import make_dense
from tests.real import processes

from stacks import ROLLPLANE, Stack, rack, wait_until_serving

HIDDEN = 512


def make_model(path: Path, *, seed: int, megabytes: int) -> Path:
    """A dense model of about that size."""
    per_layer = 4 * (HIDDEN * 4 * HIDDEN * 3 + 3 * HIDDEN * 128)  # bytes: the feed-forward and small attention
    layers = max(1, round(megabytes * 1e6 / per_layer))
    return make_dense(path, seed=seed, layers=layers, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN)


def read_once_s(path: Path) -> tuple[float, int]:
    """Seconds to read the weights' files once, and their bytes."""
    began, size = time.perf_counter(), 0
    for file in path.glob("*.safetensors"):
        with file.open("rb", buffering=0) as source:
            while part := source.read(1 << 22):
                size += len(part)
    return time.perf_counter() - began, size


async def streaming(session: aiohttp.ClientSession, url: str, gaps: list[float], stop: asyncio.Event) -> None:
    """Streams one after the other; the time between two chunks of each."""
    body = {
        "token_ids": [5] * 16,
        "sampling_params": {"max_tokens": 100, "ignore_eos": True},
        "stream": True,
    }
    while not stop.is_set():
        async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
            last = None
            async for _ in answer.content.iter_any():
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def measure(args: argparse.Namespace, root: Path) -> None:
    """Print the medians."""
    models = [make_model(root / f"v{seed}", seed=seed, megabytes=args.megabytes) for seed in range(2)]
    (port,) = processes.free_ports(1)
    with rack() as made:
        command = [*ROLLPLANE, "serve", "--workers", str(args.workers), "--engine", "embedded", "--port", str(port)]
        command += ["--model", str(models[0]), "--engine-option", "threads=1", "--root", str(root)]
        pid = made.run(command, "serve")
        url = f"http://127.0.0.1:{port}"
        found: dict[str, list[float]] = {name: [] for name in ("read", "update", "stage", "pause", "gap")}
        size = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            await wait_until_serving(session, Stack("serve", "embedded", url, {"serve": pid}))
            for number in range(args.rounds + 1):  # the first warms up
                path = models[(number + 1) % 2]
                read_s, size = read_once_s(path)
                stop, gaps = asyncio.Event(), [0.0]
                streams = [asyncio.create_task(streaming(session, url, gaps, stop)) for _ in range(args.workers)]
                await asyncio.sleep(1.0)
                gaps[:] = [0.0]
                began = time.perf_counter()
                sent = {"model_path": str(path), "weight_version": f"r{number}"}
                async with session.post(f"{url}/v1/rl/policy", json=sent) as answer:
                    said = await answer.json()
                    if answer.status != 200:
                        raise SystemExit(f"the update answered {answer.status}: {said}")
                took_s = time.perf_counter() - began
                await asyncio.sleep(0.5)
                stop.set()
                await asyncio.gather(*streams)
                if number:
                    values = (read_s, took_s, said["stage_s"], said["pause_s"], max(gaps))
                    for name, value in zip(found, values, strict=True):
                        found[name].append(value)
        mid = {name: statistics.median(values) for name, values in found.items()}
        print(
            f"{size / 1e6:.0f} MB, {args.workers} workers, {args.rounds} rounds, load average {os.getloadavg()[0]:.1f}"
        )
        for name, value in mid.items():
            print(
                f"  {name:7s} {value * 1e3:7.0f} ms, {value / size * 1e9:6.2f} ns per byte, {value / mid['read']:.1f} x"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollplane-bench-") as directory:
        asyncio.run(measure(args, Path(directory)))


if __name__ == "__main__":
    main()
