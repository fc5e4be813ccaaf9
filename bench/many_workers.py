"""64 workers on 64 ports behind one frontend: load, policy updates over all of them, a quarter killed and started again.

    python bench/many_workers.py [--workers 64] [--per-process 8] [--clients 48] [--requests 1536] [--json FILE]

Mock workers, several in one process but each with a server, a port and a state of its own, and a frontend, all processes of
their own. Checked: every request is answered whole; each answer that was asked for after an update was confirmed has its
version; an update tells of every worker in every phase; workers killed in mid-load lose no request; they are left out of
the update that passes meanwhile, and once started again are brought to its policy before they serve. Exits with 1 where one of these fails.
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
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import structlog

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.config import ServerSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import RollplaneError
from rollplane.protocol.response import GenerateResponse
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.ops import bind, make_server
from rollplane.server.service import Service
from rollplane.worker import Worker, WorkerSettings

START_S = 120.0
PHASES = ("stage", "pause", "apply", "settle")
SHARED_TOKENS = 64
SAMPLING: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "logprobs": 0}


# -- one process of workers ------------------------------------------------------------------------------------------


async def host(ports: list[int], root: str) -> None:
    """Serve one mock worker on each port, until the process ends."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    async with asyncio.TaskGroup() as group:
        for port in ports:
            group.create_task(serve(port, root))


async def serve(port: int, root: str) -> None:
    """One worker."""
    settings = ServerSettings(port=port, root=[root])
    worker = Worker(
        MockEngine(
            MockSettings(step_s=0.01, prefill_tokens_per_s=100_000, stage_s=0.05, apply_s=0.05, max_num_seqs=64)
        ),
        settings=WorkerSettings(name=f"worker-{port}"),
    )
    await worker.start()
    service = Service(
        role="worker",
        engine=worker,
        admin=worker,
        worker=worker,
        settings=settings,
        keys=KeyRing(),
        metrics=Metrics(),
    )
    await make_server(create_app(service), settings).serve(sockets=[bind(settings)])


