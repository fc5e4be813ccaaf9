"""Adapters on a vLLM server, which reads their files itself."""

import asyncio
import contextlib
from pathlib import Path

from rollplane.engines.adapter_files import inspect_adapter
from rollplane.engines.grpc.native import Server
from rollplane.engines.vllm.checkpoints import Checkpoint, check_adapter_fits, read_checkpoint
from rollplane.errors import EngineFailed, InvalidRequest, NotFound, RollplaneError


class GrpcAdapters:
    """The adapters of an engine's server. `stuck`: names that it cannot drop any more."""

    def __init__(self, engine: Server) -> None:
        self._engine = engine
        self._loaded: Checkpoint | None = None
        self.stuck: set[str] = set()
        self._left: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<GrpcAdapters, held to {self._loaded.path if self._loaded else 'nothing'}, {len(self.stuck)} stuck>"

    async def hold_to(self, model: str) -> None:
        """The model's directory, whose tensors say which adapters fit; one that is not there or not readable says nothing."""
        self._loaded = await asyncio.to_thread(_checkpoint_at, model)

    async def load(self, name: str, path: str) -> None:
        """See `AdapterHost.load_adapter`. The server reads the files, from below its own allowed prefixes."""
        if not Path(path).is_absolute():
            raise InvalidRequest(f"lora_path must be absolute: the server reads it, got {path!r}", param="lora_path")
        await asyncio.to_thread(self._check, path)
        try:
            await self._engine.control.load_lora(name, path)
        except InvalidRequest as error:
            if "must exist" in error.message:
                raise NotFound(error.message, param="lora_path") from None
            raise
        except EngineFailed as error:
            # The server lives; its words say what in the files does not fit.
            raise InvalidRequest(error.message, param="lora_path") from None

    def _check(self, path: str) -> None:
        """Refuse what is not the model's: vLLM would say so of a wrong width, but keep a slot for the adapter for good."""
        lora = self._engine.info.capabilities.lora
        if self._loaded is not None and lora is not None and Path(path).is_dir():
            check_adapter_fits(inspect_adapter(path, max_rank=lora.rank).shapes, self._loaded)

    def left(self, request_ids: list[str]) -> None:
        """The reader of these requests, of an adapter, is gone before their end: an unload has to come after theirs.

        The server ends a cancelled call at its own time. One that still runs when its adapter is unloaded makes vLLM load
        the adapter again, into a slot that nobody frees.
        """
        task = asyncio.create_task(self._end(request_ids), name=f"end {request_ids[0]}")
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def _end(self, request_ids: list[str]) -> None:
        with contextlib.suppress(RollplaneError):  # the health watch tells of a server that does not answer
            await self._engine.control.abort(request_ids)

    async def close(self) -> None:
        """Say nothing more."""
        for task in self._left:
            task.cancel()
        await asyncio.gather(*self._left, return_exceptions=True)

    async def unload(self, name: str) -> None:
        """See `AdapterHost.unload_adapter`. Requests whose reader is gone end first, see `left`.

        A server whose cache evicted the adapter refuses its removal and keeps the name; the name is of one generation
        and never used again, so it only counts as stuck.
        """
        if self._left:
            await asyncio.wait(set(self._left))
        try:
            await self._engine.control.unload_lora(name)
        except NotFound:
            return
        except EngineFailed:
            self.stuck.add(name)

    async def loaded(self) -> list[str]:
        """See `AdapterHost.loaded_adapters`."""
        return [name for name in await self._engine.control.loras() if name not in self.stuck]


def _checkpoint_at(path: str) -> Checkpoint | None:
    """The headers of a model's directory; None where there are none that can be read here. Blocking."""
    try:
        return read_checkpoint(path)
    except (OSError, RollplaneError):
        return None
