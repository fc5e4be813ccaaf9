"""A worker as its fleet sees it: an engine, an administration, and the state it last told."""

from collections.abc import Callable, Sequence

import aiohttp

from rollplane.client.admin import AdminClient
from rollplane.engines.remote import SILENT_S, RemoteEngine
from rollplane.errors import Conflict, TransportError
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
from rollplane.protocol.broadcast import GroupReport, Manifest, TransferGroup
from rollplane.protocol.hop import KEYS_PATH
from rollplane.protocol.state import WorkerState
from rollplane.rl.base import OnFailure, Operation


class RemoteWorker:
    """One worker at `base_url`: `engine` makes tokens, and this is its `PolicyAdmin`.

    Args:
        base_url: the worker's HTTP address.
        key: bearer token for both planes.
        frontend: our name in the worker's logs.
        poll_s: pause between looks at the state of a worker without a state stream.
        silent_s: see `RemoteEngine`; calls of its administration are given up with it too.
        session: connections shared between workers; the caller closes it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None = None,
        frontend: str = "",
        poll_s: float = 1.0,
        silent_s: float = SILENT_S,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self.url = base_url.rstrip("/")
        self.engine = RemoteEngine(
            self.url, key=key, frontend=frontend, poll_s=poll_s, silent_s=silent_s, session=session
        )
        self._admin = AdminClient(self.url, admin_key=key)

    def __repr__(self) -> str:
        return f"<RemoteWorker over {self.engine!r}>"

    @property
    def state(self) -> WorkerState | None:
        """The last state heard; None before the worker was reached."""
        return self.engine.state

    @property
    def reachable(self) -> bool:
        """Whether the last look at the worker succeeded."""
        return self.engine.reachable

    @property
    def trouble(self) -> str | None:
        """Why the last look at the worker failed; None where it succeeded."""
        return self.engine.trouble

    def follow(self, listener: Callable[[], None]) -> None:
        """Follow the worker's state; `listener` is called after every change, also of reachability."""
        self.engine.on_change(lambda _: listener())
        self.engine.follow()

    def drop_requests(self, reason: str) -> int:
        """Break off every request in flight; how many there were."""
        return self.engine.drop_requests(reason)

    async def close(self) -> None:
        """Drop the connections; the worker itself goes on."""
        await self.engine.close()
        await self._admin.close()

    async def refresh(self) -> WorkerState:
        """Ask for the state now.

        Raises:
            RollplaneError: the worker cannot be asked.
        """
        return await self.engine.refresh()

    async def claim_key(self, key: str, keeper: str, *, number: int, limit_s: float) -> tuple[str, int]:
        """The keeper of an idempotency key by the worker's book, and its number; see `engines.wrappers.key_book`.

        Raises:
            RollplaneError: no answer within `limit_s`.
        """
        body = {"key": key, "keeper": keeper, "number": number}
        answer = await self.engine.post_json(KEYS_PATH, body, timeout_s=limit_s)
        found, place = answer.get("keeper"), answer.get("number")
        if not isinstance(found, str) or not isinstance(place, int):
            raise TransportError(f"worker {self.url} does not say who keeps a key")
        return found, place

    async def stage_weights(
        self, path: str, *, allow_tensors: Sequence[AllowTensors] = (), operation: Operation
    ) -> StagedWeights:
        """Read and check a checkpoint while tokens are made."""
        return await self.engine.while_heard(
            self._admin.stage_weights(
                path,
                allow_tensors=allow_tensors,
                operation_id=operation.id,
                epoch=operation.epoch,
                deadline_s=operation.deadline_s,
            )
        )

    async def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, epoch: int | None = None
    ) -> PauseReport:
        """See `PolicyAdmin.pause`."""
        return await self.engine.while_heard(self._admin.pause(mode, clear_cache=clear_cache, epoch=epoch))

    async def resume(self, *, epoch: int | None = None) -> ResumeReport:
        """See `PolicyAdmin.resume`."""
        return await self.engine.while_heard(self._admin.resume(epoch=epoch))

    async def update_from_disk(
        self,
        path: str,
        *,
        version: str | None = None,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        on_failure: OnFailure = "rollback",
        expected_digest: str | None = None,
        allow_tensors: Sequence[AllowTensors] = (),
        operation: Operation | None = None,
    ) -> UpdateReport:
        """See `PolicyAdmin.update_from_disk`."""
        operation = operation or Operation()
        return await self.engine.while_heard(
            self._admin.update_policy(
                path,
                version=version,
                mode=mode,
                clear_cache=clear_cache,
                on_failure=on_failure,
                operation_id=operation.id,
                step=operation.step,
                expected_digest=expected_digest,
                allow_tensors=allow_tensors,
                epoch=operation.epoch,
                deadline_s=operation.deadline_s,
            )
        )

    async def init_weights_group(self, group: TransferGroup, *, operation: Operation | None = None) -> GroupReport:
        """See `BroadcastAdmin.init_weights_group`."""
        named = operation or Operation()
        return await self.engine.while_heard(
            self._admin.init_weights_group(group, operation_id=named.id, epoch=named.epoch, deadline_s=named.deadline_s)
        )

    async def stage_broadcast(self, manifest: Manifest, *, operation: Operation | None = None) -> StagedWeights:
        """Receive what rank 0 broadcasts and keep it beside the model."""
        named = operation or Operation()
        return await self.engine.while_heard(
            self._admin.stage_broadcast(manifest, operation_id=named.id, epoch=named.epoch, deadline_s=named.deadline_s)
        )

    async def apply_staged(
        self,
        digest: str,
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        operation: Operation | None = None,
    ) -> UpdateReport:
        """Put staged weights in place."""
        named = operation or Operation()
        return await self.engine.while_heard(
            self._admin.apply_staged(
                digest,
                version=version,
                mode=mode,
                clear_cache=clear_cache,
                operation_id=named.id,
                epoch=named.epoch,
                deadline_s=named.deadline_s,
            )
        )

    async def destroy_weights_group(self, *, operation: Operation | None = None) -> GroupReport:
        """See `BroadcastAdmin.destroy_weights_group`."""
        named = operation or Operation()
        return await self.engine.while_heard(
            self._admin.destroy_weights_group(operation_id=named.id, epoch=named.epoch, deadline_s=named.deadline_s)
        )

    async def policy_version(self) -> str:
        """See `PolicyAdmin.policy_version`."""
        return await self.engine.while_heard(self._admin.policy_version())

    async def set_policy_version(self, version: str, *, epoch: int | None = None) -> None:
        """See `PolicyAdmin.set_policy_version`."""
        await self.engine.while_heard(self._admin.set_policy_version(version, epoch=epoch))

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        """See `PolicyAdmin.flush_cache`."""
        try:
            return await self.engine.while_heard(self._admin.flush_cache(preempt=preempt))
        except Conflict as error:  # the route answers 409 where nothing was reset
            if error.details is None or error.details.get("reset") is not False:
                raise
            return FlushReport(reset=False, reason=error.message)

    async def workers(self) -> list[WorkerRecord]:
        """The worker's own record."""
        return await self.engine.while_heard(self._admin.workers())

    async def load_adapter(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.load_adapter`."""
        operation = operation or Operation()
        return await self.engine.while_heard(
            self._admin.load_adapter(
                name,
                path,
                operation_id=operation.id,
                step=operation.step,
                epoch=operation.epoch,
                deadline_s=operation.deadline_s,
            )
        )

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        """See `PolicyAdmin.unload_adapter`."""
        operation = operation or Operation()
        return await self.engine.while_heard(
            self._admin.unload_adapter(
                name,
                operation_id=operation.id,
                step=operation.step,
                epoch=operation.epoch,
                deadline_s=operation.deadline_s,
            )
        )

    async def adapters(self) -> list[AdapterRecord]:
        """See `PolicyAdmin.adapters`."""
        return await self.engine.while_heard(self._admin.adapters())
