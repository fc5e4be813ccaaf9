"""From an address to facts: waits until the server is healthy, then asks who it is and refuses what cannot be served."""

import asyncio
import time
from typing import Final

import aiohttp
import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2

from rollplane.engines.grpc.channels import ChannelPool
from rollplane.engines.grpc.control import ControlCalls
from rollplane.engines.grpc.convert import MODALITIES, SAMPLING_FIELDS
from rollplane.engines.grpc.media import MediaModel, media_model
from rollplane.engines.grpc.model_facts import ModelFacts, read_model_facts
from rollplane.engines.grpc.proto import control_pb2 as pb
from rollplane.engines.grpc.services import CONTROL, INFERENCE
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.grpc.status import status_of
from rollplane.errors import EngineDied, InvalidRequest
from rollplane.protocol.arrays import INT32_MAX
from rollplane.protocol.info import Capabilities, EngineInfo, LoraCapability

HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
MAX_STOP_TOKEN_IDS: Final = 128
MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIAS: Final = 1024
_PROBE_S: Final = 2.0
_PAUSE_S: Final = 0.2


async def wait_until_healthy(pool: ChannelPool, *, timeout_s: float) -> None:
    """Return once both services are SERVING.

    Raises:
        EngineDied: not within `timeout_s`; the message has what was seen last.
    """
    deadline = time.monotonic() + timeout_s
    for service in (INFERENCE.full_name, CONTROL.full_name):
        while True:
            left_s = deadline - time.monotonic()
            seen = await probe(pool, service, timeout_s=max(0.05, min(_PROBE_S, left_s)))
            if seen is None:
                break
            if time.monotonic() + _PAUSE_S >= deadline:
                raise EngineDied(
                    f"{service} at {pool.settings.endpoint} was not healthy within {timeout_s:g} s: {seen}"
                )
            await asyncio.sleep(_PAUSE_S)


