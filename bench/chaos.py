"""Faults of every kind under load, and whether anything that was promised breaks.

    python bench/chaos.py [--seconds 180] [--workers 6] [--processes 1] [--seed 0] [--network namespaces|none]

Mock workers and a frontend, each a process of its own; every worker in its own network namespace where the system allows that
(root, or a user namespace that maps to it). While clients ask without pause, a worker is killed (SIGKILL, then started
again), stopped (SIGSTOP, later SIGCONT) or cut off (its link swallows every packet), the frontend is killed now and
then, and the policy changes every few seconds. With several processes of the frontend, one of them is killed instead, the owner of the
fleet's policy too. Nobody helps.

Every request has an idempotency key and is asked for until it is answered. The mock's tokens follow from weights, prompt
and seed in closed form, so each answer is recomputed from the policy versions it claims. Checked:

lost        a request without an answer, or refused with an error that is not the server's momentary state
duplicated  a key asked for again gives another answer although the worker that made the first lived on untouched
mixed       tokens that the claimed versions, at the claimed boundaries, do not give
unknown     a version that was never published, or whose update was undone
stale       a version older than the newest that was confirmed before the request was sent
recovery    once the faults end, every worker is back at the fleet's version within 60 s, with nothing left running

Exits with 1 where one of them happened.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import stamina

from rollplane.client.admin import AdminClient
from rollplane.client.client import Client
from rollplane.engines.mock.controls import Controls
from rollplane.engines.mock.directories import read_weights
from rollplane.engines.mock.hashing import key_of
from rollplane.engines.mock.language import Language
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import PeerError, RollplaneError, ServiceError
from rollplane.protocol.response import GenerateResponse

COMMAND = [sys.executable, "-m", "rollplane.cli.main"]
KEY = "chaos"
WORKER_PORT = 8100
STEP_S = 0.01
SILENT_S = 5.0
ANSWER_S, RECOVERY_S = 120.0, 60.0
MODEL = MockSettings()
INITIAL = "v0"


# -- processes ----------------------------------------------------------------------------------------------------------


@dataclass
class Network:
    """Where the workers live: `namespaces` (a bridge of ours, one namespace each) or `none` (loopback, nothing is cut)."""

    kind: str
    started: int = 0

    def address(self, index: int) -> str:
        """A worker's address."""
        return f"10.77.0.{10 + index}" if self.kind == "namespaces" else "127.0.0.1"

    def port(self, index: int) -> int:
        """A worker's port."""
        return WORKER_PORT if self.kind == "namespaces" else WORKER_PORT + 10_000 + index

    def open(self) -> None:
        """Make the bridge; this process is in a namespace of its own already."""
        if self.kind == "namespaces":
            ip("link", "set", "lo", "up")
            ip("link", "add", "br0", "type", "bridge")
            ip("addr", "add", "10.77.0.1/24", "dev", "br0")
            ip("link", "set", "br0", "up")

    def wrapped(self, command: list[str]) -> list[str]:
        """The command, held back in its namespace until a line on its standard input says that the network is there."""
        if self.kind != "namespaces":
            return command
        return ["unshare", "--net", "sh", "-c", 'read _ && exec "$@"', "sh", *command]

    def join(self, index: int, pid: int) -> str:
        """Connect the namespace of a process; the name of the link on our side."""
        if self.kind != "namespaces":
            return ""
        self.started += 1
        link = f"w{index}x{self.started}"
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("link", "set", link, "master", "br0", "up")
        inside = ["nsenter", "-t", str(pid), "-n", "ip"]
        subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        subprocess.run([*inside, "link", "set", "eth0", "address", f"02:00:00:00:00:{10 + index:02x}"], check=True)
        subprocess.run([*inside, "addr", "add", f"{self.address(index)}/24", "dev", "eth0"], check=True)
        subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)
        return link


def ip(*words: str) -> None:
    """One call of `ip`."""
    subprocess.run(["ip", *words], check=True)


