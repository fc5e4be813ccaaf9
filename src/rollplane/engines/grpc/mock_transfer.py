"""The calls of `vllm.Control` for native weight transfer and sleep, as vllm-rs 0.31 answers them.

Weights move where the engine behind it has a transfer of its own.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

from rollplane.engines.base import NativeControls, NativeTransfer, WeightReceiver
from rollplane.engines.grpc.proto import control_pb2
from rollplane.errors import Conflict, EngineFailed, InvalidRequest

UpdateState = Literal["closed", "open"]
_DRAFTLESS: Final = "draft weight updates are not enabled"


class MockTransfer:
    """One transfer backend and the engine's sleep.

    Args:
        receiver: whose label FinishWeightUpdate changes; None: an engine without one.
        backend: the transfer backend's name; None: started without one.
        sleep_mode: whether it was started with sleep mode.
    """

    def __init__(self, receiver: WeightReceiver | None, *, backend: str | None, sleep_mode: bool) -> None:
        self.backend = backend
        self.sleep_mode = sleep_mode
        self.state: UpdateState = "closed"
        self.asleep = False
        self.seen: list[tuple[str, Any]] = []
        """What was asked, in order: the rpc's name and its object, level, tags or version."""
        self._receiver = receiver
        self._native: NativeTransfer | None = None
        host: object = receiver
        if isinstance(host, NativeControls) and host.native.backend is not None:
            self._native = host.native
        self._joined = False

    def __repr__(self) -> str:
        asleep = ", asleep" if self.asleep else ""
        return (
            f"<MockTransfer {self.backend or 'without a backend'}, update {self.state}{asleep}, {len(self.seen)} calls>"
        )

    def calls(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """Handlers by rpc name."""
        return {
            "Sleep": self._sleep,
            "WakeUp": self._wake_up,
            "IsSleeping": self._is_sleeping,
            "InitWeightTransferEngine": self._init,
            "StartWeightUpdate": self._start,
            "StartDraftWeightUpdate": self._start_draft,
            "UpdateWeights": self._update,
            "FinishWeightUpdate": self._finish,
        }

    def capabilities(self) -> control_pb2.RlCapabilities:
        """What GetServerInfo reports."""
        return control_pb2.RlCapabilities(
            weight_transfer_enabled=self.backend is not None,
            weight_transfer_backend=self.backend or "",
            sleep_mode_enabled=self.sleep_mode,
        )

    async def _sleep(self, request: control_pb2.SleepRequest) -> control_pb2.SleepResponse:
        self._require_sleep_mode()
        self.seen.append(("Sleep", request.level))
        self.asleep = True
        return control_pb2.SleepResponse()

    async def _wake_up(self, request: control_pb2.WakeUpRequest) -> control_pb2.WakeUpResponse:
        self._require_sleep_mode()
        self.seen.append(("WakeUp", list(request.tags)))
        self.asleep = bool(request.tags) and "kv_cache" not in request.tags  # the cache is taken back last
        return control_pb2.WakeUpResponse()

    async def _is_sleeping(self, request: Any) -> control_pb2.IsSleepingResponse:
        self._require_sleep_mode()
        return control_pb2.IsSleepingResponse(sleeping=self.asleep)

    async def _init(
        self, request: control_pb2.InitWeightTransferEngineRequest
    ) -> control_pb2.InitWeightTransferEngineResponse:
        self._require_backend()
        info = _object(request.init_info_json, "init_info_json")
        self.seen.append(("InitWeightTransferEngine", info))
        if self._native is not None:
            await self._native.init(info)
        self._joined = True
        return control_pb2.InitWeightTransferEngineResponse()

    async def _start(self, request: Any) -> control_pb2.StartWeightUpdateResponse:
        self._require_backend()
        if not self._joined or self.state == "open":
            raise EngineFailed("a weight update is open" if self._joined else "the transfer engine was not initialized")
        self.seen.append(("StartWeightUpdate", None))
        if self._native is not None:
            await self._native.start()
        self.state = "open"
        return control_pb2.StartWeightUpdateResponse()

    async def _start_draft(self, request: Any) -> control_pb2.StartDraftWeightUpdateResponse:
        raise Conflict(_DRAFTLESS)

    async def _update(self, request: control_pb2.UpdateWeightsRequest) -> control_pb2.UpdateWeightsResponse:
        self._require_open("update_weights")
        info = _object(request.update_info_json, "update_info_json")
        self.seen.append(("UpdateWeights", info))
        if not info.get("names"):
            self.state = "closed"  # as vLLM: a failed update leaves the session closed
            raise EngineFailed("update_weights failed: no tensor was named")
        if self._native is not None:
            await self._native.update(info)
        return control_pb2.UpdateWeightsResponse()

    async def _finish(self, request: control_pb2.FinishWeightUpdateRequest) -> control_pb2.FinishWeightUpdateResponse:
        self._require_open("finish_weight_update")
        version = request.weight_version if request.HasField("weight_version") else None
        self.seen.append(("FinishWeightUpdate", version))
        self.state = "closed"
        if self._native is not None and self._receiver is not None:
            await self._native.finish(version or self._receiver.policy_version)
        elif version is not None and self._receiver is not None:
            await self._receiver.set_policy_version(version)
        return control_pb2.FinishWeightUpdateResponse()

    def _require_backend(self) -> None:
        if self.backend is None:
            raise Conflict("weight transfer is not enabled")

    def _require_open(self, name: str) -> None:
        self._require_backend()
        if self.state != "open":
            raise EngineFailed(f"start_weight_update must be called before {name}")

    def _require_sleep_mode(self) -> None:
        if not self.sleep_mode:
            raise Conflict("sleep mode is not enabled")


def _object(text: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{name} is {type(found).__name__}, not an object")
    return found
