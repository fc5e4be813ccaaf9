"""vLLM's side of a broadcast, as its API process sees it: ranks in the worker processes, checked weights on files.

A call into the workers keeps vLLM's steps waiting and cannot wait itself, so what goes on in their threads
(`group_extension`) is asked for at intervals that grow. Weights that are there are a checkpoint directory like any
other: what is checked, how it goes into the model, and how the old weights come back, is `policy`'s.
"""

import asyncio
import contextlib
from typing import Any, Final

import msgspec

from rollplane.engines.vllm.checkpoints import SAFETENSORS_NAMES, Checkpoint, Tensor
from rollplane.engines.vllm.group_extension import ERRORS
from rollplane.engines.vllm.policy import Policy
from rollplane.engines.vllm.received import ReceivedWeights
from rollplane.errors import Conflict, DeadlineExceeded, EngineDied, EngineFailed, InvalidRequest
from rollplane.protocol.admin import StagedWeights
from rollplane.protocol.broadcast import Manifest, TransferGroup

_FIRST_LOOK_S: Final = 0.002
_LONGEST_LOOK_S: Final = 0.1
_GRACE_S: Final = 2.0
"""How long after its deadline a rank may take to say that it is over."""


async def offered_backends(engine: Any) -> list[str]:
    """The backends by which every rank of an engine receives; none where its ranks are on other machines too."""
    parallel = engine.vllm_config.parallel_config
    if int(getattr(parallel, "nnodes", 1) or 1) > 1 or parallel.distributed_executor_backend not in ("uni", "mp"):
        return []
    answers: list[list[str]] = await engine.collective_rpc("rollplane_backends")
    return [name for name in answers[0] if all(name in each for each in answers)]


class Receiver:
    """The ranks of one engine in at most one group, and what they received.

    Args:
        engine: vLLM's `AsyncLLM`.
        policy: holds what is received to the model, and has the weights that must stay where they are.
        backends: those that work in every rank.
        root: where received weights lie; None: in memory where there is room.
    """

    def __init__(self, engine: Any, policy: Policy, *, backends: list[str], root: str | None = None) -> None:
        self.engine = engine
        self.policy = policy
        self.backends = backends
        self.received = ReceivedWeights(root)
        self.group: TransferGroup | None = None

    def __repr__(self) -> str:
        return f"<Receiver {self.group.group_name if self.group is not None else 'in no group'}>"

    async def join(self, group: TransferGroup, *, deadline_s: float) -> None:
        """See `BroadcastReceiver.join_group`."""
        if self.group is not None:
            raise Conflict(f"this engine is in weight group {self.group.group_name!r}")
        if group.backend not in self.backends:
            raise InvalidRequest(
                f"the {group.backend} backend does not work here; {', '.join(self.backends) or 'none'} do",
                param="backend",
            )
        self.group = group
        try:
            await self._call("join_group", deadline_s, group=_json(group))
        except BaseException:
            await self.leave()
            raise

    async def receive(self, manifest: Manifest, *, deadline_s: float) -> StagedWeights:
        """See `BroadcastReceiver.receive_weights`."""
        if self.group is None:
            raise Conflict("this engine is in no weight group")
        self.policy.check_fits(checkpoint_of(manifest), param="tensors")
        await asyncio.to_thread(self.received.drop_all, but=self.policy.good_path)
        directory = await asyncio.to_thread(self.received.make, manifest.bytes)
        try:
            await self._call("receive_weights", deadline_s, manifest=_json(manifest), directory=str(directory))
            return await self.policy.stage(str(directory), param="tensors")
        except BaseException:
            await asyncio.to_thread(self.received.drop_all, but=self.policy.good_path)
            raise

    async def leave(self) -> None:
        """See `BroadcastReceiver.leave_group`. What was received stays for as long as it may be put in place."""
        if self.group is None:
            return
        self.group = None
        with contextlib.suppress(EngineDied):  # then its ranks have left with it
            await self.policy.ask(self.engine.collective_rpc("rollplane_leave_group"))

    async def forget(self) -> None:
        """Drop what was received, except the weights in place."""
        await asyncio.to_thread(self.received.drop_all, but=self.policy.good_path)

    async def close(self) -> None:
        """Drop everything; the engine is gone, or about to go."""
        self.group = None
        await asyncio.to_thread(self.received.drop_all)

    async def _call(self, name: str, deadline_s: float, **arguments: Any) -> None:
        """Begin a call on every rank and return when all have ended it.

        Raises:
            DeadlineExceeded, EngineFailed, InvalidRequest: the first rank's error. EngineDied: the engine is gone.
        """
        call = self.engine.collective_rpc(f"rollplane_{name}", kwargs={**arguments, "deadline_s": deadline_s})
        await self.policy.ask(call)
        pause_s = _FIRST_LOOK_S
        try:
            async with asyncio.timeout(deadline_s + _GRACE_S):
                while True:
                    answers = await self.policy.ask(self.engine.collective_rpc("rollplane_group_answer"))
                    for answer in answers:
                        if "error" in answer:
                            raise ERRORS.get(answer["error"], EngineFailed)(answer["message"])
                    if all("done" in answer for answer in answers):
                        return
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, _LONGEST_LOOK_S)
        except TimeoutError:
            raise DeadlineExceeded(f"a rank of the engine did not answer within {deadline_s:g} s") from None


def checkpoint_of(manifest: Manifest) -> Checkpoint:
    """What a manifest announces, as a checkpoint without files."""
    return Checkpoint(
        path="the broadcast",
        tensors={
            spec.name: Tensor(
                dtype=SAFETENSORS_NAMES[spec.dtype], shape=tuple(spec.shape), file="", begin=0, end=spec.bytes
            )
            for spec in manifest.tensors
        },
        stamps=[],
    )


def _json(record: TransferGroup | Manifest) -> str:
    return msgspec.json.encode(record).decode()