class Child:
    """A process that is started again after it was killed."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.command = command
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, without waiting for it to serve."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=output, stderr=output)

    def signal(self, number: int) -> None:
        """Send a signal, if it lives."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def children(self) -> list[int]:
        """The ids of its own processes that serve; those of Python's machinery are not told by what they run."""
        if self.process is None or self.process.poll() is not None:
            return []
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found if b"rollplane" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class WorkerChild(Child):
    """A mock worker in its namespace."""

    def __init__(self, index: int, network: Network, root: Path) -> None:
        self.index = index
        self.network = network
        self.url = f"http://{network.address(index)}:{network.port(index)}"
        self.link = ""
        self.faults: list[tuple[float, float]] = []
        """When it was (or is) in trouble, seconds: from, until."""
        super().__init__(
            f"worker-{index}",
            network.wrapped(
                [
                    *COMMAND,
                    "worker",
                    *("--engine", "mock", "--host", network.address(index), "--port", str(network.port(index))),
                    *("--name", f"worker-{index}", "--policy-version", INITIAL, "--log-level", "warning"),
                    *("--data-key-file", str(root / "key"), "--admin-key-file", str(root / "key")),
                    *("--root", str(root)),
                    *("--engine-option", f"step_s={STEP_S}", "--engine-option", f"weights={INITIAL}"),
                    *("--engine-option", "stage_s=0.05", "--engine-option", "apply_s=0.05"),
                    *("--engine-option", "max_num_seqs=32", "--engine-option", "prefill_tokens_per_s=50000"),
                ]
            ),
            root / f"worker-{index}.log",
        )

    def start(self) -> None:
        """See `Child.start`."""
        super().start()
        assert self.process is not None
        assert self.process.stdin is not None
        if self.network.kind == "namespaces":
            own = Path("/proc/self/ns/net").readlink()
            while Path(f"/proc/{self.process.pid}/ns/net").readlink() == own:
                time.sleep(0.002)
            self.link = self.network.join(self.index, self.process.pid)
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def cut(self) -> None:
        """Swallow every packet from and to it."""
        subprocess.run(["ip", "link", "set", self.link, "down"], check=False, capture_output=True)

    def mend(self) -> None:
        """Let packets through again."""
        subprocess.run(["ip", "link", "set", self.link, "up"], check=False, capture_output=True)

    def troubled(self, since: float) -> bool:
        """Whether it was in trouble at any time from `since` on."""
        return any(until >= since for _, until in self.faults)


# -- what is true -----------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """The versions there are: the digest of each, and in which order they were confirmed."""

    digests: dict[str, str] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    undone: set[str] = field(default_factory=set)
    language: Language = field(
        default_factory=lambda: Language(
            vocab_tokens=MODEL.vocab_tokens,
            max_positions=MODEL.max_model_len,
            eos_token_id=MODEL.eos_token_id,
            ending_rate=MODEL.ending_rate,
        )
    )

    def number(self, version: str) -> int:
        """Versions are made in order: v0, v1, ..."""
        return int(version[1:])

    def tokens(self, prompt: np.ndarray, spans: list[tuple[str, int]], *, count: int, seed: int) -> list[int]:
        """What the versions make of a prompt."""
        state = int(self.language.states(prompt)[-1])
        out: list[int] = []
        ends = [start for _, start in spans[1:]] + [count]
        for (version, start), end in zip(spans, ends, strict=True):
            if end <= start:
                continue
            drawn = self.language.draw(
                key_of(self.digests[version], None, None),
                state,
                position=int(prompt.size) + start,
                first=start,
                count=end - start,
                seed=key_of("seed", seed),
                by=Controls(),
            ).ids
            out += drawn.tolist()
            state = int(self.language.states(drawn, state=state)[-1])
        return out


@dataclass
class Asked:
    """One request: what was asked, what was known then, and its answer."""

    key: str
    prompt: np.ndarray
    max_tokens: int
    seed: int
    stream: bool
    sent_at: float
    newest: str
    answer: GenerateResponse | None = None
    answered_at: float = 0.0


