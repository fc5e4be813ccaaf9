"""A worker that is not ours, driven by the routes that it advertises in a Dynamo deployment: a member of a fleet of ours.

It takes part in pauses, versions, updates and adapters. It takes no requests from us: those go through Dynamo's own frontend.
It has no keys, no staging and no digests, so what it serves is what it was told last, and its word for the version.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

import aiohttp
import msgspec

from rollplane.discovery.dynamo_routes import ROUTES, check_answer, route_of, version_body, version_in
from rollplane.engines.adapter_files import inspect_adapter
from rollplane.engines.checkpoint_files import weight_files
from rollplane.errors import Conflict, InvalidRequest, PreconditionFailed, RollplaneError, TransportError, Unavailable
from rollplane.protocol.admin import (
    AdapterRecord,
    AllowTensors,
    FlushReport,
    PauseMode,
    PauseReport,
    ResumeReport,
    StagedWeights,
    UpdateReport,
    WorkerRecord,
)
from rollplane.protocol.events import Event
from rollplane.protocol.info import Capabilities, EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest
from rollplane.protocol.state import WorkerState
from rollplane.rl.base import Operation

POLL_S: Final = 1.0
CALL_S: Final = 600.0
UNDECLARED: Final = "undeclared"
"""Version of a worker that was told none yet."""
MAX_RANK: Final = 1024


class Peer(Protocol):
    """A worker of ours in the same fleet, asked for what the others cannot say."""

    @property
    def state(self) -> WorkerState | None:
        """The last state heard."""
        ...

    async def stage_weights(self, path: str, *, operation: Operation) -> StagedWeights:
        """Read and check a checkpoint."""
        ...


class RouteEngine:
    """The engine of a worker that takes no requests from us."""

    def __init__(self, worker: "RouteWorker") -> None:
        self._worker = worker

    @property
    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return self._worker.info

    async def start(self) -> None:
        """Nothing is there to start."""

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Nothing is there to close."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Refuse; a router then takes another worker.

        Raises:
            PreconditionFailed: always.
        """
        nothing: tuple[Event, ...] = ()
        for event in nothing:
            yield event
        raise PreconditionFailed(f"worker {self._worker.url} takes requests through Dynamo's frontend only")

    async def abort(self, request_id: str) -> int:
        """No request of ours is there."""
        return 0

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        return self._worker.health


