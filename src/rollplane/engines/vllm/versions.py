"""Which vLLM is installed, where its parts are in that release, and the few of its insides that are read: here, and what its
engine core sends in `core_reader`.

Everything else in this package takes a `VllmApi`; nothing else imports vLLM. Supported are the releases in `SUPPORTED`;
an unknown one is refused by name, because a part that moved or changed its meaning would show as wrong samples.
"""

import asyncio
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rollplane.engines.vllm.core_reader import CoreApi, CoreReader
from rollplane.engines.vllm.folded import fold
from rollplane.engines.vllm.step_stats import Progress, StepStats
from rollplane.errors import InvalidRequest

SUPPORTED: Final = ("0.31", "0.29")
"""Release lines that were tried, newest first."""


def found_version() -> str:
    """The installed vLLM's version, such as `0.31.0+cpu`.

    Raises:
        InvalidRequest: there is none.
    """
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise InvalidRequest(
            "the vllm engine needs vLLM, which is not installed (its CPU build also needs a distribution named vllm)",
            param="engine",
        ) from None


def check_version(version: str, *, allow_untested: bool = False) -> str:
    """The release line (`0.31`) of a version that may be used.

    Raises:
        InvalidRequest: a release that was not tried, unless `allow_untested`.
    """
    line = ".".join(version.split("+", 1)[0].split(".")[:2])
    if line not in SUPPORTED and not allow_untested:
        raise InvalidRequest(
            f"vLLM {version} is not one that this release was tried with ({', '.join(SUPPORTED)}); "
            "the engine option allow_untested_vllm=true goes on at your own risk",
            param="engine_option.allow_untested_vllm",
        )
    return line


@dataclass(frozen=True)
class VllmApi:
    """vLLM's names, wherever this release keeps them."""

    version: str
    line: str
    AsyncLLM: Any
    AsyncEngineArgs: Any
    ArgumentParser: Any
    SamplingParams: Any
    OutputKind: Any
    StructuredOutputs: Any
    RepetitionDetection: Any
    LoRARequest: Any
    ClientError: type[Exception]
    DeadError: type[Exception]
    tokens_input: Any
    mm_input: Any
    on_cpu: bool
    sampling_fields: frozenset[str]
    engine_fields: frozenset[str]


def load_api(*, allow_untested: bool = False) -> VllmApi:
    """Import vLLM and find its parts.

    Raises:
        InvalidRequest: no vLLM, one that was not tried, or one whose parts are elsewhere; naming the part.
    """
    version = found_version()
    line = check_version(version, allow_untested=allow_untested)
    # Standard output is for the line that programs read; vLLM's log, and that of the processes it starts, would come first.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.inputs import mm_input, tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError

        from vllm import sampling_params as sampling

        fields = frozenset(sampling.SamplingParams.__struct_fields__)
        if missing := {"flat_logprobs", "skip_clone", "output_kind"} - fields:
            raise AttributeError(f"SamplingParams has no {sorted(missing)[0]}")
    except (ImportError, AttributeError) as error:
        raise lacking(version, str(error)) from error
    return VllmApi(
        version=version,
        line=line,
        AsyncLLM=AsyncLLM,
        AsyncEngineArgs=AsyncEngineArgs,
        ArgumentParser=_argument_parser(),
        SamplingParams=sampling.SamplingParams,
        OutputKind=sampling.RequestOutputKind,
        StructuredOutputs=sampling.StructuredOutputsParams,
        RepetitionDetection=getattr(sampling, "RepetitionDetectionParams", None),
        LoRARequest=LoRARequest,
        ClientError=_client_error(),
        DeadError=EngineDeadError,
        tokens_input=tokens_input,
        mm_input=mm_input,
        on_cpu=bool(current_platform.is_cpu()),
        sampling_fields=fields,
        engine_fields=frozenset(AsyncEngineArgs.__dataclass_fields__),
    )


def _argument_parser() -> Any:
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    return FlexibleArgumentParser


