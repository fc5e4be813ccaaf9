"""Which vLLM is installed, where its parts are in that release, and the few of its insides that are read: here, and per token in
`per_token`.

Everything else in this package takes a `VllmApi`; nothing else imports vLLM. Supported are the releases in `SUPPORTED`;
an unknown one is refused by name, because a part that moved or changed its meaning would show as wrong samples.
"""

import asyncio
import importlib.metadata
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rollplane.engines.vllm.per_token import collect_logprobs, read_arrays_plainly, time_tokens_plainly
from rollplane.errors import InvalidRequest

SUPPORTED: Final = ("0.31", "0.29")
"""Release lines that were tried, newest first."""

BARRIER_TIMEOUT_S: Final = 5.0


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
    StatLogger: Any
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
        from vllm.v1.metrics.loggers import StatLoggerBase

        from vllm import sampling_params as sampling

        fields = frozenset(sampling.SamplingParams.__struct_fields__)
        if lacking := {"flat_logprobs", "skip_clone", "output_kind"} - fields:
            raise AttributeError(f"SamplingParams has no {sorted(lacking)[0]}")
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(f"vLLM {version} lacks a part that this release needs: {error}", param="engine") from error
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
        StatLogger=StatLoggerBase,
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


def watch(engine: Any, on_death: Callable[[], None]) -> None:
    """Begin to read the engine core's outputs, and say when that ends: the engine is gone then.

    Left alone, vLLM begins with the first request, and a death before it goes unseen.
    """
    read_arrays_plainly(engine.engine_core.decoder)
    time_tokens_plainly(engine.output_processor)
    engine._run_output_handler()
    engine.output_handler.add_done_callback(lambda _: on_death())


async def submit(engine: Any, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
    """Hand one request to the engine core; the collector that its outputs come in (`get`, `request_id`, `close`).

    `AsyncLLM.generate` is this call and a loop over the collector. The call alone says when a request is registered, and
    raises what is wrong with it before anything is awaited.
    """
    collector = await engine.add_request(request_id, prompt, params, **options)
    state = engine.output_processor.request_states.get(collector.request_id)
    if state is not None:
        collect_logprobs(state, params)
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


class _Turn:
    """Takes its turn among the engine core's outputs: when the handler reads it, all that came before are processed."""

    engine_index = 0
    timestamp = 0.0
    scheduler_stats = None

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    @property
    def outputs(self) -> list[Any]:
        self.reached.set()
        return []


async def settle(engine: Any) -> bool:
    """Wait until every output that has arrived is processed; False when the engine cannot say.

    A pause returns when the engine core is idle. Its last outputs have arrived by then, for they travel on the same
    socket as the pause's answer, but may not be counted yet.
    """
    if engine.errored:
        return False
    turn = _Turn()
    engine.engine_core.outputs_queue.put_nowait(turn)
    try:
        await asyncio.wait_for(turn.reached.wait(), BARRIER_TIMEOUT_S)
    except TimeoutError:
        return False
    return True


def fail_collector(collector: Any, error: Exception) -> None:
    """End a collector's reader with an error."""
    collector.put(error)


@dataclass
class Progress:
    """What the engine core said last: monotonic seconds, requests, share of the KV cache in use (0 to 1)."""

    moved_at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    preemptions: int = 0


def progress_logger(api: VllmApi, progress: Progress) -> Any:
    """A vLLM stat logger factory that keeps `progress` up to date; one call per step of the engine core."""

    class ProgressLogger(api.StatLogger):  # type: ignore[misc, name-defined]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """Nothing to set up: one record for all."""

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if iteration_stats is not None:
                progress.moved_at = time.monotonic()
                progress.preemptions += int(getattr(iteration_stats, "num_preempted_reqs", 0))
            if scheduler_stats is not None:
                progress.moved_at = time.monotonic()
                progress.running = int(scheduler_stats.num_running_reqs)
                progress.waiting = int(scheduler_stats.num_waiting_reqs)
                progress.kv_usage = float(scheduler_stats.kv_cache_usage)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return ProgressLogger


def keep_own_logger(engine: Any) -> None:
    """Drop vLLM's Prometheus logger, which it adds whatever it was told: a seventh of the API side's work per step."""
    manager = engine.logger_manager
    manager.stat_loggers = manager.stat_loggers[:1]


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


async def render_media(engine: Any, prompt: dict[str, Any], parts: list[tuple[str, str]]) -> Any:
    """Fetch and process raw media with vLLM's own renderer; the engine input, its prompt expanded.

    Args:
        prompt: `prompt_token_ids` and perhaps `cache_salt`.
        parts: (`image_url`, `audio_url` or `video_url`, URL) in prompt order.
    """
    from vllm.entrypoints.chat_utils import AsyncMultiModalItemTracker

    tracker = AsyncMultiModalItemTracker(engine.model_config)
    parser = tracker.create_parser()
    parse = {"image_url": parser.parse_image, "audio_url": parser.parse_audio, "video_url": parser.parse_video}
    for kind, url in parts:
        parse[kind](url, None)
    data, _ = await tracker.resolve_items()
    (rendered,) = await engine.renderer.render_cmpl_async([{**prompt, "multi_modal_data": data}])
    return rendered
