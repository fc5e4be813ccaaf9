"""A started vLLM engine's facts, read from its own configuration: limits, abilities, and the shape of its model."""

from typing import Any

from rollplane.engines.vllm.checkpoints import Checkpoint, embedding_rows
from rollplane.engines.vllm.convert import served_fields
from rollplane.engines.vllm.features import MediaModel
from rollplane.engines.vllm.settings import VllmSettings
from rollplane.engines.vllm.versions import VllmApi
from rollplane.protocol.info import Capabilities, EngineInfo, LoraCapability, MoeShape

MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
"""Widths of vLLM's tables on its model runner V2; a longer list ends its engine there. Held to on every runner."""


def read_info(
    settings: VllmSettings, api: VllmApi, engine: Any, *, loaded: Checkpoint | None, media: MediaModel | None
) -> EngineInfo:
    """What this engine says of itself.

    Two things that end vLLM's CPU engine are not offered there. With LoRA it computes prompt logits with the LoRA indices
    of the sampled rows, which two prompts scored in one step do not survive. With chunked prefill a seeded request does
    not survive a prompt in parts, for its generator has no offset to go back to.
    """
    config = engine.vllm_config
    model, scheduler, parallel = config.model_config, config.scheduler_config, config.parallel_config
    names = list(settings.served_model_name) or [settings.model]
    endings = eos_token_ids(engine)
    moe = moe_shape(model)
    rows = embedding_rows(loaded) if loaded is not None else None
    tokenizer = engine.tokenizer is not None
    masks = bool(getattr(model, "return_sampling_mask", False))
    modalities = sorted(media.samples) if media is not None else []
    return EngineInfo(
        engine="vllm",
        engine_version=api.version,
        model=names[0],
        aliases=names[1:],
        max_model_len=int(model.max_model_len),
        vocab_bound=rows if rows is not None else int(model.get_vocab_size()),
        max_num_seqs=int(scheduler.max_num_seqs),
        max_logprobs=int(model.max_logprobs) if model.max_logprobs >= 0 else int(model.get_vocab_size()),
        max_stop_token_ids=MAX_STOP_TOKEN_IDS - len(endings),
        max_allowed_token_ids=MAX_ALLOWED_TOKEN_IDS,
        max_logit_bias=MAX_LOGIT_BIAS,
        block_tokens=int(config.cache_config.block_size) if config.cache_config.enable_prefix_caching else None,
        kv_blocks=int(config.cache_config.num_gpu_blocks) if config.cache_config.num_gpu_blocks else None,
        moe=moe,
        eos_token_ids=endings,
        world_size=int(parallel.world_size),
        dtype=str(model.dtype),
        capabilities=Capabilities(
            tower_connector_lora=bool(getattr(config.lora_config, "enable_tower_connector_lora", False)),
            routed_experts=moe is not None and returns_routes(config),
            sampling_mask=masks,
            mask_needs_truncation=masks,
            logprobs_mode="sampling" if model.logprobs_mode == "processed_logprobs" else "raw",
            prompt_logprobs=not (api.on_cpu and config.lora_config is not None),
            stop_strings=tokenizer,
            priority=scheduler.policy == "priority",
            kv_events=says_kv_events(config),
            transfer_params=bool(transfer_kinds(config)),
            weight_transfer=["disk"] if loaded is not None else [],
            native_transfer=native_backend(config, on_cpu=api.on_cpu, moe=moe),
            sleep=bool(getattr(model, "enable_sleep_mode", False)),
            lora=lora_capability(config.lora_config),
            features=modalities,
            raw_media=modalities,
            sampling_fields=served_fields(
                api.sampling_fields,
                tokenizer=tokenizer,
                seeds=not (api.on_cpu and scheduler.enable_chunked_prefill),
                v2_runner=bool(getattr(config, "use_v2_model_runner", False)),
                reasoning=bool(getattr(getattr(config, "reasoning_config", None), "enabled", False)),
            ),
        ),
    )


def lora_capability(lora_config: Any) -> LoraCapability | None:
    """How many adapters stay loaded (in memory; fewer run in one batch) and the largest rank."""
    if lora_config is None:
        return None
    held = lora_config.max_cpu_loras or lora_config.max_loras
    return LoraCapability(max=int(held), rank=int(lora_config.max_lora_rank))


def transfer_kinds(config: Any) -> frozenset[str]:
    """Which transfer parameters (`convert.TRANSFER_KEYS`) a connector of this engine reads."""
    configs = {"kv_transfer_params": "kv_transfer_config", "ec_transfer_params": "ec_transfer_config"}
    return frozenset(name for name, where in configs.items() if getattr(config, where, None) is not None)


def native_backend(config: Any, *, on_cpu: bool, moe: MoeShape | None) -> str | None:
    """vLLM's own transfer backend (`--weight-transfer-config`), where its updates are right: not of experts on a CPU, which
    vLLM packs once and then copies plain weights over.
    """
    transfer = getattr(config, "weight_transfer_config", None)
    return None if transfer is None or (on_cpu and moe is not None) else str(transfer.backend)


def says_kv_events(config: Any) -> bool:
    """Whether vLLM tells on ZMQ sockets which blocks its prefix cache holds."""
    events = config.kv_events_config
    told = events is not None and events.enable_kv_cache_events and events.publisher == "zmq"
    return bool(told and config.cache_config.enable_prefix_caching)


def returns_routes(config: Any) -> bool:
    """Whether the engine was started with route capture, wherever this release keeps the setting."""
    aux = getattr(config, "aux_output_config", None)
    holder = aux if aux is not None else config.model_config
    return bool(getattr(holder, "enable_return_routed_experts", False))


def moe_shape(model: Any) -> MoeShape | None:
    """Layers with experts, experts per token, experts per layer; None for a dense model."""
    experts = int(model.get_num_experts() or 0)
    text = model.hf_text_config
    top_k = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None)
    if experts < 1 or not top_k:
        return None
    return MoeShape(layers=moe_layers(text), top_k=int(top_k), num_experts=experts)


def moe_layers(text: Any) -> int:
    """How many decoder layers have experts, by the names that model families give it."""
    layers = int(text.num_hidden_layers)
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    step = int(getattr(text, "decoder_sparse_step", None) or getattr(text, "moe_layer_freq", None) or 1)
    first = int(getattr(text, "first_k_dense_replace", None) or 0)
    return sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers))


def eos_token_ids(engine: Any) -> list[int]:
    """The ids that end a choice unless `ignore_eos`: the tokenizer's and the generation config's."""
    found: list[int] = []
    listed = engine.vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    own = getattr(engine.tokenizer, "eos_token_id", None)
    for ids in (own, listed):
        for token_id in ids if isinstance(ids, (list, tuple)) else [ids]:
            if isinstance(token_id, int) and token_id not in found:
                found.append(token_id)
    return found
