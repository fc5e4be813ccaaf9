"""Calls of `vllm.Control`, with our errors."""

import json
from typing import Any, Final

import grpc
import grpc.aio

from rollplane.engines.grpc.channels import ChannelPool
from rollplane.engines.grpc.proto import control_pb2 as pb
from rollplane.engines.grpc.status import error_from_control
from rollplane.errors import EngineProtocolError
from rollplane.protocol.admin import PauseMode

PAUSE_MODES: Final = {"abort": pb.PAUSE_MODE_ABORT, "wait": pb.PAUSE_MODE_WAIT, "keep": pb.PAUSE_MODE_KEEP}


class ControlCalls:
    """One method per rpc; each raises `RollplaneError` with the rpc's name.

    Args:
        timeout_s: longest time of one call. Those that wait for requests or weights have none but their caller's.
    """

    def __init__(self, pool: ChannelPool, *, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    async def call(self, name: str, request: Any, *, what: str | None = None, timeout_s: float | None = None) -> Any:
        """Call one rpc by name.

        Raises:
            RollplaneError: what the server said. EngineProtocolError: nothing that can be read.
        """
        try:
            answer = await getattr(self._pool.control, name)(
                request, timeout=timeout_s or self._timeout_s, metadata=self._pool.metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_control(error, what=what or name) from None
        if answer is None:  # so gRPC hands on what could not be read
            raise EngineProtocolError(f"{what or name}: an answer that protobuf cannot read")
        return answer

    async def server_info(self) -> pb.ServerInfo:
        """Facts of the server."""
        info: pb.ServerInfo = await self.call("GetServerInfo", pb.GetServerInfoRequest())
        return info

    async def model_info(self) -> pb.ModelInfo:
        """Facts of the model."""
        info: pb.ModelInfo = await self.call("GetModelInfo", pb.GetModelInfoRequest())
        return info

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are no error. An empty list is not sent."""
        if request_ids:
            await self.call("Abort", pb.AbortRequest(request_ids=request_ids))

    async def pause(self, mode: PauseMode, *, clear_cache: bool, timeout_s: float) -> None:
        """Stop stepping; the server answers when it is idle."""
        request = pb.PauseGenerationRequest(mode=PAUSE_MODES[mode], clear_cache=clear_cache)
        await self.call("PauseGeneration", request, timeout_s=timeout_s)

    async def resume(self) -> None:
        """Step again."""
        await self.call("ResumeGeneration", pb.ResumeGenerationRequest())

    async def is_paused(self) -> bool:
        """Whether the server is paused."""
        return bool((await self.call("IsPaused", pb.IsPausedRequest())).paused)

    async def weight_version(self) -> str:
        """The label of the weights."""
        return str((await self.call("GetWeightVersion", pb.GetWeightVersionRequest())).weight_version)

    async def set_weight_version(self, version: str) -> None:
        """Change the label."""
        await self.call("UpdateWeightVersion", pb.UpdateWeightVersionRequest(weight_version=version))

    async def load_lora(self, name: str, path: str) -> None:
        """Load an adapter."""
        request = pb.LoadLoraRequest(lora_name=name, source_path=path)
        await self.call("LoadLora", request, what=f"loading of adapter {name!r} from {path}")

    async def unload_lora(self, name: str) -> None:
        """Drop an adapter."""
        await self.call("UnloadLora", pb.UnloadLoraRequest(lora_name=name), what=f"unloading of adapter {name!r}")

    async def loras(self) -> list[str]:
        """Names of the loaded adapters."""
        return [each.lora_name for each in (await self.call("ListLoras", pb.ListLorasRequest())).adapters]

    async def kv_event_sources(self) -> list[pb.KvEventSource]:
        """Where KV events are published."""
        return list((await self.call("GetKvEventSources", pb.GetKvEventSourcesRequest())).sources)

    async def sleep(self, *, level: int, mode: PauseMode = "abort") -> None:
        """Free the engine's memory."""
        await self.call("Sleep", pb.SleepRequest(level=level, mode=PAUSE_MODES[mode]))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory back; no tags: all of it."""
        await self.call("WakeUp", pb.WakeUpRequest(tags=tags or []))

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return bool((await self.call("IsSleeping", pb.IsSleepingRequest())).sleeping)

    async def init_weight_transfer(self, info: dict[str, Any], *, timeout_s: float) -> None:
        """Join the trainer's group; `info` is the backend's own object."""
        request = pb.InitWeightTransferEngineRequest(init_info_json=json.dumps(info).encode())
        await self.call("InitWeightTransferEngine", request, timeout_s=timeout_s)

    async def start_weight_update(self, *, draft: bool = False) -> None:
        """Open an update of the model's, or the draft model's, weights."""
        if draft:
            await self.call("StartDraftWeightUpdate", pb.StartDraftWeightUpdateRequest())
        else:
            await self.call("StartWeightUpdate", pb.StartWeightUpdateRequest())

    async def update_weights(self, info: dict[str, Any], *, timeout_s: float) -> None:
        """Receive a part of the weights; `info` is the backend's own object."""
        request = pb.UpdateWeightsRequest(update_info_json=json.dumps(info).encode())
        await self.call("UpdateWeights", request, timeout_s=timeout_s)

    async def finish_weight_update(self, version: str | None) -> None:
        """Close the update and name the new weights."""
        await self.call("FinishWeightUpdate", pb.FinishWeightUpdateRequest(weight_version=version))
