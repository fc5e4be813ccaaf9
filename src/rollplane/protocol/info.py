"""What an engine says of itself: limits that requests are checked against, and capabilities that are published."""

from typing import Any, Literal

import msgspec

from rollplane.protocol.events import LogprobsMode

EngineState = Literal["starting", "ready", "pausing", "paused", "updating", "asleep", "failed", "draining", "stopped"]


class LoraCapability(msgspec.Struct, frozen=True, kw_only=True):
    """How many adapters may be loaded at once, and the largest rank."""

    max: int
    rank: int


class MoeShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of routed experts: MoE layers, experts chosen per token, experts per layer."""

    layers: int
    top_k: int
    num_experts: int


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What works here; a thing is listed only when it works.

    `sampling_fields`: the sampling parameters this engine honours. `extra_fields`: unknown top-level fields it takes.
    `features`: modalities of preprocessed features. `raw_media`: modalities of content parts. `kv_events`: it says which
    KV blocks it caches. `weight_transfer`: `disk`, and the backends of a weight group. `native_transfer`: the backend of
    the engine's own weight transfer. `sleep`: it can give its device memory back.
    """

    native_generate: bool = True
    stream: bool = True
    tower_connector_lora: bool = False
    routed_experts: bool = False
    sampling_mask: bool = False
    mask_needs_truncation: bool = False
    logprobs_mode: LogprobsMode = "unknown"
    prompt_logprobs: bool = False
    stop_strings: bool = False
    priority: bool = False
    transfer_params: bool = False
    kv_events: bool = False
    data_parallel_size: int = 1
    weight_transfer: list[str] = msgspec.field(default_factory=list)
    native_transfer: str | None = None
    sleep: bool = False
    lora: LoraCapability | None = None
    features: list[str] = msgspec.field(default_factory=list)
    raw_media: list[str] = msgspec.field(default_factory=list)
    sampling_fields: list[str] = msgspec.field(default_factory=list)
    extra_fields: list[str] = msgspec.field(default_factory=list)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that do not change while an engine lives.

    `vocab_bound`: token ids are in [0, vocab_bound). `max_model_len`: prompt and completion together, tokens.
    `max_num_seqs`: sequences run at once, which bounds n. `block_tokens`: KV block size, None without a block cache.
    `kv_blocks`: how many of them fit, None where the engine does not say.
    Widths are the longest lists the engine takes, None where it has no limit of its own. `dtype`: of the weights by torch's name
    (`torch.bfloat16`), None where the engine does not say.
    """

    engine: str
    model: str
    max_model_len: int
    vocab_bound: int
    max_num_seqs: int
    engine_version: str = ""
    aliases: list[str] = msgspec.field(default_factory=list)
    max_logprobs: int = 20
    max_stop_token_ids: int | None = None
    max_allowed_token_ids: int | None = None
    max_logit_bias: int | None = None
    block_tokens: int | None = None
    kv_blocks: int | None = None
    moe: MoeShape | None = None
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    world_size: int = 1
    dtype: str | None = None
    capabilities: Capabilities = msgspec.field(default_factory=Capabilities)

    def serves(self, name: str) -> bool:
        """Whether `name` is the base model or one of its aliases (adapters are looked up elsewhere)."""
        return name == self.model or name in self.aliases


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A moment's health. `last_progress_s`: seconds since the engine last moved while it had work (0 when idle)."""

    alive: bool
    state: EngineState
    running: int = 0
    waiting: int = 0
    last_progress_s: float = 0.0
    kv_usage: float | None = None
    reason: str | None = None
    counters: dict[str, Any] = msgspec.field(default_factory=dict)