def _client_error() -> type[Exception]:
    """What vLLM raises for a request that is wrong. Older releases raise plain ValueErrors."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return ValueError
    found: type[Exception] = VLLMClientError
    return found


def parse_engine_args(api: VllmApi, argv: list[str]) -> Any:
    """vLLM's own engine arguments, read by vLLM's own parser.

    Raises:
        InvalidRequest: an argument it does not know, or a value that does not fit.
    """
    parser = api.ArgumentParser(prog="vllm engine arguments", add_help=False)
    api.AsyncEngineArgs.add_cli_args(parser)

    def refuse(message: str) -> None:
        raise InvalidRequest(f"vLLM {api.version} does not take these engine arguments: {message}", param="engine_args")

    parser.error = refuse
    return api.AsyncEngineArgs.from_cli_args(parser.parse_args(argv))


def core_api(version: str) -> CoreApi:
    """What the engine core's messages are read with.

    Raises:
        InvalidRequest: a part that this release keeps elsewhere; naming it.
    """
    try:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.engine.core_client import _process_utility_output
        from vllm.v1.engine.exceptions import EngineDeadError
        from vllm.v1.metrics.stats import IterationStats, SchedulerStats
        from vllm.v1.serial_utils import MsgpackDecoder

        return CoreApi(
            Output=EngineCoreOutput,
            Outputs=EngineCoreOutputs,
            SchedulerStats=SchedulerStats,
            IterationStats=IterationStats,
            Decoder=MsgpackDecoder,
            DeadError=EngineDeadError,
            dead_message=EngineCoreProc.ENGINE_CORE_DEAD,
            finish_utility=_process_utility_output,
        )
    except (ImportError, AttributeError) as error:
        raise lacking(version, str(error)) from error


_PARTS: Final = (
    "add_request",
    "abort",
    "add_lora",
    "collective_rpc",
    "engine_core.resources.output_queue_task",
    "engine_core.resources.output_socket",
    "engine_core.utility_results",
    "errored",
    "get_supported_tasks",
    "logger_manager.stat_loggers",
    "model_config",
    "output_handler",
    "output_processor.process_outputs",
    "output_processor.propagate_error",
    "output_processor.request_states",
    "output_processor.update_scheduler_stats",
    "pause_generation",
    "remove_lora",
    "renderer.mm_processor_cache",
    "renderer.stat_mm_cache",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume_generation",
    "shutdown",
    "tokenizer",
    "vllm_config.cache_config.num_gpu_blocks",
    "vllm_config.model_config.max_logprobs",
    "vllm_config.parallel_config.world_size",
    "vllm_config.scheduler_config.policy",
)
"""What is read or called of a running `AsyncLLM`, beside its constructor."""


def check_parts(engine: Any, version: str) -> None:
    """Refuse an engine that lacks a part of `_PARTS`.

    Raises:
        InvalidRequest: naming the part.
    """
    for path in _PARTS:
        found, gone = engine, ""
        for name in path.split("."):
            gone = f"{gone}.{name}" if gone else name
            if not hasattr(found, name):
                raise lacking(version, f"AsyncLLM.{gone}")
            found = getattr(found, name)


def lacking(version: str, part: str) -> InvalidRequest:
    """Our error for a release whose parts are elsewhere."""
    return InvalidRequest(f"vLLM {version} lacks a part that this release needs: {part}", param="engine")


def watch(engine: Any, version: str, progress: Progress, on_death: Callable[[], None]) -> CoreReader:
    """Begin to read the engine core's outputs, and say when that ends: the engine is gone then.

    Left alone, vLLM begins with the first request, and a death before it goes unseen.

    Raises:
        InvalidRequest: a part that this release keeps elsewhere, or messages of another shape; naming it.
    """
    import zmq

    check_parts(engine, version)
    core = engine.engine_core
    if engine.output_handler is not None or core.resources.output_queue_task is not None:
        raise lacking(version, "AsyncLLM.output_handler (it reads already)")
    if hasattr(type(core), "process_engine_outputs"):
        raise lacking(version, f"{type(core).__name__} without process_engine_outputs (it serves several engines)")
    api = core_api(version)
    stats = StepStats(
        engine.logger_manager,
        SchedulerStats=api.SchedulerStats,
        IterationStats=api.IterationStats,
        cache_stats=engine.renderer.stat_mm_cache,
        progress=progress,
    )
    socket: Any = zmq.Socket.shadow(core.resources.output_socket)
    try:
        reader = CoreReader(engine, socket, api, stats=stats, on_end=on_death)
    except ValueError as error:
        raise lacking(version, str(error)) from error
    engine.output_handler = core.resources.output_queue_task = reader.start()
    return reader


async def shut_down(engine: Any, reader: CoreReader | None) -> None:
    """End an engine, its processes and its sockets.

    vLLM leaves its ZMQ context to the garbage collector, whose order can hang; nothing uses it any more.
    """
    if reader is not None:
        await reader.stop()
    await asyncio.to_thread(engine.shutdown)
    context = getattr(getattr(engine.engine_core, "resources", None), "ctx", None)
    if context is not None:
        await asyncio.to_thread(context.destroy, linger=0)


async def submit(engine: Any, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
    """Hand one request to the engine core; the collector that its outputs come in (`get`, `request_id`, `close`).

    `AsyncLLM.generate` is this call and a loop over the collector. The call alone says when a request is registered, and
    raises what is wrong with it before anything is awaited.
    """
    collector = await engine.add_request(request_id, prompt, params, **options)
    state = engine.output_processor.request_states.get(collector.request_id)
    if state is not None:
        fold(state, params)
    return collector


async def abort(engine: Any, collector: Any) -> None:
    """End one request; its collector gets a last output with finish reason `abort`."""
    await engine.abort(collector.request_id, internal=True)


def output_tokens(engine: Any, collector: Any) -> int | None:
    """How many tokens a registered request has now; None when it has ended.

    The count grows where outputs arrive from the engine core, whatever its reader has read.
    """
    state = engine.output_processor.request_states.get(collector.request_id)
    return None if state is None else int(state.detokenizer.num_output_tokens())


def fail_collector(collector: Any, error: Exception) -> None:
    """End a collector's reader with an error."""
    collector.put(error)


