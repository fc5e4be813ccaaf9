"""A vLLM gRPC server without vLLM: `vllm.Inference`, `vllm.Control` and `grpc.health.v1` in front of any engine of ours.

It behaves as vllm-rs 0.31 does where the two can be told apart over the wire, and records what it was asked.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rollplane.engines.base import AdapterHost, Engine, WeightReceiver
from rollplane.engines.grpc.mock_convert import AnswerWriter, from_wire
from rollplane.engines.grpc.mock_transfer import MockTransfer
from rollplane.engines.grpc.proto import control_pb2
from rollplane.engines.grpc.proto import inference_pb2 as pb
from rollplane.engines.grpc.services import CONTROL, INFERENCE, service_handler
from rollplane.errors import (
    Conflict,
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    RollplaneError,
    Unavailable,
)
from rollplane.protocol.admin import PauseMode
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, PromptEvent

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_REQUEST_BYTES: Final = 32 * 2**20
MAX_ANSWER_BYTES: Final = 256 * 2**20

_CODES: Final[tuple[tuple[type[RollplaneError], grpc.StatusCode], ...]] = (
    (PayloadTooLarge, grpc.StatusCode.OUT_OF_RANGE),
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (EngineDied, grpc.StatusCode.UNAVAILABLE),
)
_MODES: Final[dict[int, PauseMode]] = {
    control_pb2.PAUSE_MODE_UNSPECIFIED: "abort",
    control_pb2.PAUSE_MODE_ABORT: "abort",
    control_pb2.PAUSE_MODE_WAIT: "wait",
    control_pb2.PAUSE_MODE_KEEP: "keep",
}


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One inference call as it arrived. `method`: the rpc's name; `metadata` without gRPC's own keys."""

    method: str
    request: Any
    metadata: dict[str, str]