async def probe(pool: ChannelPool, service: str, *, timeout_s: float) -> str | None:
    """None where the service is SERVING, else what was seen instead."""
    check = pool.channel.unary_unary(
        HEALTH_CHECK,
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer: health_pb2.HealthCheckResponse | None = await check(
            health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, metadata=pool.metadata()
        )
    except grpc.aio.AioRpcError as error:
        code, details = status_of(error)
        return f"{code.name} {details}".strip()
    if answer is None:  # so gRPC hands on what could not be read
        return "an answer on its health that protobuf cannot read"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    known = health_pb2.HealthCheckResponse.ServingStatus
    return f"health {known.Name(answer.status) if answer.status in known.values() else answer.status}"


async def read_facts(control: ControlCalls, settings: GrpcSettings) -> tuple[EngineInfo, MediaModel, str]:
    """The engine's facts, from the server, its HTTP side, the model's directory and the settings, in this order; and where
    that directory is, if it is one.

    Raises:
        InvalidRequest: the server cannot serve this contract, or a fact is missing; the message has what was seen.
    """
    server, model = await asyncio.gather(control.server_info(), control.model_info())
    if server.api_version not in ("", "vllm"):
        raise InvalidRequest(f"the server speaks API version {server.api_version!r}, not 'vllm'", param="endpoint")
    if not model.supports_token_ids_input:
        raise InvalidRequest(f"the server's model {model.model_id!r} takes no token ids", param="endpoint")
    directory = settings.model_path or model.model_id
    facts = await asyncio.to_thread(read_model_facts, directory)
    check_server_defaults(facts, settings)
    world_size = await find_world_size(server.parallelism, settings)
    media = media_model(facts, settings, engine_version=server.engine_version)
    info = engine_info(server, model, facts=facts, settings=settings, world_size=world_size, media=media)
    return info, media, directory


def engine_info(
    server: pb.ServerInfo,
    model: pb.ModelInfo,
    *,
    facts: ModelFacts | None,
    settings: GrpcSettings,
    world_size: int,
    media: MediaModel,
) -> EngineInfo:
    """What is published: a capability only where the server reports it.

    Raw images and videos are taken only where the server is known not to normalise pixels itself: vLLM's Rust frontend has
    normalised them before, and the engine would do it once more.

    Raises:
        InvalidRequest: the server gives no context length or no room for a request, or has fewer LoRA slots than the settings say.
    """
    if server.max_model_len < 2:
        raise InvalidRequest(f"the server reports max_model_len {server.max_model_len}", param="endpoint")
    features: list[str] = []
    if model.supports_multimodal:
        features = (facts.modalities if facts is not None else []) or list(MODALITIES)
    pixels_once = media.normalises is False
    raw_media = [name for name in features if name == "audio" or pixels_once]
    slots = server.max_loras if model.supports_lora else 0
    if settings.max_loras is not None and settings.max_loras > slots:
        raise InvalidRequest(f"max_loras {settings.max_loras} is above the server's own, {slots}", param="max_loras")
    lora = LoraCapability(max=settings.max_loras or slots, rank=settings.max_lora_rank) if slots > 0 else None
    transfer = server.rl_capabilities
    theirs = model.served_model_name or model.model_id
    name = settings.served_model_name[0] if settings.served_model_name else theirs
    vocab = settings.vocab_size or (facts.vocab_size if facts is not None else None)
    return EngineInfo(
        engine="vllm-grpc",
        engine_version=server.engine_version,
        model=name,
        aliases=sorted({*settings.served_model_name, theirs, *model.served_model_aliases, model.model_id} - {name, ""}),
        max_model_len=server.max_model_len,
        vocab_bound=vocab or INT32_MAX,  # unknown here: the server checks
        max_num_seqs=server.max_running_requests or 256,
        max_logprobs=settings.max_logprobs,
        max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        max_allowed_token_ids=MAX_ALLOWED_TOKEN_IDS,
        max_logit_bias=MAX_LOGIT_BIAS,
        block_tokens=server.kv_block_size or None,
        eos_token_ids=facts.eos_token_ids if facts is not None else [],
        world_size=world_size,
        capabilities=Capabilities(
            logprobs_mode=settings.logprobs_mode,
            prompt_logprobs=True,
            stop_strings=True,
            priority=True,
            transfer_params=True,
            data_parallel_size=max(server.parallelism.data, 1),
            native_transfer=(transfer.weight_transfer_backend or None) if transfer.weight_transfer_enabled else None,
            sleep=transfer.sleep_mode_enabled,
            lora=lora,
            features=features,
            raw_media=raw_media,
            sampling_fields=list(SAMPLING_FIELDS),
        ),
    )


def check_server_defaults(facts: ModelFacts | None, settings: GrpcSettings) -> None:
    """Refuse a model whose generation config would bend sampling in a way the wire cannot override.

    Raises:
        InvalidRequest: naming the defaults.
    """
    if facts is not None and facts.stubborn_defaults and not settings.allow_server_defaults:
        named = ", ".join(f"{name} {value:g}" for name, value in facts.stubborn_defaults.items())
        raise InvalidRequest(
            f"the model's generation_config.json sets {named}, and 0 on vLLM's gRPC wire means that default: requests "
            "would be sampled otherwise than asked. Start vLLM with --generation-config vllm, or set "
            "allow_server_defaults",
            param="allow_server_defaults",
        )


async def find_world_size(parallelism: pb.ParallelismInfo, settings: GrpcSettings) -> int:
    """How many ranks receive weights; never derived, only read and checked.

    Raises:
        InvalidRequest: nobody says it, or what was said does not fit the parallelism.
    """
    size, source = int(parallelism.world_size), "GetServerInfo"
    if size == 0:
        if settings.http_endpoint is None:
            raise InvalidRequest(
                "GetServerInfo reports the world size 0 (an older server); name its HTTP side (--vllm-http-endpoint), "
                "which is asked instead",
                param="http_endpoint",
            )
        source = settings.http_endpoint.rstrip("/") + "/get_world_size"
        size = await _ask_world_size(source, timeout_s=settings.control_timeout_s)
    replica = parallelism.tensor * parallelism.pipeline
    if size < 1 or replica < 1 or size % replica:
        raise InvalidRequest(
            f"{source} reports the world size {size}, which is not a positive multiple of tensor parallelism "
            f"{parallelism.tensor} x pipeline parallelism {parallelism.pipeline}",
            param="endpoint",
        )
    return size


async def _ask_world_size(url: str, *, timeout_s: float) -> int:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            body = await answer.read()
            if answer.status != 200:
                hint = " (vLLM serves it with VLLM_SERVER_DEV_MODE=1)" if answer.status == 404 else ""
                raise InvalidRequest(f"{url} answered {answer.status}{hint}", param="http_endpoint")
    except (aiohttp.ClientError, OSError) as error:
        raise InvalidRequest(f"{url}: {type(error).__name__} {error}", param="http_endpoint") from None
    try:
        size = msgspec.json.decode(body, type=dict[str, int])["world_size"]
    except (msgspec.MsgspecError, KeyError):
        raise InvalidRequest(f"{url} answered {body[:200]!r}, not a world size", param="http_endpoint") from None
    return size
