"""What several workers of one model say of themselves, merged: only what holds for each of them. Pure."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rollplane.protocol.info import Capabilities, EngineInfo, LoraCapability

MUST_AGREE: Final = ("model", "vocab_bound", "max_model_len", "moe")
"""Facts that a request cannot have two of; a worker that differs in one is refused."""

_SMALLEST: Final = (
    "max_num_seqs",
    "max_logprobs",
    "max_stop_token_ids",
    "max_allowed_token_ids",
    "max_logit_bias",
)
_ALL: Final = (
    "native_generate",
    "stream",
    "tower_connector_lora",
    "routed_experts",
    "sampling_mask",
    "prompt_logprobs",
    "stop_strings",
    "priority",
    "transfer_params",
    "kv_events",
    "sleep",
)
_COMMON: Final = ("weight_transfer", "features", "raw_media", "sampling_fields", "extra_fields")


def disagreement(reference: EngineInfo, other: EngineInfo) -> str | None:
    """Why `other` cannot serve beside `reference`, by field and value; None where it can."""
    for name in MUST_AGREE:
        ours, theirs = getattr(reference, name), getattr(other, name)
        if ours != theirs:
            return f"its {name} is {theirs!r}, the fleet's {ours!r}"
    return None


def merge_infos(infos: Sequence[EngineInfo]) -> EngineInfo:
    """The facts of a fleet, from at least one worker's. Limits are the smallest, abilities those that all have."""
    first = infos[0]
    changes: dict[str, Any] = {name: _smallest([getattr(info, name) for info in infos]) for name in _SMALLEST}
    changes["aliases"] = _common([info.aliases for info in infos])
    for name in ("engine", "engine_version", "block_tokens"):
        values = [getattr(info, name) for info in infos]
        changes[name] = (
            values[0] if all(v == values[0] for v in values) else None if name == "block_tokens" else "mixed"
        )
    changes["dtype"] = first.dtype if all(info.dtype == first.dtype for info in infos) else None
    changes["world_size"] = sum(info.world_size for info in infos)
    changes["capabilities"] = merge_capabilities([info.capabilities for info in infos])
    return msgspec.structs.replace(first, **changes)


def merge_capabilities(all_: Sequence[Capabilities]) -> Capabilities:
    """What works on every worker."""
    first = all_[0]
    changes: dict[str, Any] = {name: all(getattr(c, name) for c in all_) for name in _ALL}
    changes |= {name: _common([getattr(c, name) for c in all_]) for name in _COMMON}
    changes["mask_needs_truncation"] = any(c.mask_needs_truncation for c in all_)
    changes["data_parallel_size"] = min(c.data_parallel_size for c in all_)
    if any(c.logprobs_mode != first.logprobs_mode for c in all_):
        changes["logprobs_mode"] = "unknown"
    if any(c.native_transfer != first.native_transfer for c in all_):
        changes["native_transfer"] = None
    loras = [c.lora for c in all_ if c.lora is not None]
    changes["lora"] = (
        LoraCapability(max=min(lora.max for lora in loras), rank=min(lora.rank for lora in loras))
        if len(loras) == len(all_)
        else None
    )
    return msgspec.structs.replace(first, **changes)


def _smallest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _common(lists: Sequence[list[str]]) -> list[str]:
    return [name for name in lists[0] if all(name in other for other in lists[1:])]
