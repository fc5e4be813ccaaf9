"""What runs inside vLLM's worker processes for a trainer's broadcast: one rank of its group, beside the model's steps.

A call into vLLM's workers keeps every step waiting, so none of these blocks: joining and receiving run in a thread of
their own, and `rollplane_group_answer` says whether the last one is over. What arrives is written as a checkpoint
directory, by one rank of the engine, and goes into the model like any other.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import msgspec

from rollplane.errors import DeadlineExceeded, EngineFailed, InvalidRequest, RollplaneError
from rollplane.protocol.broadcast import Manifest, TransferGroup

ERRORS: Final[dict[str, type[RollplaneError]]] = {
    error.__name__: error for error in (DeadlineExceeded, EngineFailed, InvalidRequest)
}
"""The errors that come out of a worker as themselves; any other one is an EngineFailed."""


class GroupExtension:
    """Mixed into vLLM's worker (`WorkerExtension`); `self` is the worker. Calls and answers are plain data."""

    rank: int
    device: Any

    _rollplane_member: "Member | None" = None

    def rollplane_backends(self) -> list[str]:
        """The backends that work in this process."""
        from rollplane.engines.collective import backends

        return list(backends())

    def rollplane_join_group(self, group: str, deadline_s: float) -> None:
        """Begin to join. Where there was a group, it is left.

        Args:
            group: a `TransferGroup` in JSON; `rank_offset` is that of the engine's first rank.
        """
        self.rollplane_leave_group()
        found = msgspec.json.decode(group, type=TransferGroup)
        self._rollplane_member = Member(found, rank=found.rank_offset + self.rank, device=self.device)
        self._rollplane_member.join(deadline_s=deadline_s)

    def rollplane_receive_weights(self, manifest: str, directory: str, deadline_s: float) -> None:
        """Begin to receive the tensors of a `Manifest` in JSON.

        Args:
            directory: an empty one, where rank 0 of the engine writes them as safetensors files.
        """
        if self._rollplane_member is not None:
            self._rollplane_member.receive(
                msgspec.json.decode(manifest, type=Manifest),
                Path(directory) if self.rank == 0 else None,
                deadline_s=deadline_s,
            )

    def rollplane_group_answer(self) -> dict[str, str]:
        """How the last call went: `{}` it goes on, `{"done": ...}`, or the error's name and text."""
        if self._rollplane_member is None:
            return {"error": EngineFailed.__name__, "message": "this rank is in no weight group"}
        return self._rollplane_member.answer()

    def rollplane_leave_group(self) -> None:
        """Leave; a call that blocks ends. Without a group nothing happens."""
        member, self._rollplane_member = self._rollplane_member, None
        if member is not None:
            member.leave()


class Member:
    """One rank of a group. Its calls run one at a time, each in a thread that the process's end does not wait for."""

    def __init__(self, group: TransferGroup, *, rank: int, device: Any) -> None:
        self.group = group
        self.rank = rank
        self._device = device
        self._collective: Any = None
        self._stop = threading.Event()
        self._call: Future[None] = Future()

    def __repr__(self) -> str:
        return f"<Member rank {self.rank} of {self.group.group_name!r}{', left' if self._stop.is_set() else ''}>"

    def join(self, *, deadline_s: float) -> None:
        """Begin to join; ends when every rank of the group is there."""
        self._begin(lambda: self._join(deadline_s))

    def receive(self, manifest: Manifest, directory: Path | None, *, deadline_s: float) -> None:
        """Begin to receive; `directory` None: take part and keep nothing."""
        self._begin(lambda: self._receive(manifest, directory, deadline_s))

    def answer(self) -> dict[str, str]:
        """See `GroupExtension.rollplane_group_answer`."""
        if not self._call.done():
            return {}
        error = self._call.exception()
        if error is None:
            return {"done": ""}
        kind = type(error).__name__
        text = error.message if isinstance(error, RollplaneError) else f"{kind}: {error}"[:300]
        return {"error": kind if kind in ERRORS else EngineFailed.__name__, "message": text}

    def leave(self) -> None:
        """Leave, in a thread too: a backend may take its time to let go."""
        self._stop.set()
        threading.Thread(target=self._close, name="rollplane leave", daemon=True).start()

    def _begin(self, work: Callable[[], None]) -> None:
        call = self._call = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                call.set_exception(error)
            else:
                call.set_result(None)

        threading.Thread(target=run, name="rollplane weight group", daemon=True).start()

    def _join(self, deadline_s: float) -> None:
        from rollplane.engines.collective import Collective, open_store

        device = self._here()
        group = self.group
        store = open_store(group.master_address, group.master_port, is_master=False, deadline_s=deadline_s)
        self._collective = Collective(
            store,
            host=group.master_address,
            name=group.group_name,
            rank=self.rank,
            world_size=group.world_size,
            backend=group.backend,
            device=device,
            deadline_s=deadline_s,
            stop=self._stop,
        )
        if self._stop.is_set():
            self._close()

    def _receive(self, manifest: Manifest, directory: Path | None, deadline_s: float) -> None:
        from safetensors.torch import save_file

        collective = self._collective
        if collective is None or self._stop.is_set():
            raise EngineFailed("this rank is in no weight group")
        self._here()
        for i, tensors in enumerate(collective.receive_each(manifest, deadline_s=deadline_s)):
            if directory is not None:
                save_file(tensors, directory / f"{i:06d}.safetensors")

    def _here(self) -> Any:
        """This thread's device; a new thread begins with the first GPU, whichever is the worker's."""
        import torch

        if self.group.backend == "gloo":
            return torch.device("cpu")
        torch.cuda.set_device(self._device)
        return self._device

    def _close(self) -> None:
        collective, self._collective = self._collective, None
        if collective is not None:
            collective.close()
