"""The embedded engine's side of a broadcast: one thread that joins, receives and leaves, beside the step loop's."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rollplane.engines.collective import Collective, backends, open_store
from rollplane.engines.embedded.weights import CheckpointLayout, LoadedCheckpoint
from rollplane.engines.tensors import content_digest
from rollplane.errors import Conflict, EngineFailed, InvalidRequest
from rollplane.protocol.broadcast import Manifest, TransferGroup

T = TypeVar("T")


class Receiver:
    """At most one group, and the thread that blocks in it."""

    def __init__(self) -> None:
        self._group: Collective | None = None
        self._name = ""
        self._thread: ThreadPoolExecutor | None = None
        self._stop = threading.Event()

    def __repr__(self) -> str:
        return f"<Receiver {self._group!r}>"

    async def join(self, group: TransferGroup, *, deadline_s: float) -> None:
        """See `BroadcastReceiver.join_group`."""
        if self._thread is not None:
            raise Conflict(f"this engine is in weight group {self._name!r}")
        if group.backend not in backends():
            raise InvalidRequest(
                f"the {group.backend} backend does not work here; {', '.join(backends())} do", param="backend"
            )
        self._stop = threading.Event()
        self._thread, self._name = ThreadPoolExecutor(1, thread_name_prefix="rollplane-broadcast"), group.group_name
        try:
            self._group = await self._run(partial(_join, group, deadline_s, self._stop))
        except BaseException:
            await self.leave()
            raise

    async def receive(self, manifest: Manifest, layout: CheckpointLayout, *, deadline_s: float) -> LoadedCheckpoint:
        """See `BroadcastReceiver.receive_weights`."""
        group = self._group
        if group is None:
            raise Conflict("this engine is in no weight group")
        layout.check_specs({t.name: (t.shape, t.dtype) for t in manifest.tensors})

        def work() -> LoadedCheckpoint:
            tensors = group.receive(manifest, deadline_s=deadline_s)
            layout.check_values(tensors)
            return LoadedCheckpoint(Path(f"broadcast:{self._name}"), tensors, content_digest(tensors), manifest.bytes)

        return await self._run(work)

    async def leave(self) -> None:
        """See `BroadcastReceiver.leave_group`."""
        self._stop.set()
        group, self._group = self._group, None
        thread, self._thread = self._thread, None
        if group is not None:
            await asyncio.to_thread(group.close)
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise EngineFailed("the weight group was left")
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Nobody waits any more; a late result or error has no reader.
            future.add_done_callback(_forget)
            raise


def _join(group: TransferGroup, deadline_s: float, stop: threading.Event) -> Collective:
    store = open_store(group.master_address, group.master_port, is_master=False, deadline_s=deadline_s)
    return Collective(
        store,
        host=group.master_address,
        name=group.group_name,
        rank=group.rank_offset,
        world_size=group.world_size,
        backend=group.backend,
        deadline_s=deadline_s,
        stop=stop,
    )


def _forget(future: "asyncio.Future[Any]") -> None:
    with contextlib.suppress(asyncio.CancelledError):
        found = future.exception()
        if found is None and isinstance(result := future.result(), Collective):
            result.close()