class Chaos:
    """One run."""

    def __init__(self, args: argparse.Namespace, root: Path) -> None:
        self.args = args
        self.root = root
        self.random = random.Random(args.seed)
        self.network = Network(args.network)
        self.truth = Truth()
        (root / "key").write_text(KEY)
        self.workers = [WorkerChild(i, self.network, root) for i in range(args.workers)]
        self.port = 18_000
        self.url = f"http://127.0.0.1:{self.port}"
        self.frontend = Child(
            "frontend",
            [
                *COMMAND,
                "frontend",
                *("--port", str(self.port), "--workers", ",".join(worker.url for worker in self.workers)),
                *("--worker-key-file", str(root / "key"), "--control-record", str(root / "control.json")),
                *("--silent-s", str(SILENT_S), "--join-s", "0"),
                *("--max-attempts", "8", "--log-level", "warning"),
                *(("--processes", str(args.processes)) if args.processes > 1 else ()),
            ],
            root / "frontend.log",
        )
        self.counts: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()
        self.examples: list[str] = []
        self.latencies: list[float] = []
        self.updates_s: list[float] = []
        self.attempts: Counter[int] = Counter()
        self.ending = asyncio.Event()
        self.done: list[Asked] = []

    def checkpoint(self, version: str) -> str:
        """A mock checkpoint's directory."""
        path = self.root / version
        path.mkdir(exist_ok=True)
        (path / "mock_weights.json").write_text(json.dumps({"weights": version}))
        return str(path)

    def violate(self, kind: str, what: str) -> None:
        """Note a broken promise."""
        self.violations[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {what}")

    async def run(self) -> int:
        """All of it; the exit status."""
        self.network.open()
        try:
            for child in [*self.workers, self.frontend]:
                child.start()
            async with AdminClient(self.url) as admin:
                await self.until_whole(admin, within_s=60.0, first=True)
                number = 1
                while not self.truth.confirmed:  # the machine may be too busy at the start
                    await self.publish(admin, f"v{number}")
                    number += 1
                began = time.monotonic()
                loads = [asyncio.create_task(self.load(i)) for i in range(self.args.clients)]
                disturbing = asyncio.create_task(self.disturb())
                updating = asyncio.create_task(self.update(admin, number))
                await asyncio.wait({disturbing, updating, *loads}, timeout=self.args.seconds)
                self.ending.set()
                await asyncio.gather(disturbing, updating, *loads)
                loaded_s = time.monotonic() - began
                recovered_s = await self.until_whole(admin, within_s=RECOVERY_S)
            async with Client(self.url, timeout_s=30.0) as client:
                for index in range(4 * len(self.workers)):
                    self.check(await self.ask(client, self.request(f"last-{index}", np.random.default_rng(index))))
            self.report(loaded_s, recovered_s)
        finally:
            for child in [self.frontend, *self.workers]:
                child.signal(signal.SIGCONT)
                child.kill()
        return 1 if self.violations else 0

    # -- load ---------------------------------------------------------------------------------------------------------

    def request(self, key: str, rng: np.random.Generator) -> Asked:
        """A request of its own; every fourth prompt begins as many others do."""
        own = rng.integers(3, 30_000, int(rng.integers(8, 200))).astype(np.int32)
        shared = np.arange(100, 356, dtype=np.int32)
        return Asked(
            key=key,
            prompt=np.concatenate([shared, own]) if rng.integers(4) == 0 else own,
            max_tokens=int(rng.integers(8, 200)),
            seed=int(rng.integers(2**31)),
            stream=bool(rng.integers(5) == 0),
            sent_at=time.monotonic(),
            newest=self.truth.confirmed[-1],
        )

    async def load(self, number: int) -> None:
        """One client, until the end."""
        rng = np.random.default_rng([self.args.seed, number])
        async with Client(self.url, timeout_s=30.0, attempts=2) as client:
            for turn in range(10**9):
                if self.ending.is_set():
                    return
                asked = await self.ask(client, self.request(f"{number}-{turn}", rng))
                self.check(asked)
                if asked.answer is not None and rng.integers(4) == 0:
                    await self.ask_again(client, asked)

    async def ask(self, client: Client, asked: Asked) -> Asked:
        """Ask until there is an answer."""
        while time.monotonic() - asked.sent_at < ANSWER_S:
            try:
                asked.answer = await self.once(client, asked)
            except (ServiceError, PeerError) as error:
                self.counts[f"asked again after {type(error).__name__}"] += 1
                await asyncio.sleep(0.1)
                continue
            except RollplaneError as error:
                self.violate("lost", f"{asked.key} was refused: {error}")
                return asked
            asked.answered_at = time.monotonic()
            self.latencies.append(asked.answered_at - asked.sent_at)
            self.attempts[asked.answer.served_by.attempt] += 1
            self.counts["answers"] += 1
            return asked
        self.violate("lost", f"{asked.key} has no answer after {ANSWER_S:g} s")
        return asked

    async def once(self, client: Client, asked: Asked) -> GenerateResponse:
        """One asking."""
        sampling = {"max_tokens": asked.max_tokens, "seed": asked.seed, "ignore_eos": True, "logprobs": 0}
        options: dict[str, Any] = {"sampling_params": sampling, "idempotency_key": asked.key}
        if not asked.stream:
            return await client.generate(asked.prompt, **options)
        async with client.stream(asked.prompt, **options) as stream:
            async for _ in stream:
                pass
        return stream.response

    async def ask_again(self, client: Client, asked: Asked) -> None:
        """A key that was answered."""
        first = asked.answer
        assert first is not None
        try:
            again = await self.once(client, asked)
        except (ServiceError, PeerError):
            return
        except RollplaneError as error:
            self.violate("lost", f"{asked.key} asked again was refused: {error}")
            return
        self.counts["asked again after the answer"] += 1
        same = again.choices[0].token_ids.tolist() == first.choices[0].token_ids.tolist()
        if again.served_by.instance == first.served_by.instance and same:
            self.counts["kept answers given again"] += 1
            return
        maker = next(w for w in self.workers if w.name == first.served_by.worker)
        if not maker.troubled(asked.sent_at):
            self.violate(
                "duplicated", f"{asked.key}: {first.served_by} and {again.served_by} while {maker.name} was well"
            )
        else:
            self.counts["asked again, its worker in trouble: " + ("same tokens" if same else "made anew")] += 1

    def check(self, asked: Asked) -> None:
        """Hold an answer against the truth."""
        if asked.answer is None:
            return
        choice = asked.answer.choices[0]
        spans = [(str(version), int(start)) for version, start in choice.policy_versions if start is not None]
        if not spans or len(spans) != len(choice.policy_versions) or choice.token_ids.size != asked.max_tokens:
            self.violate("lost", f"{asked.key}: {choice.token_ids.size} of {asked.max_tokens} tokens, spans {spans}")
            return
        strange = [version for version, _ in spans if version not in self.truth.digests or version in self.truth.undone]
        if strange:
            self.violate("unknown", f"{asked.key}: {spans} by {asked.answer.served_by}")
            return
        if self.truth.number(spans[0][0]) < self.truth.number(asked.newest):
            self.violate("stale", f"{asked.key}: {spans}, {asked.newest} was confirmed; {asked.answer.served_by}")
        if len(spans) > 1:
            self.counts["answers over two versions or more"] += 1
        if choice.token_ids.tolist() != self.truth.tokens(asked.prompt, spans, count=asked.max_tokens, seed=asked.seed):
            self.violate("mixed", f"{asked.key}: not what {spans} give; {asked.answer.served_by}")

    # -- trouble ------------------------------------------------------------------------------------------------------

    async def disturb(self) -> None:
        """One fault after another, up to half of the workers at a time."""
        running: set[asyncio.Task[None]] = set()
        kinds = ["kill", "stop", "cut"] if self.network.kind == "namespaces" else ["kill", "stop"]
        turn = 0
        while not await self.passes(self.random.uniform(0.5, 2.5)):
            running = {task for task in running if not task.done()}
            well = [worker for worker in self.workers if not worker.troubled(time.monotonic())]
            if len(well) <= len(self.workers) // 2:
                continue
            turn += 1
            if turn % 12 == 0:
                running.add(asyncio.create_task(self.trouble_frontend()))
                continue
            worker = self.random.choice(well)
            running.add(asyncio.create_task(self.trouble(worker, self.random.choice(kinds))))
        await asyncio.gather(*running)

    async def trouble(self, worker: WorkerChild, kind: str) -> None:
        """One fault of one worker, and its end."""
        now = time.monotonic()
        lasts = self.random.uniform(0.3, 8.0)
        # What comes after is trouble too: the frontend has to notice, the worker to catch up.
        worker.faults.append((now, now + lasts + SILENT_S + 10.0))
        self.counts[f"fault: {kind}"] += 1
        acts: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "kill": (worker.kill, worker.start),
            "stop": (lambda: worker.signal(signal.SIGSTOP), lambda: worker.signal(signal.SIGCONT)),
            "cut": (worker.cut, worker.mend),
        }
        begin, end = acts[kind]
        begin()
        await asyncio.sleep(lasts)
        end()

    async def trouble_frontend(self) -> None:
        """End the frontend and start another, which finds the record of the one before; or end one of its processes, which
        its supervisor starts again.
        """
        if self.args.processes > 1:
            self.counts["fault: a process of the frontend killed"] += 1
            children = self.frontend.children()
            if children:
                os.kill(self.random.choice(children), signal.SIGKILL)
            return
        self.counts["fault: frontend killed"] += 1
        self.frontend.kill()
        await asyncio.sleep(0.2)
        self.frontend.start()

    async def update(self, admin: AdminClient, number: int) -> None:
        """A new policy every few seconds."""
        while not await self.passes(self.random.uniform(2.0, 4.0)):
            await self.publish(admin, f"v{number}")
            number += 1

    async def publish(self, admin: AdminClient, version: str) -> None:
        """One update; one that fails is not asked for again, the next version comes soon."""
        path = self.checkpoint(version)
        self.truth.digests[version] = read_weights(path).digest
        began = time.monotonic()
        try:
            await admin.update_policy(
                path,
                version=version,
                mode=self.random.choice(["keep", "wait"]),
                clear_cache=self.random.random() < 0.3,
                on_failure=self.random.choice(["rollback", "fence"]),
                operation_id=version,
                deadline_s=30.0,
            )
        except RollplaneError as error:
            outcome = (error.details or {}).get("outcome", "no answer")
            self.counts[f"updates: {outcome} ({type(error).__name__})"] += 1
            if outcome in ("rolled_back", "refused"):
                self.truth.undone.add(version)
            if self.args.verbose:
                print(f"{version}: {error}", flush=True)
        else:
            self.truth.confirmed.append(version)
            self.updates_s.append(time.monotonic() - began)
            self.counts["updates: confirmed"] += 1

    async def passes(self, seconds: float) -> bool:
        """Wait; whether the end came."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ending.wait(), seconds)
        return self.ending.is_set()

    async def until_whole(self, admin: AdminClient, *, within_s: float, first: bool = False) -> float:
        """Seconds until every worker serves the fleet's version and nothing is left running."""
        began = time.monotonic()
        said = "the frontend does not answer"
        while time.monotonic() - began < within_s:
            with contextlib.suppress(RollplaneError):
                records = await admin.workers()
                bad = [f"{record.system_url}: {record.error}" for record in records if record.error]
                versions = {record.policy_version for record in records}
                if not bad and len(records) == len(self.workers) and len(versions) == 1:
                    return time.monotonic() - began
                said = "; ".join(bad) or f"versions {versions}"
            await asyncio.sleep(0.1)
        if first:
            raise SystemExit(f"the fleet did not start: {said}; see {self.root}")
        self.violate("recovery", said)
        return within_s

    # -- the report ---------------------------------------------------------------------------------------------------

    def report(self, loaded_s: float, recovered_s: float) -> None:
        """Print it."""
        late = sorted(self.latencies)
        print(f"{len(self.workers)} mock workers, {self.args.clients} clients, {loaded_s:.0f} s, seed {self.args.seed}")
        print(
            "network: "
            + ("each worker in its own namespace" if self.network.kind == "namespaces" else "loopback, nothing is cut")
        )
        print(f"load average {os.getloadavg()[0]:.1f}")
        for name, count in sorted(self.counts.items()):
            print(f"  {name:58}{count:8}")
        print(f"  {'answers by the attempt that made them':58}  {dict(sorted(self.attempts.items()))}")
        if late:
            print(
                f"  answered after: median {statistics.median(late):.2f} s, p99 {late[int(len(late) * 0.99)]:.2f} s, "
                f"longest {late[-1]:.2f} s"
            )
        if self.updates_s:
            print(
                f"  an update took: median {statistics.median(self.updates_s):.2f} s, longest {max(self.updates_s):.2f} s"
            )
        print(f"  recovered {recovered_s:.1f} s after the last fault ended")
        for kind in ("lost", "duplicated", "mixed", "unknown", "stale", "recovery"):
            print(f"  {kind:58}{self.violations[kind]:8}")
        for example in self.examples:
            print("   ", example)
        print("broken promises" if self.violations else "every promise held", flush=True)


def can_unshare() -> bool:
    """Whether this process may make network namespaces, bridges and links."""
    probe = "ip link add br0 type bridge && ip link add w0x0 type veth peer name w0x1"
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))
    asked = ["unshare", "--net", "sh", "-c", probe]
    return tools and subprocess.run(asked, capture_output=True, check=False).returncode == 0


def main() -> None:
    """Read the arguments, enter a network of our own, run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--processes", type=int, default=1, help="of the frontend")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--network", choices=["auto", "namespaces", "none"], default="auto")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processes end with this one
    stamina.instrumentation.set_on_retry_hooks([])
    if args.network == "auto":
        args.network = "namespaces" if can_unshare() else "none"
    if args.network == "namespaces" and not args.inside:
        words = [*sys.argv, "--network", "namespaces", "--inside"]
        os.execvp("unshare", ["unshare", "--net", sys.executable, *words])
    with contextlib.ExitStack() as stack:
        root = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        root.mkdir(exist_ok=True)
        work: Awaitable[int] = Chaos(args, root.resolve()).run()
        status = asyncio.run(work)  # type: ignore[arg-type]
    raise SystemExit(status)


if __name__ == "__main__":
    main()
