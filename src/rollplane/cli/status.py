"""`rollplane status`: a fleet (or one worker) as a table in the terminal, live or once."""

import asyncio
import contextlib
import time
from collections import defaultdict
from typing import Any, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollplane.client.admin import QUERY_S
from rollplane.client.transport import Transport
from rollplane.config import read_keys
from rollplane.discovery.urls import check_urls
from rollplane.errors import InvalidRequest, RollplaneError
from rollplane.protocol.admin import WorkerRecord

LOADS: Final = ("load", "sequences", "cached_blocks", "pending_prompt_tokens")
COLOURS: Final[dict[str, str]] = {"ready": "green", "paused": "yellow", "pausing": "yellow", "updating": "yellow"}


class WorkerStatus(msgspec.Struct, kw_only=True):
    """One row. Loads are None where the server does not place (a worker itself) or follows no caches."""

    url: str
    state: str
    policy_version: str | None
    adapters: list[str]
    routable: bool | None = None
    circuit: str | None = None
    load: int | None = None
    sequences: int | None = None
    cached_blocks: int | None = None
    pending_prompt_tokens: int | None = None
    error: str | None = None


class FleetStatus(msgspec.Struct, kw_only=True):
    """A moment of a server. `error`: it could not be asked; the rest is what was seen last."""

    url: str
    state: str = "unknown"
    running: int = 0
    waiting: int = 0
    policy_versions: list[str] = msgspec.field(default_factory=list)
    workers: list[WorkerStatus] = msgspec.field(default_factory=list)
    error: str | None = None


class _Workers(msgspec.Struct):
    workers: list[WorkerRecord]


async def look(transport: Transport) -> FleetStatus:
    """The server's status now.

    Raises:
        RollplaneError: it does not answer.
    """
    answer = await transport.json("GET", "/v1/rl/workers", limit_s=QUERY_S, retry=False)
    records = msgspec.convert(answer, _Workers).workers
    loads: dict[str, dict[str, Any]] = defaultdict(dict)
    with contextlib.suppress(RollplaneError):
        async with transport.open("GET", "/metrics", limit_s=QUERY_S) as metrics:
            loads = read_loads((await metrics.read()).decode())
    workers = [row(record, loads.get(record.system_url.rstrip("/"), {})) for record in records]
    found = FleetStatus(url=transport.base_url, workers=workers)
    found.policy_versions = sorted({one.policy_version for one in workers if one.policy_version and not one.error})
    health = await health_of(transport)
    found.state, found.running, found.waiting = health["state"], health["running"], health["waiting"]
    return found


async def health_of(transport: Transport) -> dict[str, Any]:
    """The server's own word of its health, also where it is not well."""
    try:
        return dict(await transport.json("GET", "/ready", limit_s=QUERY_S, retry=False))
    except RollplaneError:
        return {"state": "not ready", "running": 0, "waiting": 0}


def read_loads(text: str) -> dict[str, dict[str, Any]]:
    """What a frontend's metrics say of each worker, by address."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix("rollplane_worker_")
        if name == family.name:
            continue
        for sample in family.samples:
            url = sample.labels.get("worker", "").rstrip("/")
            if name in LOADS:
                found[url][name] = int(sample.value)
            elif name == "routable":
                found[url][name] = bool(sample.value)
            elif name == "circuit" and sample.value:
                found[url][name] = sample.labels["state"]
    return found


def row(record: WorkerRecord, loads: dict[str, Any]) -> WorkerStatus:
    """One worker's row."""
    return WorkerStatus(
        url=record.system_url,
        state=record.state or "unknown",
        policy_version=record.policy_version,
        adapters=[f"{one.name}@{one.generation} {one.state} {one.leases}" for one in record.adapters],
        error=record.error,
        **loads,
    )


def table_of(status: FleetStatus) -> Group:
    """The status as it is shown."""
    versions = ", ".join(status.policy_versions) or "none"
    head = Text(f"{status.url}  {status.state}  policy {versions}  {status.running} running, {status.waiting} waiting")
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "state", "policy", "load", "placed", "blocks", "pending", "circuit", "adapters", "trouble"):
        table.add_column(name, justify="right" if name in ("load", "placed", "blocks", "pending") else "left")
    for one in status.workers:
        colour = "red" if one.error else COLOURS.get(one.state, "red")
        numbers = (one.load, one.sequences, one.cached_blocks, one.pending_prompt_tokens)
        table.add_row(
            one.url,
            Text(one.state, style=colour),
            one.policy_version or "-",
            *("-" if number is None else str(number) for number in numbers),
            one.circuit or "-",
            ", ".join(one.adapters) or "-",
            one.error or "",
        )
    trouble = [Text(status.error, style="red")] if status.error else []
    return Group(head, table, *trouble)


async def show(url: str, *, key: str | None, once: bool, as_json: bool, interval_s: float) -> None:
    """Print the status once, or, on a terminal, show it until interrupted.

    Raises:
        RollplaneError: the server does not answer (`once`); a live view says so and goes on.
    """
    console = Console()
    async with Transport(url, key=key, attempts=1, connect_timeout_s=5.0) as transport:
        if as_json:
            console.file.write(msgspec.json.encode(await look(transport)).decode() + "\n")
            return
        if once or not console.is_terminal:  # a pipe or a file shows nothing live
            console.print(table_of(await look(transport)))
            return
        status = FleetStatus(url=url)
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                began = time.monotonic()
                try:
                    status = await look(transport)
                except RollplaneError as error:
                    status.error = error.message
                live.update(table_of(status), refresh=True)
                await asyncio.sleep(max(interval_s - (time.monotonic() - began), 0.1))


def main(url: str, *, key_file: str | None, once: bool, as_json: bool, interval_s: float) -> None:
    """Show a fleet; see `show`.

    Raises:
        InvalidRequest: `url` is none, or the key file holds no key.
    """
    [url] = check_urls([url], param="URL")
    keys = [] if key_file is None else read_keys(key_file)
    if key_file is not None and not keys:
        raise InvalidRequest(f"no key in {key_file}", param="key_file")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(show(url, key=keys[0] if keys else None, once=once, as_json=as_json, interval_s=interval_s))
