"""Starting vLLM: from settings to a running `AsyncLLM`. Blocking, some twenty seconds; runs in a thread."""

import os
from pathlib import Path
from typing import Any, Final

from rollplane.engines.kv_mirror import KvMirror
from rollplane.engines.vllm.checkpoints import Checkpoint, read_checkpoint
from rollplane.engines.vllm.settings import VllmSettings, check_engine_args, engine_words, needs_v2_runner
from rollplane.engines.vllm.versions import VllmApi, parse_engine_args
from rollplane.engines.zmq_kv_events import ZmqKvEvents
from rollplane.errors import EngineDied, InvalidRequest, NotFound

_V2_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
_INSECURE: Final = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_REDIRECTS: Final = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"


def start_engine(settings: VllmSettings, api: VllmApi, *, kv_events_at: str) -> Any:
    """A loaded vLLM engine.

    Raises:
        InvalidRequest: engine arguments that vLLM or we refuse; naming them.
        EngineDied: vLLM could not start.
    """
    args = parse_engine_args(
        api, engine_words(settings, api.engine_fields, kv_events_at=kv_events_at, on_cpu=api.on_cpu)
    )
    check_engine_args(args)
    if os.environ.get(_INSECURE, "0") not in ("", "0"):
        raise InvalidRequest(
            f"{_INSECURE} is set: vLLM would then run code out of request payloads; unset it", param="environment"
        )
    os.environ[_REDIRECTS] = "0"  # an allowed host must not send us to another one
    needs_v2 = needs_v2_runner(args, line=api.line)
    if needs_v2 is not None:
        os.environ.setdefault(_V2_RUNNER, "1")
    try:
        config = args.create_engine_config()
    except InvalidRequest:
        raise
    except Exception as error:  # vLLM's own checks raise many kinds; all are about what it was started with
        reason = f" ({needs_v2} needs its model runner V2, {_V2_RUNNER}=1)" if needs_v2 is not None else ""
        raise InvalidRequest(
            f"vLLM {api.version} refuses to start{reason}: {type(error).__name__}: {error}", param="engine_args"
        ) from error
    try:
        engine: Any = api.AsyncLLM.from_vllm_config(
            config,
            enable_log_requests=args.enable_log_requests,
        )
    except Exception as error:  # the engine core runs in another process: its failure arrives as any kind
        raise EngineDied(f"vLLM {api.version} did not start: {type(error).__name__}: {error}") from error
    return engine


def read_loaded(engine: Any) -> Checkpoint | None:
    """The checkpoint the engine was loaded from; None where it has no safetensors to compare later ones with. Blocking."""
    model: str = engine.vllm_config.model_config.model
    try:
        return read_checkpoint(model if Path(model).is_dir() else _cached_snapshot(model))
    except (NotFound, InvalidRequest):
        return None


def follow_kv_events(engine: Any, mirror: KvMirror) -> ZmqKvEvents | None:
    """What the engine caches, into a mirror; None where it was started without telling it."""
    config = engine.vllm_config.kv_events_config
    caches = engine.vllm_config.cache_config.enable_prefix_caching
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq" or not caches:
        return None
    return ZmqKvEvents(mirror, endpoint=config.endpoint, replay_endpoint=config.replay_endpoint, topic=config.topic)


def _cached_snapshot(name: str) -> str:
    """The local files of a model that was loaded by its hub name; nothing is downloaded."""
    try:
        from huggingface_hub import snapshot_download

        path: str = snapshot_download(name, local_files_only=True)
    except Exception as error:  # the library's, the network's or the file system's: there are no local files
        raise NotFound(f"{name} has no local files", param="model_path") from error
    return path
