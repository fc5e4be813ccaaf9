"""A weight receiver and an adapter host whose every step a test can hold, release or fail."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollplane.errors import RollplaneError
from rollplane.protocol.admin import AllowTensors, FlushReport, PauseMode, PauseReport, ResumeReport, StagedWeights


@dataclass
class FakeReceiver:
    """Keeps a log of calls; `gates` hold a call until released, `faults` make one raise."""

    policy_version: str = "v0"
    log: list[str] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    faults: dict[str, RollplaneError] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    lies_about_version: bool = False

    async def _step(self, name: str) -> None:
        self.log.append(name)
        gate = self.gates.get(name)
        if gate is not None:
            await gate.wait()
        fault = self.faults.pop(name, None)
        if fault is not None:
            raise fault

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> PauseReport:
        await self._step(f"pause {mode}")
        return PauseReport(mode=mode, already_paused=False, cleared=True if clear_cache else None)

    async def resume(self) -> ResumeReport:
        await self._step("resume")
        return ResumeReport(was_paused=True, policy_version=self.policy_version)

    async def stage_weights(self, path: str, *, allow_tensors: Sequence[AllowTensors] = ()) -> StagedWeights:
        await self._step(f"stage {path}")
        return StagedWeights(path=path, digest=self.digests.get(path, f"digest of {path}"), tensors=1, bytes=4)

    async def apply_weights(self, staged: StagedWeights, *, version: str) -> None:
        await self._step(f"apply {version}")
        if not self.lies_about_version:
            self.policy_version = version

    async def set_policy_version(self, version: str) -> None:
        await self._step(f"label {version}")
        self.policy_version = version

    async def flush_cache(self, *, preempt: bool = False) -> FlushReport:
        await self._step("flush")
        return FlushReport(reset=True, blocks_freed=3)


@dataclass
class FakeHost:
    """Adapters by engine-side name."""

    loaded: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    faults: dict[str, RollplaneError] = field(default_factory=dict)

    async def load_adapter(self, engine_name: str, path: str) -> None:
        self.log.append(f"load {engine_name}")
        fault = self.faults.pop("load", None)
        if fault is not None:
            raise fault
        self.loaded[engine_name] = path

    async def unload_adapter(self, engine_name: str) -> None:
        self.log.append(f"unload {engine_name}")
        fault = self.faults.pop("unload", None)
        if fault is not None:
            raise fault
        self.loaded.pop(engine_name, None)

    async def loaded_adapters(self) -> list[str]:
        return list(self.loaded)
