"""CPU per unary request: our worker over vLLM's gRPC services beside NVIDIA Dynamo's frontend and sidecar.

    python bench/sidecar_cpu.py [--rounds 3] [--requests 40] [--prompt 2048] [--tokens 1024]

Both are in front of one mock vLLM server that streams one token per message, and get the same requests, one after
another, in turns. Counted is the CPU time of the serving processes (not the mock's, not the client's), user and system,
from /proc. Needs the Dynamo environment (`make vllm-env`).
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models.tiny import shared_model
from tests.real import processes

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pids: list[int]) -> float:
    """CPU time of processes since they started."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * TICK_S


async def load(session: aiohttp.ClientSession, url: str, body: bytes, *, requests: int, tokens: int) -> None:
    for _ in range(requests):
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as answered:
            found = json.loads(await answered.read())
            if answered.status != 200 or len(found["choices"][0]["token_ids"]) != tokens:
                raise RuntimeError(f"{url} answered {answered.status}: {str(found)[:300]}")


async def wait_for(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answered:
                    if answered.status == 200 and "roll" in await answered.text():
                        return
            await asyncio.sleep(0.1)


async def measure(args: argparse.Namespace, root: Path, stack: contextlib.ExitStack) -> None:
    grpc_port, http_port = processes.free_ports(2)
    rollplane = [sys.executable, "-m", "rollplane.cli.main"]
    mock = [*rollplane, "mock-vllm", "--port", str(grpc_port), "--model", str(shared_model("qwen3"))]
    for option in ("model=roll", "vocab_tokens=1024", "max_model_len=16384"):
        mock += ["--engine-option", option]
    stack.enter_context(processes.running(mock, root / "mock.log", environment={}))
    ours = [*rollplane, "worker", "--engine", "vllm-grpc", "--grpc-endpoint", f"127.0.0.1:{grpc_port}"]
    ours += ["--port", str(http_port), "--engine-option", "vocab_size=1024"]
    worker = stack.enter_context(processes.running(ours, root / "worker.log", environment={}))
    engine = processes.Server(pid=0, http_port=9, log=root / "none", grpc_port=grpc_port)
    frontend = stack.enter_context(processes.dynamo_frontend(root / "kv", root / "frontend.log"))
    sidecar = stack.enter_context(processes.dynamo_sidecar(root / "kv", root / "sidecar.log", engine=engine))
    sampling = {"max_tokens": args.tokens, "ignore_eos": True, "logprobs": 1, "temperature": 1.0, "seed": 1}
    prompt = [300 + i % 700 for i in range(args.prompt)]
    body = json.dumps({"model": "roll", "token_ids": prompt, "sampling_params": sampling}).encode()
    subjects = {
        "rollplane worker": (f"http://127.0.0.1:{http_port}", [worker.pid]),
        "dynamo frontend + sidecar": (frontend.http_url, [frontend.pid, sidecar.pid]),
    }
    results: dict[str, list[float]] = {name: [] for name in subjects}
    async with aiohttp.ClientSession() as session:
        for url, _ in subjects.values():
            await wait_for(session, f"{url}/v1/models")
            await load(session, f"{url}/inference/v1/generate", body, requests=3, tokens=args.tokens)
        for _ in range(args.rounds):
            for name, (url, pids) in subjects.items():
                before = cpu_s(pids)
                await load(session, f"{url}/inference/v1/generate", body, requests=args.requests, tokens=args.tokens)
                results[name].append((cpu_s(pids) - before) / args.requests * 1000)
    for name, each in results.items():
        print(f"{name:28} {statistics.median(each):7.2f} ms CPU per request   rounds {[round(x, 2) for x in each]}")
    mine, theirs = (statistics.median(each) for each in results.values())
    print(f"ratio {mine / theirs:.3f}  (prompt {args.prompt}, {args.tokens} tokens, logprobs 1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        try:
            asyncio.run(measure(args, Path(directory), stack))
        except subprocess.SubprocessError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
