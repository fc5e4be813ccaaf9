"""The administration client of a trainer: the same calls to a worker (which act on it) or a frontend (on its fleet)."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote

import msgspec

from rollplane.client.operation_events import EventLines
from rollplane.client.transport import FIRST_PAUSE_S, Connected, Transport
from rollplane.errors import NotFound, RollplaneError, ServiceError, TransportError
from rollplane.protocol.admin import (
    LONGEST_EVENT_WAIT_S,
    AdapterRecord,
    AllowTensors,
    FlushReport,
    OperationEvent,
    PauseMode,
    PauseReport,
    ResumeReport,
    SleepReport,
    StagedWeights,
    TransferReport,
    UpdateReport,
    WorkerRecord,
)
from rollplane.protocol.broadcast import GroupReport, Manifest, TransferGroup

OPERATION_S: Final = 600.0
"""Limit of a call that changes something, and has none of its own."""
QUERY_S: Final = 30.0

T = TypeVar("T")


class AdminClient(Connected):
    """Administration of one worker or one fleet.

    Every call may be asked for again: a lost connection, 429 or 503 is followed by the same call with the same operation
    id, and the server does the work once. Leaving an `operation_id` out makes one up per call. What an engine refused
    or failed at is not asked for again by itself.

    Args:
        base_url: the server's address, with or without a trailing `/v1`.
        admin_key: sent as a bearer token.
        attempts: how often a call is tried in all.
        connect_timeout_s: longest wait for a connection.

    Use it as an async context manager, in one event loop.
    """

    def __init__(
        self,
        base_url: str,
        *,
        admin_key: str | None = None,
        attempts: int = 4,
        connect_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(
            Transport(
                base_url, key=admin_key, attempts=attempts, connect_timeout_s=connect_timeout_s, mendable=_mendable
            )
        )

    async def pause(
        self,
        mode: PauseMode = "keep",
        *,
        clear_cache: bool = False,
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> PauseReport:
        """Stop making tokens; returns when idle. keep: running requests freeze; wait: they finish; abort: they end."""
        body = {"mode": mode, "clear_cache": clear_cache, "epoch": epoch}
        return await self._call("pause_generation", body, PauseReport, limit_s=deadline_s)

    async def resume(self, *, epoch: int | None = None, deadline_s: float = OPERATION_S) -> ResumeReport:
        """Make tokens again.

        Raises:
            Unavailable: the weights in place are of unknown version.
        """
        return await self._call("resume_generation", {"epoch": epoch}, ResumeReport, limit_s=deadline_s)

    async def update_policy(
        self,
        path: str,
        *,
        version: str | None = None,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        on_failure: Literal["rollback", "fence"] = "rollback",
        operation_id: str | None = None,
        step: int = 0,
        expected_digest: str | None = None,
        allow_tensors: Sequence[AllowTensors] = (),
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> UpdateReport:
        """Replace the weights by a checkpoint directory (safetensors) that the server can read.

        Args:
            path: the directory, as the server sees it.
            version: the policy's name from now on; None: the directory's name.
            mode: what happens to running requests while the weights are put in place, see `pause`.
            on_failure: of a fleet, when one worker fails: all go back, or it is fenced and the rest go on.
            operation_id: the same id again waits for the first asking, or gives its answer.
            expected_digest: refuse other contents.
            allow_tensors: `missing`: tensors that the checkpoint lacks keep what the model has (not on vLLM); `unexpected`:
                those that the model has no place for are left unread. The answer's `ignored` says which there were.

        Raises:
            NotFound, InvalidRequest: no such checkpoint, or one that does not fit; nothing changed.
            Conflict: the operation id was used with other arguments, or the contents are not as expected.
            EngineFailed: a worker failed; `details` say what each one has now.
        """
        body = {
            "model_path": path,
            "weight_version": version,
            "mode": mode,
            "clear_cache": clear_cache,
            "on_failure": on_failure,
            "expected_digest": expected_digest,
            "allow_tensors": list(allow_tensors),
            **_named(operation_id, step=step, epoch=epoch, deadline_s=deadline_s),
        }
        return await self._call("update_weights_from_disk", body, UpdateReport, limit_s=deadline_s)

    async def stage_weights(
        self,
        path: str,
        *,
        allow_tensors: Sequence[AllowTensors] = (),
        operation_id: str | None = None,
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> StagedWeights:
        """Read and check a checkpoint on a worker while it makes tokens; an update with its digest then uses it."""
        body = {
            "model_path": path,
            "allow_tensors": list(allow_tensors),
            **_named(operation_id, step=0, epoch=epoch, deadline_s=deadline_s),
        }
        return await self._call("stage_weights", body, StagedWeights, limit_s=deadline_s)

    async def apply_staged(
        self,
        digest: str,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        operation_id: str | None = None,
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> UpdateReport:
        """Put weights in place on a worker that it staged before, by their digest."""
        body = {
            "digest": digest,
            "weight_version": version,
            "mode": mode,
            "clear_cache": clear_cache,
            **_named(operation_id, step=0, epoch=epoch, deadline_s=deadline_s),
        }
        return await self._call("apply_staged_weights", body, UpdateReport, limit_s=deadline_s)

    async def init_weights_group(
        self,
        group: TransferGroup,
        *,
        operation_id: str | None = None,
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> GroupReport:
        """Let the receivers join a weight group; answers when all of its ranks are there. See `client.weights`."""
        body = {
            **msgspec.to_builtins(group),
            **_named(operation_id, step=0, epoch=epoch, deadline_s=deadline_s),
        }
        return await self._call("init_weights_update_group", body, GroupReport, limit_s=deadline_s)

    async def stage_broadcast(
        self,
        manifest: Manifest,
        *,
        operation_id: str | None = None,
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> StagedWeights:
        """Let a worker receive what rank 0 now broadcasts, and keep it beside its model."""
        body = {
            **msgspec.to_builtins(manifest),
            **_named(operation_id, step=0, epoch=epoch, deadline_s=deadline_s),
        }
        return await self._call("stage_weights_from_distributed", body, StagedWeights, limit_s=deadline_s)

    async def update_from_broadcast(
        self,
        manifest: Manifest,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        expected_digest: str | None = None,
        operation_id: str | None = None,
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> UpdateReport:
        """Let a worker receive what rank 0 now broadcasts, and serve it under this version."""
        body = {
            **msgspec.to_builtins(manifest),
            "weight_version": version,
            "mode": mode,
            "clear_cache": clear_cache,
            "expected_digest": expected_digest,
            **_named(operation_id, step=0, epoch=epoch, deadline_s=deadline_s),
        }
        return await self._call("update_weights_from_distributed", body, UpdateReport, limit_s=deadline_s)

    async def destroy_weights_group(
        self, *, operation_id: str | None = None, epoch: int | None = None, deadline_s: float = QUERY_S
    ) -> GroupReport:
        """Let the receivers leave their weight group; without one nothing happens."""
        body = _named(operation_id, step=0, epoch=epoch, deadline_s=deadline_s)
        return await self._call("destroy_weights_update_group", body, GroupReport, limit_s=deadline_s)

    async def init_weight_transfer(
        self, info: Mapping[str, Any], *, operation_id: str | None = None, deadline_s: float = OPERATION_S
    ) -> TransferReport:
        """Let a worker join a trainer's group with its engine's own transfer backend; `info` is that backend's object."""
        body = {"init_info": info, **_named(operation_id, step=0, epoch=None, deadline_s=deadline_s)}
        return await self._call("init_weight_transfer_engine", body, TransferReport, limit_s=deadline_s)

    async def start_weight_update(
        self, *, operation_id: str | None = None, step: int = 0, deadline_s: float = OPERATION_S
    ) -> TransferReport:
        """Pause and open an update by the engine's own transfer; past `deadline_s` without a finish it is given up."""
        body = _named(operation_id, step=step, epoch=None, deadline_s=deadline_s)
        return await self._call("start_weight_update", body, TransferReport, limit_s=deadline_s)

    async def update_weights(
        self,
        info: Mapping[str, Any],
        *,
        operation_id: str | None = None,
        step: int = 0,
        deadline_s: float = OPERATION_S,
    ) -> TransferReport:
        """Let a worker receive a part of the weights; each part of one `operation_id` has a `step` of its own."""
        body = {"update_info": info, **_named(operation_id, step=step, epoch=None, deadline_s=deadline_s)}
        return await self._call("update_weights", body, TransferReport, limit_s=deadline_s)

    async def finish_weight_update(
        self,
        version: str | None = None,
        *,
        operation_id: str | None = None,
        step: int = 0,
        deadline_s: float = OPERATION_S,
    ) -> TransferReport:
        """Close the update; the worker goes on, unless it was paused before. Without a version a name is made up."""
        body = {"weight_version": version, **_named(operation_id, step=step, epoch=None, deadline_s=deadline_s)}
        return await self._call("finish_weight_update", body, TransferReport, limit_s=deadline_s)

    async def sleep(self, *, mode: Literal["abort", "wait"] = "abort", deadline_s: float = OPERATION_S) -> SleepReport:
        """Let a worker give its device memory back; it refuses requests until it is awake."""
        body = {"mode": mode, **_named(None, step=0, epoch=None, deadline_s=deadline_s)}
        return await self._call("sleep", body, SleepReport, limit_s=deadline_s)

    async def wake_up(self, tags: Sequence[str] | None = None, *, deadline_s: float = OPERATION_S) -> SleepReport:
        """Let a worker take memory back: all of it, or what `tags` name (`weights`, `kv_cache`)."""
        named = _named(None, step=0, epoch=None, deadline_s=deadline_s)
        body = {"tags": None if tags is None else list(tags), **named}
        return await self._call("wake_up", body, SleepReport, limit_s=deadline_s)

    async def world_size(self) -> int:
        """How many ranks receive weights behind this address; the trainer is one more."""
        size = (await self._post("get_world_size", {}, limit_s=QUERY_S)).get("world_size")
        if not isinstance(size, int):
            raise TransportError("get_world_size answered no world_size")
        return size

    async def policy_version(self) -> str:
        """The version that makes tokens now.

        Raises:
            Conflict: workers disagree (fleet).
        """
        answer = await self._post("get_weight_version", {}, limit_s=QUERY_S)
        version = answer.get("weight_version")
        if not isinstance(version, str):
            raise TransportError(f"get_weight_version answered no weight_version but {sorted(answer)}")
        return version

    async def set_policy_version(self, version: str, *, epoch: int | None = None) -> None:
        """Change the label only; aborts nothing."""
        await self._post("set_weight_version", {"weight_version": version, "epoch": epoch}, limit_s=QUERY_S)

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """Drop caches that no running request holds; the report says whether it happened."""
        return await self._call("flush_cache", {"preempt": preempt}, FlushReport, limit_s=OPERATION_S)

    async def abort(self, request_id: str) -> int:
        """End a request, which answers with what it has; how many live ones had the id."""
        count = (await self._post("abort_request", {"request_id": request_id}, limit_s=QUERY_S)).get("aborted", 0)
        return count if isinstance(count, int) else 0

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        operation_id: str | None = None,
        step: int = 0,
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> AdapterRecord:
        """Load files as the next generation of an adapter and make it current; the record of that generation."""
        named = _named(operation_id, step=step, epoch=epoch, deadline_s=deadline_s)
        body = {"lora_name": name, "source": {"uri": path}, **named}
        return await self._call("load_lora", body, AdapterRecord, limit_s=deadline_s, inside="adapter")

    async def unload_adapter(
        self,
        name: str,
        *,
        operation_id: str | None = None,
        step: int = 0,
        epoch: int | None = None,
        deadline_s: float = OPERATION_S,
    ) -> AdapterRecord:
        """Refuse new requests for the name at once; returns when its last request has ended."""
        body = {"lora_name": name, **_named(operation_id, step=step, epoch=epoch, deadline_s=deadline_s)}
        return await self._call("unload_lora", body, AdapterRecord, limit_s=deadline_s, inside="adapter")

    async def adapters(self) -> list[AdapterRecord]:
        """Every generation that is loading, ready or draining."""
        answer = await self._post("list_loras", {}, limit_s=QUERY_S)
        return _read(answer.get("adapters"), list[AdapterRecord], what="list_loras")

    async def workers(self) -> list[WorkerRecord]:
        """The workers behind this address, one for a worker itself."""
        answer = await self._transport.json("GET", "/v1/rl/workers", limit_s=QUERY_S)
        found = answer.get("workers") if isinstance(answer, dict) else None
        return _read(found, list[WorkerRecord], what="/v1/rl/workers")

    async def operation(self, operation_id: str) -> dict[str, str]:
        """What became of an operation: by step `running`, `done` or the sentence of its error.

        Raises:
            NotFound: nothing is known of it.
        """
        answer = await self._transport.json("GET", f"/v1/rl/operations/{quote(operation_id, safe='')}", limit_s=QUERY_S)
        found = answer.get("steps") if isinstance(answer, dict) else None
        return _read(found, dict[str, str], what="/v1/rl/operations")

    async def operation_events(
        self, operation_id: str, *, after: int = 0, wait_s: float = 10.0, limit_s: float = OPERATION_S
    ) -> AsyncGenerator[OperationEvent, None]:
        """What happens in an operation, event by event: those of before at once, further ones as they come, until nothing of
        it runs. A connection that is lost is made again, and no event is given twice.

        Args:
            after: events up to this number are left out.
            wait_s: how long the operation may take to begin.
            limit_s: longest time for all of it.

        Raises:
            NotFound: it did not begin in time.
            DeadlineExceeded: it still runs after `limit_s`.
        """
        now = time.monotonic()
        ends, begins = now + limit_s, now + wait_s
        fruitless = 0
        while True:
            left = max(ends - time.monotonic(), 0.001)
            wait = min(max(begins - time.monotonic(), 0.0), LONGEST_EVENT_WAIT_S)
            path = f"/v1/rl/operations/{quote(operation_id, safe='')}/events?after={after}&wait_s={wait:.3f}"
            lines = EventLines()
            try:
                async with self._transport.open("GET", path, limit_s=left) as answer:
                    async for data in answer.content.iter_any():
                        for event in lines.feed(data):
                            after, fruitless = event.number, 0
                            yield event
                        if lines.done:
                            return
                raise TransportError(
                    f"{self._transport.base_url}{path} ended in the middle of operation {operation_id!r}"
                )
            except NotFound:
                if time.monotonic() >= begins:
                    raise
            except (ServiceError, TransportError) as error:
                fruitless += 1
                if not error.retryable or fruitless >= self._transport.attempts:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S * 2**fruitless)

    async def _call(
        self, route: str, body: Mapping[str, Any], kind: type[T], *, limit_s: float, inside: str | None = None
    ) -> T:
        answer = await self._post(route, body, limit_s=limit_s)
        if inside is not None and isinstance(answer.get(inside), dict):
            answer = answer[inside]
        return _read(answer, kind, what=route)

    async def _post(self, route: str, body: Mapping[str, Any], *, limit_s: float) -> dict[str, Any]:
        given = {name: value for name, value in body.items() if value is not None}
        answer = await self._transport.json("POST", f"/engine/{route}", given, limit_s=limit_s)
        if not isinstance(answer, dict):
            raise TransportError(f"{self._transport.base_url}/engine/{route} answered something else than an object")
        return answer


def _mendable(error: RollplaneError) -> bool:
    return isinstance(error, ServiceError | TransportError) and error.retryable


def _named(operation_id: str | None, *, step: int, epoch: int | None, deadline_s: float) -> dict[str, Any]:
    return {"operation_id": operation_id or uuid.uuid4().hex, "step": step, "epoch": epoch, "deadline_s": deadline_s}


def _read(tree: Any, kind: type[T], *, what: str) -> T:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise TransportError(f"the answer of {what} cannot be read: {error}") from None