class RouteWorker:
    """One worker by its record; a `rl.members.FleetWorker`.

    Args:
        url: the record's `system_url`.
        record: the newest record of the worker, None once it is listed no more.
        peer: a worker of ours in the fleet, where there is one.
        session: connections shared between workers; the caller closes it.
    """

    def __init__(
        self,
        url: str,
        *,
        record: Callable[[], WorkerRecord | None],
        peer: Callable[[], Peer | None],
        session: aiohttp.ClientSession,
        poll_s: float = POLL_S,
    ) -> None:
        self._url = url.rstrip("/")
        self._record = record
        self._peer = peer
        self._session = session
        self._poll_s = poll_s
        self._engine = RouteEngine(self)
        self._version: str | None = None
        self._paused = False
        self._put: tuple[str, str] | None = None
        self._adapters: dict[str, AdapterRecord] = {}
        self._reachable = False
        self._trouble: str | None = None
        self._following: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        seen = "" if self._reachable else ", unreachable"
        return f"<RouteWorker {self._url} at {self._version!r}{seen}>"

    @property
    def url(self) -> str:
        """See `FleetWorker.url`."""
        return self._url

    @property
    def engine(self) -> RouteEngine:
        """See `FleetWorker.engine`."""
        return self._engine

    @property
    def info(self) -> EngineInfo:
        """The record's facts; what no record says is as the fleet's own workers have it."""
        record, peer = self._listed(), self._peer()
        like = peer.state.info if peer is not None and peer.state is not None else None
        base = like or EngineInfo(
            engine="dynamo", model="", max_model_len=2**31 - 1, vocab_bound=2**31 - 1, max_num_seqs=1,
            capabilities=Capabilities(logprobs_mode="unknown"),
        )  # fmt: skip
        return msgspec.structs.replace(base, model=record.model, world_size=record.world_size or 1)

    @property
    def health(self) -> EngineHealth:
        """As far as it is known."""
        return EngineHealth(alive=self._reachable, state="paused" if self._paused else "ready")

    @property
    def state(self) -> WorkerState | None:
        """See `FleetWorker.state`; None before it was reached."""
        if self._version is None:
            return None
        try:
            record = self._listed()
        except TransportError:
            return None
        put = self._put
        return WorkerState(
            worker=f"{record.component}-{record.instance_id}",
            instance=str(record.instance_id),
            info=self.info,
            health=self.health,
            policy_version=self._version,
            policy_digest=put[1] if put is not None and put[0] == self._version else None,
            paused=self._paused,
            adapters=list(self._adapters.values()),
            routes=list(record.routes),
        )

    @property
    def reachable(self) -> bool:
        """See `FleetWorker.reachable`."""
        return self._reachable

    @property
    def trouble(self) -> str | None:
        """See `FleetWorker.trouble`."""
        return None if self._reachable else self._trouble

    def follow(self, listener: Callable[[], None]) -> None:
        """See `FleetWorker.follow`; it is asked every `poll_s` seconds."""

        async def look() -> None:
            seen: object = None
            while True:
                try:
                    await self.refresh()
                except RollplaneError as error:
                    self._reachable, self._trouble = False, error.message
                now = (self._reachable, self._version, self._paused)
                if now != seen:
                    seen = now
                    listener()
                await asyncio.sleep(self._poll_s)

        self._following = asyncio.get_running_loop().create_task(look(), name=f"follow {self._url}")

    def drop_requests(self, reason: str) -> int:
        """None of ours are there."""
        return 0

    async def refresh(self) -> WorkerState:
        """See `FleetWorker.refresh`."""
        routes = self._listed().routes
        if any(name in routes for name in ROUTES["get_version"]):
            self._version = version_in(await self._call("get_version", {})) or UNDECLARED
        else:
            self._version = self._put[0] if self._put is not None else UNDECLARED
        if any(name in routes for name in ROUTES["is_paused"]):
            self._paused = (await self._call("is_paused", {})).get("is_paused") is True
        self._reachable = True
        state = self.state
        if state is None:
            raise TransportError(f"worker {self._url} is listed no more")
        return state

    async def claim_key(self, key: str, keeper: str, *, number: int, limit_s: float) -> tuple[str, int]:
        """It keeps no answers.

        Raises:
            Unavailable: always.
        """
        raise Unavailable(f"worker {self._url} keeps no idempotency keys")

    async def close(self) -> None:
        """Let go of it."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def stage_weights(
        self, path: str, *, allow_tensors: Sequence[AllowTensors] = (), operation: Operation
    ) -> StagedWeights:
        """Whether it could take the checkpoint; its digest is a peer's word, or without one that of the files' bytes here.

        Raises:
            InvalidRequest: it advertises no route for updates from a directory, or none to pause by; or `allow_tensors`, which
                Dynamo's routes do not know.
        """
        if allow_tensors:
            raise InvalidRequest("allow_tensors is not known to Dynamo's routes", param="allow_tensors")
        for call in ("update_from_disk", "pause", "resume"):
            self._route(call)
        peer = self._peer()
        if peer is not None:
            # Under a name of its own: the peer may be asked to apply under the operation's.
            name = None if operation.id is None else f"{operation.id}/digest"
            return await peer.stage_weights(path, operation=msgspec.structs.replace(operation, id=name))
        return await asyncio.to_thread(_staged, path)

    async def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, epoch: int | None = None
    ) -> PauseReport:
        """See `PolicyAdmin.pause`; Dynamo's route knows no epoch."""
        before = self._paused
        await self._call("pause", {"mode": mode, "clear_cache": clear_cache})
        self._paused = True
        return PauseReport(mode=mode, already_paused=before, cleared=True if clear_cache else None)

    async def resume(self, *, epoch: int | None = None) -> ResumeReport:
        """See `PolicyAdmin.resume`; Dynamo's route knows no epoch."""
        before = self._paused
        await self._call("resume", {})
        self._paused = False
        return ResumeReport(was_paused=before, policy_version=self._version or UNDECLARED)

    async def update_from_disk(
        self,
        path: str,
        *,
        version: str | None = None,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        expected_digest: str | None = None,
        allow_tensors: Sequence[AllowTensors] = (),
        operation: Operation | None = None,
    ) -> UpdateReport:
        """See `FleetWorker.update_from_disk`; paused for it where it is not. Its cache is dropped by its own route."""
        staged = await self.stage_weights(path, allow_tensors=allow_tensors, operation=operation or Operation())
        if expected_digest is not None and staged.digest != expected_digest:
            raise Conflict(f"{path} has the digest {staged.digest[:16]}..., expected {expected_digest[:16]}...")
        name = version if version is not None else Path(path).name
        previous, paused = self._version or UNDECLARED, self._paused
        if not paused:
            await self.pause(mode, clear_cache=clear_cache)
        self._put = None
        await self._call("update_from_disk", {"model_path": path, "weight_version": name})
        self._put = (name, staged.digest)
        if not paused:
            await self.resume()
        return UpdateReport(
            policy_version=name,
            previous_version=previous,
            digest=staged.digest,
            tensors=staged.tensors,
            bytes=staged.bytes,
        )

    async def set_policy_version(self, version: str, *, epoch: int | None = None) -> None:
        """See `PolicyAdmin.set_policy_version`; Dynamo's route knows no epoch."""
        route = self._route("set_version")
        await self._post(route, version_body(route, version))
        self._version = version
        if self._put is not None:
            self._put = (version, self._put[1])

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """See `PolicyAdmin.flush_cache`."""
        await self._call("flush", {})
        return FlushReport(reset=True)

    async def workers(self) -> list[WorkerRecord]:
        """The worker's record in the deployment."""
        return [msgspec.structs.replace(self._listed(), policy_version=self._version)]

    async def load_adapter(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.load_adapter`. An adapter of that name from other files is unloaded first: it has one generation."""
        self._route("load_adapter")
        before = self._adapters.get(name)
        if before is not None and before.path == path:
            return before
        files = await asyncio.to_thread(inspect_adapter, path, max_rank=MAX_RANK)
        if before is not None:
            await self.unload_adapter(name)
        await self._call("load_adapter", {"lora_name": name, "source": {"uri": f"file://{quote(path)}"}})
        record = AdapterRecord(
            name=name,
            generation=1 if before is None else before.generation + 1,
            engine_name=name,
            path=path,
            digest=files.digest,
            rank=files.rank,
            state="ready",
        )
        self._adapters[name] = record
        return record

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.unload_adapter`."""
        await self._call("unload_adapter", {"lora_name": name})
        record = self._adapters.pop(name, None) or AdapterRecord(
            name=name, generation=1, engine_name=name, path="", digest="", rank=0, state="gone"
        )
        return msgspec.structs.replace(record, state="gone")

    async def adapters(self) -> list[AdapterRecord]:
        """Those that were loaded from here."""
        return list(self._adapters.values())

    async def policy_version(self) -> str:
        """See `PolicyAdmin.policy_version`."""
        return (await self.refresh()).policy_version

    # -----------------------------------------------------------------------------------------------------------------

    def _listed(self) -> WorkerRecord:
        record = self._record()
        if record is None:
            raise TransportError(f"worker {self._url} is not listed by its deployment")
        return record

    def _route(self, call: str) -> str:
        return route_of(call, self._listed().routes, worker=self._url)

    async def _call(self, call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._post(self._route(call), body)

    async def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            limit = aiohttp.ClientTimeout(total=CALL_S)
            async with self._session.post(f"{self._url}/engine/{route}", json=dict(body), timeout=limit) as answered:
                data, status = await answered.read(), answered.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._reachable = False
            raise TransportError(f"worker {self._url} cannot be asked for {route}: {error}") from error
        try:
            answer = msgspec.json.decode(data)
        except msgspec.DecodeError:
            answer = None
        return check_answer(status, answer, worker=self._url, route=route)


def _staged(path: str) -> StagedWeights:
    files, _ = weight_files(Path(path))
    digest, size = hashlib.sha256(), 0
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
        size += file.stat().st_size
    return StagedWeights(path=path, digest=digest.hexdigest(), tensors=0, bytes=size)
