"""Workers of a Dynamo deployment, as its frontend lists them: `GET /v1/rl/workers` on its RL port.

Ours are driven by their whole administration, with keys; the others by the routes that they advertise (see
`discovery.dynamo_worker`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from rollplane.discovery.dynamo_worker import Peer, RouteWorker
from rollplane.discovery.urls import check_urls
from rollplane.errors import InvalidRequest, TransportError
from rollplane.protocol.admin import WorkerRecord
from rollplane.rl.members import FleetWorker

POLL_S: Final = 2.0
LIST_S: Final = 35.0
"""The frontend waits 30 s for a worker that hangs."""
OURS: Final = "get_world_size"
"""A route that every worker of ours advertises, and none of Dynamo's own does."""

log = logging.getLogger("rollplane.discovery")

Ours = TypeVar("Ours", bound=FleetWorker)


class _Listed(msgspec.Struct, kw_only=True):
    """One entry of the listing; members that nobody here reads are left out."""

    namespace: str = ""
    component: str = ""
    endpoint: str = "rl"
    instance_id: int | str = ""
    transport: Any = None
    request_plane_url: str = ""
    system_url: str | None = None
    model: str = ""
    routes: list[str] = []
    world_size: int | None = None
    admin_base_url: str | None = None
    error: str | None = None


class _Listing(msgspec.Struct, kw_only=True):
    protocol_version: int
    workers: list[_Listed]


def read_listing(body: bytes) -> tuple[list[WorkerRecord], list[str]]:
    """The workers that can be driven, and why others cannot.

    Raises:
        TransportError: the body is no listing of protocol version 1.
    """
    try:
        listing = msgspec.json.decode(body, type=_Listing)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"/v1/rl/workers answers what cannot be read: {error}") from None
    if listing.protocol_version != 1:
        raise TransportError(f"/v1/rl/workers has protocol version {listing.protocol_version}, this side reads 1")
    records, left_out, seen = [], [], set()
    for entry in listing.workers:
        who = f"{entry.namespace}.{entry.component} {entry.instance_id}"
        if entry.error is not None:
            left_out.append(f"{who}: {entry.error}")
            continue
        try:
            (url,) = check_urls([entry.system_url], param="system_url")
        except InvalidRequest as error:
            left_out.append(f"{who}: {error.message}")
            continue
        if url in seen:
            left_out.append(f"{who}: {url} is another worker's")
            continue
        seen.add(url)
        records.append(
            WorkerRecord(
                namespace=entry.namespace,
                component=entry.component,
                endpoint=entry.endpoint,
                instance_id=str(entry.instance_id),
                transport=entry.transport,
                request_plane_url=entry.request_plane_url,
                system_url=url,
                model=entry.model,
                routes=entry.routes,
                world_size=entry.world_size,
                admin_base_url=entry.admin_base_url,
            )
        )
    return records, left_out


class DynamoDiscovery:
    """The workers in the listing at `url`, the base URL of a Dynamo frontend's RL port.

    Args:
        poll_s: pause between two looks.
    """

    def __init__(self, url: str, *, poll_s: float = POLL_S) -> None:
        (self.url,) = check_urls([url], param="frontend.dynamo_rl_url")
        self.trouble: str | None = None
        """Why the listing could not be read at the last look; None where it could."""
        self._session: aiohttp.ClientSession | None = None
        self._poll_s = poll_s
        self._records: dict[str, WorkerRecord] = {}
        self._ours: dict[str, FleetWorker] = {}
        self._left_out: list[str] = []

    def __repr__(self) -> str:
        return (
            f"<DynamoDiscovery {self.url}: {len(self._records)} workers{f', {self.trouble}' if self.trouble else ''}>"
        )

    async def watch(self) -> AsyncGenerator[list[str], None]:
        """See `Discovery.watch`. A listing that cannot be read changes nothing."""
        try:
            async for urls in self._watch():
                yield urls
        finally:
            if self._session is not None:
                await self._session.close()

    async def _watch(self) -> AsyncGenerator[list[str], None]:
        known: list[str] | None = None
        while True:
            try:
                records, left_out = read_listing(await self._fetch())
            except TransportError as error:
                if error.message != self.trouble:
                    log.warning("the worker list stays as it was: %s", error.message)
                self.trouble = error.message
            else:
                self.trouble = None
                if left_out != self._left_out:
                    log.warning("workers left out: %s", "; ".join(left_out) or "none")
                self._left_out = left_out
                self._records = {record.system_url: record for record in records}
                urls = sorted(self._records)
                if urls != known:
                    known = urls
                    yield list(urls)
            await asyncio.sleep(self._poll_s)

    def make_worker(self, url: str, *, ours: Callable[[str], Ours]) -> Ours | RouteWorker:
        """The member at an address of the listing: one that `ours` makes, or one that is driven by its routes."""
        record = self._records.get(url)
        if record is not None and OURS not in record.routes:
            return RouteWorker(
                url,
                record=lambda: self._records.get(url),
                peer=self._peer,
                session=self._connections(),
                poll_s=self._poll_s,
            )
        worker = ours(url)
        self._ours[url] = worker
        return worker

    def _peer(self) -> Peer | None:
        """A worker of ours that is listed and was reached."""
        for url, worker in self._ours.items():
            if url in self._records and worker.reachable and worker.state is not None:
                return worker
        return None

    def _connections(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession()
        return self._session

    async def _fetch(self) -> bytes:
        try:
            limit = aiohttp.ClientTimeout(total=LIST_S)
            async with self._connections().get(f"{self.url}/v1/rl/workers", timeout=limit) as answered:
                if answered.status != 200:
                    raise TransportError(f"{self.url}/v1/rl/workers answers {answered.status}")
                return await answered.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransportError(f"{self.url}/v1/rl/workers cannot be read: {error}") from error
