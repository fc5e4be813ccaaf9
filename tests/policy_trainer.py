"""A trainer in this process: rank 0 of a gloo group of its own with one worker, and what may become of it half-way."""

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from rollplane.client.weights import manifest_of
from rollplane.engines.collective import Collective, open_store
from rollplane.errors import RollplaneError
from rollplane.protocol.admin import PauseMode
from rollplane.protocol.broadcast import Manifest, TransferGroup, buckets
from rollplane.rl.base import Operation
from rollplane.worker import Worker

Ending = Literal["whole", "dies half-way", "falls silent", "never comes", "another shape", "not finite"]
ENDINGS: tuple[Ending, ...] = ("whole", "dies half-way", "falls silent", "never comes", "another shape", "not finite")

HOST = "127.0.0.1"
PATIENT_S = 20.0
SHORT_S = 0.5
BUCKET_BYTES = 1 << 18
"""Several buckets even of the smallest model."""


async def broadcast(
    worker: Worker, checkpoint: str, *, version: str, mode: PauseMode, clear_cache: bool, ending: Ending
) -> None:
    """Join, send, leave, as a trainer does; raises what the worker says."""
    tensors = await asyncio.to_thread(load_file, Path(checkpoint) / "model.safetensors")
    name = min(tensors)
    if ending == "another shape":
        tensors[name] = torch.zeros(7)
    elif ending == "not finite":
        tensors[name] = torch.full_like(tensors[name], float("nan"))
    manifest = manifest_of(tensors, bucket_bytes=BUCKET_BYTES)
    stop, thread = threading.Event(), ThreadPoolExecutor(1, thread_name_prefix="trainer")

    def begin(work: Callable[[], Any]) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().run_in_executor(thread, work)

    ours: list[asyncio.Future[Any]] = []
    try:
        store = await begin(partial(open_store, HOST, 0, is_master=True, deadline_s=PATIENT_S))
        group = TransferGroup(
            master_address=HOST, master_port=store.port, rank_offset=1, world_size=2, group_name=uuid.uuid4().hex
        )
        if ending != "never comes":
            ours.append(begin(partial(_join, store, group, stop)))
        limit_s = SHORT_S if ending == "never comes" else PATIENT_S
        await worker.init_weights_group(group, operation=Operation(deadline_s=limit_s))
        collective = await ours[0]
        if ending != "falls silent":
            ours.append(begin(partial(_send, collective, manifest, tensors, ending)))
        try:
            await worker.update_from_broadcast(
                manifest,
                version=version,
                mode=mode,
                clear_cache=clear_cache,
                operation=Operation(deadline_s=SHORT_S if ending in ("falls silent", "dies half-way") else PATIENT_S),
            )
        finally:
            await asyncio.to_thread(collective.close)
            await worker.destroy_weights_group()
    finally:
        stop.set()
        await asyncio.gather(*ours, return_exceptions=True)
        thread.shutdown(wait=False)


def _join(store: Any, group: TransferGroup, stop: threading.Event) -> Collective:
    return Collective(store, host=HOST, name=group.group_name, rank=0, world_size=2, stop=stop, deadline_s=PATIENT_S)


def _send(collective: Collective, manifest: Manifest, tensors: dict[str, torch.Tensor], ending: Ending) -> None:
    """In a thread. The worker may have left by then: what it says is what counts."""
    with contextlib.suppress(RollplaneError, RuntimeError):
        if ending == "dies half-way":
            first = next(buckets(manifest))
            part = Manifest(tensors=[p.tensor for p in first.placements], bucket_bytes=manifest.bucket_bytes)
            collective.send(part, tensors, deadline_s=PATIENT_S)
            collective.close()
        else:
            collective.send(manifest, tensors, deadline_s=PATIENT_S if ending == "whole" else 2 * SHORT_S)
