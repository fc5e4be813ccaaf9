"""A torch collective group outside of torch's global state, for one thread: rank 0 broadcasts, the others receive.

Every call blocks and has a deadline; a peer that dies ends it at once, one that is silent ends it at the deadline. After
a failure the group is out of step and can only be closed. Import it lazily: it loads torch.
"""

import contextlib
import ipaddress
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from rollplane.errors import DeadlineExceeded, EngineFailed, InvalidRequest
from rollplane.protocol.broadcast import Backend, Bucket, Manifest, buckets

_SHORTEST: Final = timedelta(milliseconds=1)
_POLL_S: Final = 0.02
"""Between two looks for the other ranks."""


def backends() -> list[Backend]:
    """The backends that work in this process: gloo on processors, NCCL where torch has it and sees a GPU."""
    found: list[Backend] = []
    if dist.is_available() and dist.is_gloo_available():
        found.append("gloo")
    if dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available():
        found.append("nccl")
    return found


def open_store(host: str, port: int, *, is_master: bool, deadline_s: float) -> TCPStore:
    """The store through which ranks find each other; the master's listens, port 0 takes a free one.

    Raises:
        DeadlineExceeded: nobody listens there. EngineFailed: the port is taken, or the address is none.
    """
    ends = time.monotonic() + deadline_s
    try:
        # wait_for_workers would count clients; the group's own construction waits for every rank.
        return TCPStore(
            host, port, is_master=is_master, timeout=_timeout(deadline_s), wait_for_workers=False, use_libuv=True
        )
    except (RuntimeError, OSError) as error:
        raise _named(error, ends=ends, what=f"no store of a weight group at {host}:{port}") from None


class Collective:
    """One rank of a group; construction returns when every rank is there.

    Args:
        store: from `open_store`; kept for as long as the group lives.
        host: where the store is: a loopback address keeps the group's own traffic on loopback too.
        stop: set by another thread to give up waiting for the other ranks.
        device: of the tensors; None: the processor for gloo, the current GPU for NCCL.

    Raises:
        InvalidRequest: a backend that does not work here.
        DeadlineExceeded, EngineFailed: not all ranks came.
    """

    def __init__(
        self,
        store: TCPStore,
        *,
        host: str,
        name: str,
        rank: int,
        world_size: int,
        backend: Backend = "gloo",
        device: torch.device | None = None,
        stop: threading.Event | None = None,
        deadline_s: float,
    ) -> None:
        if backend not in backends():
            raise InvalidRequest(
                f"the {backend} backend does not work here; {', '.join(backends())} do", param="backend"
            )
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.device = device or torch.device("cpu" if backend == "gloo" else torch.cuda.current_device())
        self._store = store
        ends = time.monotonic() + deadline_s
        prefixed = PrefixStore(f"rollplane/{name}", store)
        prefixed.set_timeout(_timeout(deadline_s))
        try:
            self._gather(prefixed, stop or threading.Event(), ends=ends)
            self._group = self._make(prefixed, host=host, deadline_s=deadline_s)
            # NCCL connects at first use; one byte makes sure of every rank before anybody counts on the group.
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), ends=ends)
        except RuntimeError as error:
            raise _named(
                error, ends=ends, what=f"rank {rank} of {world_size} could not join weight group {name!r}"
            ) from None

    def __repr__(self) -> str:
        return f"<Collective {self.backend} rank {self.rank} of {self.world_size}>"

    def send(self, manifest: Manifest, tensors: dict[str, Tensor], *, deadline_s: float) -> None:
        """Broadcast the tensors of a manifest from rank 0, by name; each has the manifest's dtype and shape.

        Raises:
            DeadlineExceeded, EngineFailed: a receiver is gone or late.
        """
        ends = time.monotonic() + deadline_s
        for bucket in buckets(manifest):
            flat = torch.zeros(bucket.bytes, dtype=torch.uint8, device=self.device)
            for name, view in _views(flat, bucket):
                view.copy_(tensors[name].detach())
            self._step(flat, ends=ends)

    def receive(self, manifest: Manifest, *, deadline_s: float) -> dict[str, Tensor]:
        """The tensors of a manifest on the processor, views of the buckets' memory; see `receive_each` for errors."""
        found: dict[str, Tensor] = {}
        for tensors in self.receive_each(manifest, deadline_s=deadline_s):
            found.update(tensors)
        return found

    def receive_each(self, manifest: Manifest, *, deadline_s: float) -> Iterator[dict[str, Tensor]]:
        """The tensors of a manifest on the processor, one bucket at a time, each in memory of its own.

        Raises:
            DeadlineExceeded, EngineFailed: the trainer is gone or late.
        """
        ends = time.monotonic() + deadline_s
        for bucket in buckets(manifest):
            flat = torch.empty(bucket.bytes, dtype=torch.uint8, device=self.device)
            self._step(flat, ends=ends)
            yield dict(_views(flat.cpu(), bucket))

    def close(self) -> None:
        """Leave. A call that blocks in another thread ends: gloo's when a peer is gone or at its deadline. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _gather(self, store: Store, stop: threading.Event, *, ends: float) -> None:
        """Return once every rank has come: making the group itself cannot be called off."""
        store.set(f"rank {self.rank}", "here")
        ranks = [f"rank {rank}" for rank in range(self.world_size)]
        while not store.check(ranks):
            if stop.wait(_POLL_S):
                raise RuntimeError("called off")
            if time.monotonic() >= ends:
                raise RuntimeError("timed out")

    def _make(self, store: Store, *, host: str, deadline_s: float) -> Any:
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _timeout(deadline_s)
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = _timeout(deadline_s)
        gloo._devices = [
            dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
            if _is_loopback(host)
            else dist.ProcessGroupGloo.create_default_device()
        ]
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, gloo)

    def _step(self, flat: Tensor, *, ends: float) -> None:
        if flat.numel() == 0:
            return
        try:
            self._broadcast(flat, ends=ends)
        except RuntimeError as error:
            raise _named(error, ends=ends, what=f"the broadcast of {flat.numel()} bytes failed") from None

    def _broadcast(self, flat: Tensor, *, ends: float) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = _timeout(ends - time.monotonic())
        self._group.broadcast([flat], options).wait(options.timeout)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)


def _views(flat: Tensor, bucket: Bucket) -> list[tuple[str, Tensor]]:
    return [
        (
            placed.tensor.name,
            flat[placed.offset : placed.offset + placed.tensor.bytes]
            .view(getattr(torch, placed.tensor.dtype))
            .view(placed.tensor.shape),
        )
        for placed in bucket.placements
    ]


def _timeout(seconds: float) -> timedelta:
    return max(timedelta(seconds=seconds), _SHORTEST)


def _named(error: Exception, *, ends: float, what: str) -> DeadlineExceeded | EngineFailed:
    if time.monotonic() >= ends or "timeout" in str(error).lower() or "timed out" in str(error).lower():
        return DeadlineExceeded(f"{what}: no answer in time")
    return EngineFailed(f"{what}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    """Torch's messages go on with native stacks."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
