"""The trainer's side of a weight broadcast: rank 0 of a group whose other ranks are the workers' receivers.

    async with WeightSender(["http://10.0.0.7:8100", "http://10.0.0.8:8100"], admin_key=key) as sender:
        await sender.send(dict(model.named_parameters()), version="step_12")

All workers receive while they make tokens; only when each has all of it, bit for bit, do they pause, change and resume.
A worker that fails before that leaves every worker at the old version. Needs torch; nothing is pickled.
"""

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rollplane.client.admin import AdminClient
from rollplane.client.transport import Closing
from rollplane.errors import Conflict, EngineFailed, InvalidRequest, RollplaneError
from rollplane.protocol.admin import PauseMode, PauseReport, StagedWeights, UpdateReport
from rollplane.protocol.broadcast import (
    DEFAULT_BUCKET_BYTES,
    DTYPE_BYTES,
    Backend,
    Manifest,
    TensorSpec,
    TransferGroup,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rollplane.engines.collective import Collective

T = TypeVar("T")
R = TypeVar("R")

DEADLINE_S: Final = 300.0


class WeightSender(Closing):
    """Sends weights from this process to workers, all of them or none.

    Args:
        workers: the workers' own addresses (each one's `admin_base_url`), or a frontend's alone.
        admin_key: sent as a bearer token.
        host: this machine's address as the workers reach it.
        port: of the group's store; 0 takes a free one.
        backend: gloo sends from the processor, nccl from the current GPU.
        bucket_bytes: most bytes of one broadcast; the memory this costs on both sides beside the weights.
        deadline_s: for each step: joining, sending, changing.

    Use it as an async context manager, in one event loop. After a failure the group is gone; the next `send` makes a new one.
    """

    def __init__(
        self,
        workers: Sequence[str],
        *,
        admin_key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        backend: Backend = "gloo",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        if not workers:
            raise InvalidRequest("workers must name at least one worker", param="workers")
        self.deadline_s = deadline_s
        self._clients = {url: AdminClient(url, admin_key=admin_key) for url in workers}
        self._host, self._port, self._backend, self._bucket_bytes = host, port, backend, bucket_bytes
        self._group: Collective | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stop = threading.Event()

    def __repr__(self) -> str:
        return f"<WeightSender to {len(self._clients)} workers, {self._group or 'no group'}>"

    async def open(self) -> None:
        """Make the group: rank 0 here, each worker's receivers at contiguous ranks after it. With a group: nothing.

        Raises:
            RollplaneError: the first worker's error, all errors in `details`; no worker is left in the group.
        """
        if self._group is not None:
            return
        sizes = await self._on_all(lambda client: client.world_size(), what="asked for their world size")
        offsets, total = {}, 1
        for url, size in sizes.items():
            offsets[url] = total
            total += size
        self._thread, self._stop = ThreadPoolExecutor(1, thread_name_prefix="rollplane-weights"), threading.Event()
        name = f"weights-{uuid.uuid4().hex[:12]}"
        try:
            store = await self._run(partial(_listen, self._host, self._port, self.deadline_s))

            def join() -> "Collective":
                return _join(store, self._host, name, total, self._backend, self.deadline_s, self._stop)

            def init(client: AdminClient, url: str) -> Awaitable[Any]:
                group = TransferGroup(
                    master_address=self._host,
                    master_port=store.port,
                    rank_offset=offsets[url],
                    world_size=total,
                    group_name=name,
                    backend=self._backend,
                )
                return client.init_weights_group(group, deadline_s=self.deadline_s)

            self._group, _ = await self._both(join, init, what="brought into the weight group")
        except BaseException:
            await self.close_group()
            raise

    async def send(
        self,
        tensors: "Mapping[str, Tensor]",
        *,
        version: str,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        operation_id: str | None = None,
    ) -> dict[str, UpdateReport]:
        """Make these the workers' weights, under this version; what each worker did, by address.

        Args:
            tensors: by the names that a checkpoint on disk has, all of the model's.
            version: the policy's name from now on.
            mode: what happens to running requests while the weights are put in place, see `AdminClient.pause`.
            operation_id: the same id again gives the workers' first answers. Made up when left out.

        Raises:
            InvalidRequest: tensors that are not the model's; nothing changed.
            Conflict: a worker received other bytes than were sent; nothing changed.
            DeadlineExceeded, EngineFailed, TransportError: before all had everything, nothing changed; after it, `details`
                say which workers have the new version, and the others are paused or failed, never half new.
        """
        manifest = manifest_of(tensors, bucket_bytes=self._bucket_bytes)
        operation = operation_id or uuid.uuid4().hex
        kept = dict(tensors)
        digest = await asyncio.to_thread(_digest, kept)
        if await self._all_have(version, digest):
            return await self._apply_all(
                digest, version=version, mode=mode, clear_cache=clear_cache, operation=operation
            )
        await self.open()
        await self._distribute(manifest, kept, digest)
        paused = await self._pause_all(mode, clear_cache=clear_cache)
        try:
            reports = await self._apply_all(
                digest, version=version, mode=mode, clear_cache=clear_cache, operation=operation
            )
            versions = await self._on_all(lambda client: client.policy_version(), what="asked for their version")
        except RollplaneError:
            await self._resume_those_at(version, paused)
            raise
        wrong = {url: said for url, said in versions.items() if said != version}
        if wrong:
            raise EngineFailed(
                f"{len(wrong)} workers do not say {version!r} after the update", details={"workers": wrong}
            )
        await self._on_these(
            [url for url, report in paused.items() if not report.already_paused], lambda client: client.resume()
        )
        return reports

    async def close_group(self) -> None:
        """Leave the group on both sides; a send under way ends. The next `send` makes a new one."""
        self._stop.set()
        group, self._group = self._group, None
        thread, self._thread = self._thread, None
        if group is not None:
            await asyncio.to_thread(group.close)
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
            await self._leave_there()

    async def close(self) -> None:
        """Leave the group and drop the connections. Idempotent."""
        await self.close_group()
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    # -- steps -----------------------------------------------------------------------------------------------------

    async def _all_have(self, version: str, digest: str) -> bool:
        """Whether an earlier try brought every worker there already."""
        found = await self._on_all(lambda client: client.workers(), what="asked for their policy")
        return all(
            record.policy_version == version and record.policy_digest == digest and record.state == "ready"
            for records in found.values()
            for record in records
        )

    async def _distribute(self, manifest: Manifest, tensors: "dict[str, Tensor]", digest: str) -> None:
        """All workers have all bytes beside their models."""
        group = self._group
        if group is None:
            raise Conflict("there is no weight group")

        def receive(client: AdminClient, url: str) -> Awaitable[StagedWeights]:
            # Not to be asked for again under one name: a broadcast is missed by whoever answers from memory.
            return client.stage_broadcast(manifest, deadline_s=self.deadline_s)

        try:
            _, staged = await self._both(
                partial(group.send, manifest, tensors, deadline_s=self.deadline_s), receive, what="sent the weights"
            )
        except BaseException:
            await self.close_group()
            raise
        wrong = {url: report.digest for url, report in staged.items() if report.digest != digest}
        if wrong:
            raise Conflict(
                f"{len(wrong)} workers received other bytes than were sent; nothing changed",
                details={"sent": digest, "received": wrong},
            )

    async def _apply_all(
        self, digest: str, *, version: str, mode: PauseMode, clear_cache: bool, operation: str
    ) -> dict[str, UpdateReport]:
        return await self._on_all(
            lambda client: client.apply_staged(
                digest,
                version=version,
                mode=mode,
                clear_cache=clear_cache,
                operation_id=f"{operation}/apply",
                deadline_s=self.deadline_s,
            ),
            what="given the new weights",
        )

    async def _pause_all(self, mode: PauseMode, *, clear_cache: bool) -> dict[str, PauseReport]:
        paused: dict[str, PauseReport] = {}

        async def pause(client: AdminClient, url: str) -> None:
            paused[url] = await client.pause(mode, clear_cache=clear_cache, deadline_s=self.deadline_s)

        try:
            await self._on_all_named(pause, what="paused")
        except RollplaneError:
            await self._on_these(
                [url for url, report in paused.items() if not report.already_paused], lambda client: client.resume()
            )
            raise
        return paused

    async def _resume_those_at(self, version: str, paused: dict[str, PauseReport]) -> None:
        """After a failed change: whoever has the new version goes on, or all do where nobody has it.

        The others stay paused: two versions at once are for the caller to allow.
        """
        mine = [url for url, report in paused.items() if not report.already_paused]
        versions: dict[str, str] = {}
        for url in paused:
            with contextlib.suppress(RollplaneError):
                versions[url] = await self._clients[url].policy_version()
        if version in versions.values():
            mine = [url for url in mine if versions.get(url) == version]
        for url in mine:
            with contextlib.suppress(RollplaneError):  # a worker of unknown version refuses, as it should
                await self._clients[url].resume()

    async def _on_these(self, urls: Sequence[str], call: Callable[[AdminClient], Awaitable[T]]) -> None:
        await self._on_all_named(lambda client, _: call(client), what="resumed", urls=urls)

    async def _on_all(self, call: Callable[[AdminClient], Awaitable[T]], *, what: str) -> dict[str, T]:
        return await self._on_all_named(lambda client, _: call(client), what=what)

    async def _both(
        self, mine: Callable[[], R], theirs: Callable[[AdminClient, str], Awaitable[T]], *, what: str
    ) -> tuple[R, dict[str, T]]:
        """One step that all ranks take together. Whoever fails first ends it for all, well before the deadline.

        Raises:
            RollplaneError: a worker's error before ours, which only tells that somebody was not there.
        """
        broken: list[asyncio.Task[None]] = []

        def end() -> None:
            if not broken:
                broken.append(asyncio.create_task(self._break(), name="end the weight group"))

        async def ours() -> R:
            try:
                return await self._run(mine)
            except BaseException:
                end()
                raise

        async def one(client: AdminClient, url: str) -> T:
            try:
                return await theirs(client, url)
            except BaseException:
                end()
                raise

        here = asyncio.create_task(ours(), name="rank 0")
        try:
            answers = await self._on_all_named(one, what=what)
            return await here, answers
        finally:
            here.cancel()
            await asyncio.gather(here, *broken, return_exceptions=True)

    async def _break(self) -> None:
        """End what every rank waits for, here and at the workers."""
        self._stop.set()
        if self._group is not None:
            await asyncio.to_thread(self._group.close)
        await self._leave_there()

    async def _leave_there(self) -> None:
        await asyncio.gather(
            *(client.destroy_weights_group() for client in self._clients.values()), return_exceptions=True
        )

    async def _on_all_named(
        self, call: Callable[[AdminClient, str], Awaitable[T]], *, what: str, urls: Sequence[str] | None = None
    ) -> dict[str, T]:
        """`call` on all workers at once, all waited for.

        Raises:
            RollplaneError: the error that came first, of its own kind, with every worker's in `details`.
        """
        chosen = list(self._clients) if urls is None else list(urls)
        errors: dict[str, RollplaneError] = {}
        done: dict[str, T] = {}

        async def one(url: str) -> None:
            try:
                done[url] = await call(self._clients[url], url)
            except RollplaneError as error:
                errors[url] = error

        await asyncio.gather(*(one(url) for url in chosen))
        if errors:
            first = next(iter(errors.values()))
            raise type(first)(
                f"{len(errors)} of {len(chosen)} workers could not be {what}; the first: {first.message}",
                param=first.param,
                details={"workers": {url: error.message for url, error in errors.items()}, "done": sorted(done)},
            )
        return done

    async def _run(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise Conflict("there is no weight group")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def manifest_of(tensors: "Mapping[str, Tensor]", *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest:
    """What is said of these tensors before they are broadcast.

    Raises:
        InvalidRequest: no tensors, or a dtype that cannot be named.
    """
    if not tensors:
        raise InvalidRequest("there are no tensors to send", param="tensors")
    specs = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise InvalidRequest(f"tensor {name} has dtype {dtype}, which cannot be sent", param="tensors")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=list(tensor.shape)))
    manifest = Manifest(tensors=specs, bucket_bytes=bucket_bytes)
    manifest.check()
    return manifest


def _digest(tensors: "Mapping[str, Tensor]") -> str:
    from rollplane.engines.tensors import content_digest

    return content_digest(tensors)


def _listen(host: str, port: int, deadline_s: float) -> Any:
    from rollplane.engines.collective import open_store

    return open_store(host, port, is_master=True, deadline_s=deadline_s)


def _join(
    store: Any, host: str, name: str, world_size: int, backend: Backend, deadline_s: float, stop: threading.Event
) -> "Collective":
    from rollplane.engines.collective import Collective

    return Collective(
        store, host=host, name=name, rank=0, world_size=world_size, backend=backend, deadline_s=deadline_s, stop=stop
    )