class MockVllmServer:
    """The services in front of `engine`.

    Args:
        engine: what makes tokens; started and closed with the server.
        address: HOST:PORT to listen on; port 0 takes a free one, see `port`.
        tokens_per_message: how streams are cut; 1 as vLLM does, None as the engine's events come.
        whole: streams too are made in one go by the engine before they are cut: with None, one message has the answer.
        model_id: what GetModelInfo names as the model, a directory for clients that read it; the engine's name if None.
        world_size: what GetServerInfo reports; 0 as older servers do.
        data_parallel_size: ranks that GetServerInfo reports; all are the one engine.
        multimodal: what GetModelInfo reports; None: whether the engine takes features.
        max_request_bytes: larger requests are refused.
        recorded_calls: how many of the last inference calls are kept in `calls`.
        transfer_backend, sleep_mode: as vLLM was started; see `MockTransfer`.
        credentials: TLS.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        address: str = "127.0.0.1:0",
        tokens_per_message: int | None = 1,
        whole: bool = False,
        model_id: str | None = None,
        world_size: int | None = None,
        data_parallel_size: int = 1,
        multimodal: bool | None = None,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        recorded_calls: int = 10_000,
        transfer_backend: str | None = None,
        sleep_mode: bool = False,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.engine = engine
        self.port = 0
        self.calls: deque[RecordedCall] = deque(maxlen=recorded_calls)
        self.called = asyncio.Event()
        """Set at every recorded call; clear it to wait for the next one."""
        self.transfer = MockTransfer(
            engine if isinstance(engine, WeightReceiver) else None, backend=transfer_backend, sleep_mode=sleep_mode
        )
        self._address = address
        self._cut = tokens_per_message
        self._whole = whole
        self._model_id = model_id
        self._world_size = world_size
        self._data_parallel_size = data_parallel_size
        self._multimodal = multimodal
        self._max_request_bytes = max_request_bytes
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._paused = False
        self._adapters: dict[str, control_pb2.LoraAdapter] = {}

    def __repr__(self) -> str:
        return f"<MockVllmServer {self._address} port {self.port}, {len(self.calls)} calls, {self.engine!r}>"

    async def start(self) -> None:
        """Start the engine, listen, and say so on the health service.

        Raises:
            InvalidRequest: the address is taken, or is none of this machine.
        """
        await self.engine.start()
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._max_request_bytes),
                ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),
            ]
        )
        server.add_generic_rpc_handlers(
            (
                service_handler(INFERENCE, {"Generate": self._generate, "GenerateStream": self._generate_stream}),
                service_handler(CONTROL, {name: self._guarded(call) for name, call in self._control_calls().items()}),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            if self._credentials is None:
                self.port = server.add_insecure_port(self._address)
            else:
                self.port = server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            await self.engine.close()
            raise InvalidRequest(f"cannot listen on {self._address}: {error}", param="address") from None
        await server.start()
        self._server = server
        await self.set_health(serving=True)

    async def set_health(self, *, serving: bool) -> None:
        """What the health service says of both services and of the server as a whole."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", INFERENCE.full_name, CONTROL.full_name):
            await self._health.set(name, status)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Refuse new calls, end running ones within `grace_s`, close the engine."""
        if self._server is not None:
            await self._server.stop(grace_s or None)
            self._server = None
        await self.engine.close()

    async def wait(self) -> None:
        """Return when the server was stopped."""
        if self._server is not None:
            await self._server.wait_for_termination()

    # -- vllm.Inference ----------------------------------------------------------------------------------------------

    async def _generate(self, wire: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        self._record("Generate", wire, context)
        writer = AnswerWriter(wire, self.engine.info, tokens_per_message=None)
        answer = pb.GenerateResponse()
        prompt: PromptEvent | None = None
        try:
            async with aclosing(self._run(wire, stream=False)) as events:
                async for event in events:
                    if isinstance(event, PromptEvent):
                        prompt = event
                    elif isinstance(event, ChoiceEvent):
                        answer.outputs.extend(writer.choice(event))
                    elif answer.outputs:
                        writer.end(event, answer.outputs[-1])
        except Exception as error:
            await self._abort(context, error)
        answer.prompt_info.CopyFrom(writer.prompt(prompt))
        return answer

    async def _generate_stream(self, wire: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self._record("GenerateStream", wire, context)
        writer = AnswerWriter(wire, self.engine.info, tokens_per_message=self._cut)
        announced = False
        held: pb.SequenceOutput | None = None  # the last output waits for what the end adds to it
        try:
            async with aclosing(self._run(wire, stream=not self._whole)) as events:
                async for event in events:
                    if not announced:
                        announced = True
                        yield pb.GenerateResponse(
                            prompt_info=writer.prompt(event if isinstance(event, PromptEvent) else None)
                        )
                    if isinstance(event, ChoiceEvent):
                        for output in writer.choice(event):
                            if held is not None:
                                yield pb.GenerateResponse(outputs=[held])
                            held = output if output.HasField("finish_info") else None
                            if held is None:
                                yield pb.GenerateResponse(outputs=[output])
                    elif isinstance(event, EndEvent) and held is not None:
                        writer.end(event, held)
            if held is not None:
                yield pb.GenerateResponse(outputs=[held])
        except Exception as error:
            await self._abort(context, error)

    def _run(self, wire: pb.GenerateRequest, *, stream: bool) -> AsyncGenerator[Event, None]:
        events = self.engine.generate(from_wire(wire, stream=stream))
        if not isinstance(events, AsyncGenerator):
            raise InvalidRequest(f"{self.engine!r} cannot be closed early")
        return events

    # -- vllm.Control ------------------------------------------------------------------------------------------------

    def _control_calls(self) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "GetServerInfo": self._server_info,
            "GetModelInfo": self._model_info,
            "GetKvEventSources": self._kv_event_sources,
            "Abort": self._abort_requests,
            **self.transfer.calls(),
        }
        if isinstance(self.engine, WeightReceiver):
            calls |= {
                "PauseGeneration": self._pause,
                "ResumeGeneration": self._resume,
                "IsPaused": self._is_paused,
                "GetWeightVersion": self._weight_version,
                "UpdateWeightVersion": self._set_weight_version,
            }
        if isinstance(self.engine, AdapterHost):
            calls |= {"LoadLora": self._load_lora, "UnloadLora": self._unload_lora, "ListLoras": self._loras}
        return calls

    async def _server_info(self, request: Any) -> control_pb2.ServerInfo:
        info = self.engine.info
        lora = info.capabilities.lora
        return control_pb2.ServerInfo(
            engine_version="0.31.0",
            api_version="vllm",
            instance_id="mock",
            parallelism=control_pb2.ParallelismInfo(
                tensor=1,
                pipeline=1,
                data=self._data_parallel_size,
                decode_context=1,
                world_size=info.world_size if self._world_size is None else self._world_size,
                data_parallel_size_local=self._data_parallel_size,
            ),
            max_model_len=info.max_model_len,
            kv_block_size=info.block_tokens or 0,
            total_kv_blocks=65_536,
            max_running_requests=info.max_num_seqs,
            max_batched_tokens=info.max_model_len,
            max_loras=0 if lora is None else lora.max,
            rl_capabilities=self.transfer.capabilities(),
        )

    async def _model_info(self, request: Any) -> control_pb2.ModelInfo:
        info = self.engine.info
        capable = bool(info.capabilities.features) if self._multimodal is None else self._multimodal
        return control_pb2.ModelInfo(
            model_id=self._model_id or info.model,
            served_model_name=info.model,
            served_model_aliases=info.aliases,
            supports_token_ids_input=True,
            supports_lora=info.capabilities.lora is not None,
            supports_multimodal=capable,
        )

    async def _kv_event_sources(self, request: Any) -> control_pb2.GetKvEventSourcesResponse:
        return control_pb2.GetKvEventSourcesResponse()

    async def _abort_requests(self, request: control_pb2.AbortRequest) -> control_pb2.AbortResponse:
        for name in request.request_ids:
            await self.engine.abort(name)
        return control_pb2.AbortResponse()

    async def _pause(self, request: control_pb2.PauseGenerationRequest) -> control_pb2.PauseGenerationResponse:
        if request.mode not in _MODES:
            raise InvalidRequest(f"mode {request.mode} is unknown")
        clear = request.clear_cache if request.HasField("clear_cache") else True
        await self._receiver.pause(_MODES[request.mode], clear_cache=clear)
        self._paused = True
        return control_pb2.PauseGenerationResponse()

    async def _resume(self, request: Any) -> control_pb2.ResumeGenerationResponse:
        await self._receiver.resume()
        self._paused = False
        return control_pb2.ResumeGenerationResponse()

    async def _is_paused(self, request: Any) -> control_pb2.IsPausedResponse:
        return control_pb2.IsPausedResponse(paused=self._paused)

    async def _weight_version(self, request: Any) -> control_pb2.GetWeightVersionResponse:
        return control_pb2.GetWeightVersionResponse(weight_version=self._receiver.policy_version)

    async def _set_weight_version(
        self, request: control_pb2.UpdateWeightVersionRequest
    ) -> control_pb2.UpdateWeightVersionResponse:
        await self._receiver.set_policy_version(request.weight_version)
        return control_pb2.UpdateWeightVersionResponse()

    async def _load_lora(self, request: control_pb2.LoadLoraRequest) -> control_pb2.LoadLoraResponse:
        if request.lora_name in self._adapters:
            raise _AlreadyExists(f"adapter {request.lora_name!r} is loaded")
        await self._adapter_host.load_adapter(request.lora_name, request.source_path)
        adapter = control_pb2.LoraAdapter(
            lora_id=len(self._adapters) + 1, lora_name=request.lora_name, source_path=request.source_path
        )
        self._adapters[request.lora_name] = adapter
        return control_pb2.LoadLoraResponse(adapter=adapter)

    async def _unload_lora(self, request: control_pb2.UnloadLoraRequest) -> control_pb2.UnloadLoraResponse:
        adapter = self._adapters.pop(request.lora_name, None)
        if adapter is None:
            raise NotFound(f"adapter {request.lora_name!r} is not loaded")
        await self._adapter_host.unload_adapter(request.lora_name)
        return control_pb2.UnloadLoraResponse(adapter=adapter)

    async def _loras(self, request: Any) -> control_pb2.ListLorasResponse:
        return control_pb2.ListLorasResponse(adapters=self._adapters.values())

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _receiver(self) -> WeightReceiver:
        if not isinstance(self.engine, WeightReceiver):
            raise InvalidRequest("the engine has no control of its policy")
        return self.engine

    @property
    def _adapter_host(self) -> AdapterHost:
        if not isinstance(self.engine, AdapterHost):
            raise InvalidRequest("the engine holds no adapters")
        return self.engine

    def _record(self, method: str, wire: pb.GenerateRequest, context: Context) -> None:
        metadata = {
            key: value if isinstance(value, str) else value.hex()
            for key, value in context.invocation_metadata() or ()
            if key != "user-agent" and not key.startswith("grpc-")
        }
        self.calls.append(RecordedCall(method=method, request=wire, metadata=metadata))
        self.called.set()

    def _guarded(self, call: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await call(request)
            except Exception as error:
                await self._abort(context, error)

        return guarded

    async def _abort(self, context: Context, error: Exception) -> None:
        if isinstance(error, EngineDied):
            await self.set_health(serving=False)
        if isinstance(error, _AlreadyExists):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, error.message)
        if isinstance(error, RollplaneError):
            code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
            await context.abort(code, error.message)
        raise error


class _AlreadyExists(Conflict):
    """A name that is taken."""
