"""Workers of a fleet without sockets: a real `Worker` over the mock engine, and the state that it would tell."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from rollplane.engines.base import Engine
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.errors import TransportError
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
from rollplane.protocol.state import WorkerState
from rollplane.rl.base import Operation
from rollplane.worker import Worker, WorkerSettings


class LocalWorker:
    """A `FleetWorker`; `cut` makes it unreachable, `mend` reachable again, `restart` gives it a new engine."""

    def __init__(self, url: str, settings: MockSettings | None = None, *, engine: Engine | None = None) -> None:
        self.url = url
        self.settings = settings or MockSettings()
        self.mock = MockEngine(self.settings)
        self.worker = Worker(engine or self.mock, settings=WorkerSettings(name=url, system_url=url))
        self.state: WorkerState | None = None
        self.reachable = False
        self.trouble: str | None = None
        self.dropped: list[str] = []
        self.operations: list[tuple[str, Operation | None]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<LocalWorker {self.url}>"

    @property
    def engine(self) -> Worker:
        return self.worker

    async def start(self) -> None:
        await self.worker.start()
        await self.refresh()

    async def restart(self) -> None:
        await self.worker.close()
        self.mock = MockEngine(self.settings)
        self.worker = Worker(self.mock, settings=WorkerSettings(name=self.url, system_url=self.url))
        await self.start()

    def cut(self) -> None:
        self.reachable = False
        self._tell()

    async def mend(self) -> None:
        self.reachable = True
        await self.refresh()

    def follow(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)
        if self.state is not None:
            listener()

    def drop_requests(self, reason: str) -> int:
        self.dropped.append(reason)
        return self.worker.live_requests

    async def refresh(self) -> WorkerState:
        if not self.reachable and self.state is not None:
            raise TransportError(f"{self.url} is cut off")
        record = self.worker.record()
        self.reachable = True
        self.state = WorkerState(
            worker=self.url,
            instance=self.worker.instance_id,
            info=self.worker.info,
            health=await self.worker.health(),
            policy_version=self.worker.version,
            policy_digest=record.policy_digest,
            epoch=self.worker.epoch,
            paused=self.worker.state in ("paused", "pausing"),
            adapters=record.adapters,
            routes=record.routes,
            cache_generation=self.worker.cache_generation,
            salt_scope=self.worker.salt_scope,
        )
        self._tell()
        return self.state

    async def claim_key(self, key: str, keeper: str, *, number: int, limit_s: float) -> tuple[str, int]:
        if not self.reachable:
            raise TransportError(f"{self.url} is cut off")
        return self.worker.keys.claim(key, keeper, number=number)

    async def close(self) -> None:
        await self.worker.close()

    async def stage_weights(
        self, path: str, *, allow_tensors: Sequence[AllowTensors] = (), operation: Operation
    ) -> StagedWeights:
        await self._call("stage", operation)
        return await self.worker.stage_weights(path, allow_tensors=allow_tensors, operation=operation)

    async def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, epoch: int | None = None
    ) -> PauseReport:
        await self._call("pause", Operation(epoch=epoch))
        return await self.worker.pause(mode, clear_cache=clear_cache, epoch=epoch)

    async def resume(self, *, epoch: int | None = None) -> ResumeReport:
        await self._call("resume", Operation(epoch=epoch))
        return await self.worker.resume(epoch=epoch)

    async def update_from_disk(
        self,
        path: str,
        *,
        version: str | None = None,
        mode: PauseMode = "keep",
        clear_cache: bool = False,
        expected_digest: str | None = None,
        allow_tensors: Sequence[AllowTensors] = (),
        operation: Operation | None = None,
    ) -> UpdateReport:
        await self._call("update", operation)
        return await self.worker.update_from_disk(
            path,
            version=version,
            mode=mode,
            clear_cache=clear_cache,
            expected_digest=expected_digest,
            allow_tensors=allow_tensors,
            operation=operation,
        )

    async def set_policy_version(self, version: str, *, epoch: int | None = None) -> None:
        await self._call("set_version", Operation(epoch=epoch))
        await self.worker.set_policy_version(version, epoch=epoch)

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        return await self.worker.flush_cache(preempt=preempt)

    async def workers(self) -> list[WorkerRecord]:
        if not self.reachable:
            raise TransportError(f"{self.url} is cut off")
        return await self.worker.workers()

    async def load_adapter(self, name: str, path: str, *, operation: Operation | None = None) -> AdapterRecord:
        await self._call("load", operation)
        return await self.worker.load_adapter(name, path, operation=operation)

    async def unload_adapter(self, name: str, *, operation: Operation | None = None) -> AdapterRecord:
        return await self.worker.unload_adapter(name, operation=operation)

    async def _call(self, name: str, operation: Operation | None) -> None:
        if not self.reachable:
            raise TransportError(f"{self.url} is cut off")
        self.operations.append((name, operation))
        gate = self.gates.get(name)
        if gate is not None:
            await gate.wait()
            if not self.reachable:
                raise TransportError(f"{self.url} is cut off")

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()


def write_adapter(root: Path, name: str, *, value: float) -> str:
    """An adapter's files, the same contents for the same value; its path."""
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'
    )
    base = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {
            f"{base}.lora_A.weight": np.full((4, 8), value, dtype=np.float32),
            f"{base}.lora_B.weight": np.full((8, 4), value, dtype=np.float32),
        },
        path / "adapter_model.safetensors",
    )
    return str(path)
