"""LoRA adapters in vLLM: loaded first, by an id of their own, and never by a request.

A request whose adapter does not load ends vLLM's engine; the same failure of `add_lora` is only an error. An id is never
used twice, because vLLM serves the old weights of an id whose path changed.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplane.engines.adapter_files import CONFIG_NAME, WEIGHTS_NAME, inspect_adapter
from rollplane.engines.vllm.checkpoints import Checkpoint, changed_files, check_adapter_fits, stamp
from rollplane.engines.vllm.versions import VllmApi
from rollplane.errors import Conflict, EngineDied, EngineFailed, InvalidRequest, NotFound
from rollplane.protocol.info import LoraCapability


@dataclass(frozen=True)
class _Held:
    """A loaded adapter: vLLM's record of it, and its files as they were checked (`checkpoints.stamp`)."""

    record: Any
    stamps: list[list[Any]]


class Adapters:
    """The adapters one engine holds, by engine-side name."""

    def __init__(self, engine: Any, api: VllmApi, capability: LoraCapability, loaded: Checkpoint | None) -> None:
        self.engine = engine
        self.api = api
        self.capability = capability
        self._loaded = loaded
        self._held: dict[str, _Held] = {}
        self._next_id = 1
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Adapters {len(self._held)}/{self.capability.max}: {', '.join(self._held) or 'none'}>"

    async def prepare(self) -> None:
        """Before the first request: keep the base model's rows apart from the adapters' where vLLM does not (on a CPU).

        Raises:
            EngineDied: its LoRA layers are not where they are looked for, so that base answers could be an adapter's.
        """
        if self.api.on_cpu:
            layers: list[int] = await self.engine.collective_rpc("rollplane_keep_base_apart")
            if not all(layers):
                raise EngineDied(f"vLLM {self.api.version} has no LoRA layers that this release knows")

    def names(self) -> list[str]:
        """Engine-side names that are loaded."""
        return list(self._held)

    def request(self, name: str) -> Any:
        """vLLM's record of a loaded adapter.

        Raises:
            NotFound: it is not loaded.
        """
        if name not in self._held:
            raise NotFound(f"adapter {name!r} is not loaded in the engine", param="model")
        return self._held[name].record

    async def load(self, name: str, path: str) -> None:
        """Load an adapter's files under a new id; see `AdapterHost.load_adapter`."""
        stamps = await asyncio.to_thread(self._inspect, path)
        async with self._lock:
            if name in self._held:
                raise Conflict(f"adapter {name!r} is loaded already", param="lora_name")
            if len(self._held) >= self.capability.max:
                raise Conflict(
                    f"{len(self._held)} adapters are loaded, the engine holds {self.capability.max}",
                    param="lora_name",
                )
            number, self._next_id = self._next_id, self._next_id + 1
            record = self.api.LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(Path(path)))
            await self._add(record)
            self._held[name] = _Held(record, stamps)

    def _inspect(self, path: str) -> list[list[Any]]:
        """Check an adapter's files; their stamps. In a thread: it reads every byte."""
        files = inspect_adapter(path, max_rank=self.capability.rank)
        if self._loaded is not None:
            check_adapter_fits(files.shapes, self._loaded)
        return [stamp(Path(path) / file) for file in (CONFIG_NAME, WEIGHTS_NAME)]

    async def unload(self, name: str) -> None:
        """Drop an adapter; unknown names are no error."""
        async with self._lock:
            held = self._held.pop(name, None)
            if held is not None:
                try:
                    await self.engine.remove_lora(held.record.lora_int_id)
                except self.api.DeadError as error:
                    raise EngineDied("the vLLM engine is gone") from error

    async def check_files(self) -> None:
        """Before the weights change, which drops every adapter: whether all can be put back from their files.

        Raises:
            EngineFailed: the files of one are gone or are others; nothing was touched.
        """
        for name, held in list(self._held.items()):
            path = held.record.lora_path
            why = await asyncio.to_thread(changed_files, path, held.stamps)
            if why is not None:
                raise EngineFailed(
                    f"adapter {name!r} could not be put back after a change of weights ({why} at {path}): put "
                    "its files back or unload it; nothing was touched"
                )

    async def load_again(self) -> list[str]:
        """Put every adapter back after a reload of the base weights, which drops them all; the names that are lost.

        Left to the next request, vLLM would load them itself, and end when the files are gone.
        """
        lost = []
        async with self._lock:
            for name, held in list(self._held.items()):
                try:
                    await self._add(held.record)
                except InvalidRequest:
                    del self._held[name]
                    lost.append(name)
        return lost

    async def _add(self, record: Any) -> None:
        try:
            added = await self.engine.add_lora(record)
        except self.api.DeadError as error:
            raise EngineDied("the vLLM engine is gone") from error
        except Exception as error:  # what a worker raises arrives as a plain Exception with its text
            if self.engine.errored:
                raise EngineDied("the vLLM engine is gone") from error
            raise InvalidRequest(f"vLLM does not load the adapter: {error}", param="lora_path") from error
        if not added:
            raise InvalidRequest(f"vLLM did not load the adapter at {record.lora_path}", param="lora_path")