def make_sampling_params(api: VllmApi, fields: dict[str, Any]) -> Any:
    """vLLM's own record of plain fields (`convert.sampling_fields`).

    Raises:
        InvalidRequest: a nested object that vLLM does not read, or a value it refuses.
    """
    made = dict(fields)
    made["output_kind"] = getattr(api.OutputKind, made["output_kind"])
    for name, kind in (
        ("structured_outputs", api.StructuredOutputs),
        ("repetition_detection", api.RepetitionDetection),
    ):
        if made.get(name) is not None:
            made[name] = _nested(kind, made[name], param=f"sampling_params.{name}")
    try:
        return api.SamplingParams(**made)
    except (api.ClientError, ValueError, TypeError, msgspec.ValidationError) as error:
        raise refused(error) from error


def _nested(kind: Any, value: dict[str, Any], *, param: str) -> Any:
    unknown = sorted(set(value) - {name for name in kind.__dataclass_fields__ if not name.startswith("_")})
    if unknown:
        raise InvalidRequest(f"{param}.{unknown[0]} is not a field vLLM knows", param=f"{param}.{unknown[0]}")
    try:
        return kind(**value)
    except Exception as error:  # pydantic's, vLLM's or Python's own: whatever it is, the caller's object is refused
        raise InvalidRequest(f"{param}: {_first_line(error)}", param=param) from error


def refused(error: Exception) -> InvalidRequest:
    """Our error for a request that vLLM refuses, naming its field where vLLM does."""
    name = getattr(error, "parameter", None)
    param = f"sampling_params.{name}" if isinstance(name, str) else None
    return InvalidRequest(f"vLLM refuses the request: {_first_line(error)}", param=param)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3]) if lines else type(error).__name__


def media_api() -> Any:
    """vLLM's multimodal parts (`features.MediaApi` lists them), imported only for models that take media."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal import inputs as mm
    from vllm.v1.serial_utils import MsgpackDecoder

    class Media:
        registry = MULTIMODAL_REGISTRY
        PlaceholderRange = mm.PlaceholderRange
        KwargsItems = mm.MultiModalKwargsItems
        decode_item = MsgpackDecoder(t=mm.MultiModalKwargsItem).decode

    return Media


def transfer_init(info: dict[str, Any]) -> Any:
    """vLLM's record of a request to join a trainer's group."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=info)


def transfer_part(info: dict[str, Any]) -> Any:
    """vLLM's record of a part of the weights."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=info)


def features_tree(rendered: Any) -> dict[str, Any] | None:
    """The features of an engine input, as Generate's field takes them; None for text."""
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import extract_mm_features

    found = extract_mm_features(rendered)
    return None if found is None else found.model_dump(mode="json", exclude_none=True)


async def render_media(
    engine: Any, prompt: dict[str, Any], parts: list[tuple[str, str]], *, for_engine: bool = True
) -> Any:
    """Fetch and process raw media with vLLM's own renderer; the engine input, its prompt expanded.

    Args:
        prompt: `prompt_token_ids` and perhaps `cache_salt`.
        parts: (`image_url`, `audio_url` or `video_url`, URL) in prompt order.
        for_engine: the input is submitted. If not, vLLM's cache must not learn of it: it would leave these media out of the
            next request that has them, as known to the engine, which never saw them.
    """
    from vllm.entrypoints.chat_utils import AsyncMultiModalItemTracker

    tracker = AsyncMultiModalItemTracker(engine.model_config)
    parser = tracker.create_parser()
    parse = {"image_url": parser.parse_image, "audio_url": parser.parse_audio, "video_url": parser.parse_video}
    for kind, url in parts:
        parse[kind](url, None)
    data, _ = await tracker.resolve_items()
    options = {} if for_engine else {"skip_mm_cache": True}
    (rendered,) = await engine.renderer.render_cmpl_async([{**prompt, "multi_modal_data": data}], **options)
    return rendered
