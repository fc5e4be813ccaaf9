"""What a vLLM engine is started with: our few settings, and vLLM's own engine arguments for everything else."""

from typing import Any, Final

import msgspec

from rollplane.errors import InvalidRequest

WORKER_EXTENSION: Final = "rollplane.engines.vllm.worker_extension.WorkerExtension"

_DEFAULTS: Final = (
    ("scheduling_policy", ["--scheduling-policy", "priority"]),
    ("logprobs_mode", ["--logprobs-mode", "processed_logprobs"]),
    # Features come from renderers with normalised float pixels; normalising twice changes samples without an error.
    ("mm_device_do_normalize", ["--no-mm-device-do-normalize"]),
)
"""What we start vLLM with unless the caller says otherwise after `--`: argument's field, and the words."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a vLLM engine.

    `model`: checkpoint directory. `served_model_name`: names it is served under, the first is its main one; the directory
    where empty. `policy_version`: version of the first weights; the directory's name where None. `dtype`, `max_model_len`
    (tokens), `max_num_seqs`, `seed`: vLLM's arguments of these names, its own defaults where None. `engine_args`: any other
    of vLLM's engine arguments, as words; they win over the rest. `isolate_by_version`: cached KV is scoped by policy
    version, so that an update need not drop what kept requests hold; else an update makes them recompute.
    `received_weights_dir`: where weights from a trainer's broadcast lie until they are in place, and the last ones after
    it; None: in memory (`/dev/shm`) where there is room, else among the temporary files.
    `allow_untested_vllm`: go on with a vLLM release that was not tried.
    """

    model: str
    served_model_name: tuple[str, ...] = ()
    policy_version: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    seed: int | None = None
    engine_args: tuple[str, ...] = ()
    isolate_by_version: bool = True
    received_weights_dir: str | None = None
    allow_untested_vllm: bool = False


def engine_words(
    settings: VllmSettings, engine_fields: frozenset[str], *, kv_events_at: str, on_cpu: bool = False
) -> list[str]:
    """The words for vLLM's parser: our defaults first, then the caller's, which win.

    Args:
        engine_fields: the arguments this vLLM knows; a default it does not know is left out.
        kv_events_at: a directory for the sockets on which vLLM tells what it caches.
        on_cpu: this vLLM runs on a CPU.
    """
    words = ["--model", settings.model]
    for field, default in _DEFAULTS:
        if field in engine_fields:
            words += default
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{kv_events_at}/events",
        "replay_endpoint": f"ipc://{kv_events_at}/replay",
    }
    words += ["--kv-events-config", msgspec.json.encode(events).decode()]
    if on_cpu:
        # A seeded request whose prompt is computed in parts ends vLLM's CPU engine: its generators have no offset.
        words.append("--no-enable-chunked-prefill")
    words += ["--worker-extension-cls", WORKER_EXTENSION]
    if settings.served_model_name:
        words += ["--served-model-name", *settings.served_model_name]  # the label of vLLM's metrics
    for name in ("dtype", "max_model_len", "max_num_seqs", "seed"):
        if (value := getattr(settings, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *settings.engine_args]


def check_engine_args(args: Any) -> None:
    """Refuse engine arguments under which this engine could not keep its promises.

    Raises:
        InvalidRequest: naming the argument and the reason.
    """
    if args.worker_extension_cls != WORKER_EXTENSION:
        _refuse("worker-extension-cls", "is ours: weight updates go through it")
    if args.data_parallel_size > 1:
        _refuse("data-parallel-size", "above 1 is several engines; start one worker per rank")
    if args.logprobs_mode not in ("processed_logprobs", "raw_logprobs"):
        _refuse("logprobs-mode", f"{args.logprobs_mode} returns logits; use processed_logprobs or raw_logprobs")
    if getattr(args, "return_sampling_mask", False) and args.logprobs_mode != "processed_logprobs":
        _refuse("return-sampling-mask", "needs --logprobs-mode processed_logprobs, so that logprobs and masks agree")


def needs_v2_runner(args: Any, *, line: str) -> str | None:
    """The argument that works on vLLM's model runner V2 only, if one was given.

    Args:
        line: vLLM's release line; 0.29 returns routed experts on its first runner too.
    """
    fields = ("return_sampling_mask",) if line == "0.29" else ("enable_return_routed_experts", "return_sampling_mask")
    for field in fields:
        if getattr(args, field, False):
            return "--" + field.replace("_", "-")
    return None


def _refuse(name: str, says: str) -> None:
    raise InvalidRequest(f"vLLM argument --{name} {says}", param=f"engine_args.{name}")