class Host:
    """A process of workers, which can be killed and started again on its ports."""

    def __init__(self, ports: list[int], root: Path) -> None:
        self.ports = ports
        self.root = root
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def urls(self) -> list[str]:
        """The addresses of its workers."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self) -> None:
        """Start it, without waiting for it to serve."""
        words = [sys.executable, __file__, "--host", ",".join(map(str, self.ports)), "--root", str(self.root)]
        with (self.root / "workers.log").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


# -- the run -----------------------------------------------------------------------------------------------------------


class Run:
    """One run over a frontend and its workers."""

    def __init__(self, args: argparse.Namespace, hosts: list[Host], url: str, pid: int, root: Path) -> None:
        self.args = args
        self.hosts = hosts
        self.url = url
        self.pid = pid
        self.root = root
        self.urls = [url for one in hosts for url in one.urls]
        self.broken: list[str] = []
        self.figures: dict[str, Any] = {"workers": len(self.urls)}
        self.moved = 0
        self._asked = 0

    def must(self, holds: bool, what: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.broken.append(what)

    async def all(self) -> None:
        """Every part, in order."""
        async with AdminClient(self.url) as admin, Client(self.url, attempts=3, timeout_s=120.0) as client:
            self.figures["all routable after, s"] = await self.until_serving(admin, len(self.urls))
            await self.load(client)
            await self.update_under_load(admin, client, "v1", left_out=0)
            await self.kill_under_load(admin, client)
            self.figures["back after, s"] = await self.until_serving(admin, len(self.urls))
            answers = await self.ask(client, 4 * len(self.urls))
            self.must(versions(answers) == {"v2"}, f"after the return answers have {versions(answers)}")
            served = {answer.served_by.worker for answer in answers}
            back = {f"worker-{port}" for one in self.killed for port in one.ports}
            self.must(bool(served & back), "no worker that came back has served")
        self.figures["requests"] = self._asked
        self.figures["requests that moved to another worker"] = self.moved
        self.figures["frontend's memory, MiB"] = round(resident_bytes(self.pid) / 2**20)

    @property
    def killed(self) -> list[Host]:
        """A quarter of the processes, at least one."""
        return self.hosts[: max(len(self.hosts) // 4, 1)]

    async def ask(self, client: Client, count: int) -> list[GenerateResponse]:
        """So many requests by all clients; prompts of 256 tokens, a quarter of each shared with others."""
        numbers = iter(range(self._asked, self._asked + count))
        self._asked += count
        answers: list[GenerateResponse] = []

        async def one() -> None:
            for number in numbers:
                shared = [7 + number % 16] * SHARED_TOKENS
                own = [100 + (number * 31 + i) % 20_000 for i in range(192)]
                answer = await client.generate(
                    [*shared, *own], sampling_params={**SAMPLING, "seed": number}, idempotency_key=f"key-{number}"
                )
                self.must(answer.choices[0].token_ids.size == SAMPLING["max_tokens"], f"request {number} is not whole")
                self.moved += answer.served_by.attempt > 1
                answers.append(answer)

        await asyncio.gather(*(one() for _ in range(self.args.clients)))
        return answers

    async def load(self, client: Client) -> None:
        """Load alone: who gets how much, and what it costs the frontend."""
        began, cpu = time.monotonic(), cpu_s(self.pid)
        answers = await self.ask(client, self.args.requests)
        loads = Counter(answer.served_by.worker for answer in answers)
        counts = [loads.get(f"worker-{port}", 0) for one in self.hosts for port in one.ports]
        self.must(min(counts) > 0, f"{counts.count(0)} workers got no request")
        self.figures |= {
            "requests/s": round(len(answers) / (time.monotonic() - began), 1),
            "frontend's CPU, ms per request": round((cpu_s(self.pid) - cpu) / len(answers) * 1000, 2),
            "requests per worker, max/mean": round(max(counts) / statistics.mean(counts), 2),
        }

    async def update(self, admin: AdminClient, version: str) -> dict[str, Any]:
        """One update, followed by its events."""
        path = self.root / version
        path.mkdir()
        (path / "mock_weights.json").write_text(json.dumps({"weights": version}))
        began = time.monotonic()
        update = asyncio.create_task(admin.update_policy(str(path), version=version, operation_id=version))
        events = [event async for event in admin.operation_events(version)]
        report = await update
        told = {
            phase: sum(e.event == "worker" and e.phase == phase and e.error is None for e in events) for phase in PHASES
        }
        return {
            "took, s": round(time.monotonic() - began, 2),
            "paused, s": round(report.pause_s, 2),
            "workers": len(report.workers),
            "left out": len(report.left_out),
            "events": len(events),
            "told": told,
        }

    async def update_under_load(self, admin: AdminClient, client: Client, version: str, *, left_out: int) -> None:
        """An update of all while requests run; what is asked for afterwards has the new version alone."""
        running = asyncio.create_task(self.ask(client, self.args.requests // 2))
        found = await self.update(admin, version)
        after = await self.ask(client, len(self.urls))
        await running
        want = len(self.urls) - left_out
        self.must(versions(after) == {version}, f"after {version} answers have {versions(after)}")
        self.must(found["workers"] == want, f"{version} is served by {found['workers']} of {want}")
        self.must(found["left out"] == left_out, f"{version} left {found['left out']} out")
        self.must(set(found["told"].values()) == {want}, f"{version} told of {found['told']} of {want} workers")
        self.figures[f"update {version}"] = found

    async def kill_under_load(self, admin: AdminClient, client: Client) -> None:
        """A quarter is killed in mid-load, an update passes, they start again."""
        running = asyncio.create_task(self.ask(client, self.args.requests))
        for one in self.killed:
            await asyncio.sleep(1.0)
            one.kill()
        answers = await running
        self.must(versions(answers) == {"v1"}, f"while workers died answers had {versions(answers)}")
        gone = sum(len(one.ports) for one in self.killed)
        self.figures["killed"] = gone
        await self.until_serving(admin, len(self.urls) - gone)
        await self.update_under_load(admin, client, "v2", left_out=gone)
        for one in self.killed:
            one.start()

    async def until_serving(self, admin: AdminClient, count: int) -> float:
        """Seconds until exactly so many workers serve."""
        began, serving = time.monotonic(), -1
        while time.monotonic() - began < START_S:
            with contextlib.suppress(RollplaneError):
                serving = sum(record.error is None for record in await admin.workers())
                if serving == count:
                    return round(time.monotonic() - began, 2)
            await asyncio.sleep(0.05)
        raise SystemExit(f"{serving} of {count} workers serve after {START_S:g} s; see {self.root}")


def versions(answers: list[GenerateResponse]) -> set[str]:
    """Every policy version in these answers."""
    return {str(version) for answer in answers for version, _ in answer.choices[0].policy_versions}


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def hosted(args: argparse.Namespace, root: Path) -> Iterator[list[Host]]:
    """Every process of workers, killed at the end."""
    ports = free_ports(args.workers)
    hosts = [Host(ports[at : at + args.per_process], root) for at in range(0, len(ports), args.per_process)]
    try:
        for one in hosts:
            one.start()
        yield hosts
    finally:
        for one in hosts:
            one.kill()


@contextlib.asynccontextmanager
async def frontend(urls: list[str], root: Path) -> AsyncIterator[tuple[str, int]]:
    """The frontend's address and process id."""
    words = [sys.executable, "-m", "rollplane.cli.main", "frontend", "--workers", ",".join(urls), "--port", "0"]
    words += ["--control-record", str(root / "control.json"), "--join-s", "0", "--log-level", "warning"]
    with (root / "frontend.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, stderr=log)
    try:
        if process.stdout is None:
            raise SystemExit("the frontend has no output")
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield json.loads(line)["url"], process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def measure(args: argparse.Namespace, root: Path) -> int:
    """The run and its report; the exit status."""
    with hosted(args, root) as hosts:
        async with frontend([url for one in hosts for url in one.urls], root) as (url, pid):
            run = Run(args, hosts, url, pid, root)
            await run.all()
    run.figures["load average"] = round(os.getloadavg()[0], 1)
    for name, value in run.figures.items():
        print(f"{name:42} {value}")
    for what in run.broken[:20]:
        print("broken:", what)
    print("broken promises" if run.broken else "every promise held", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(run.figures))
    return 1 if run.broken else 0


def main() -> None:
    """Read the arguments and run, or serve as one of the run's processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--per-process", type=int, default=8)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--requests", type=int, default=1536)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host is not None:
        asyncio.run(host([int(port) for port in args.host.split(",")], args.root))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processes end with this one
    with tempfile.TemporaryDirectory(prefix="many-workers-") as root:
        status = asyncio.run(measure(args, Path(root)))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
