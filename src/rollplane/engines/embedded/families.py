"""MoE families whose router hook and checkpoint layout are known, by name. Every other MoE family is refused.

A family is known when (1) each of its MoE blocks calls `experts(hidden, top_k_index, top_k_weights)`, so that a hook
on that call sees every expert choice, and (2) its checkpoint keeps one tensor per expert and projection, which memory
fuses into `gate_up_proj` [experts, 2 * intermediate, hidden] and `down_proj` [experts, hidden, intermediate].
"""

import re
from dataclasses import dataclass
from typing import Any

from rollplane.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class MoeFamily:
    """How one MoE family names its experts on disk; in memory the block is always `mlp`.

    Args:
        block: the MoE block's name on disk.
        gate, up, down: the names of one expert's projections on disk.
    """

    block: str
    gate: str
    up: str
    down: str


_QWEN_LAYOUT = MoeFamily(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")

MOE_FAMILIES: dict[str, MoeFamily] = {
    "qwen3_moe": _QWEN_LAYOUT,
    "qwen2_moe": _QWEN_LAYOUT,
    "olmoe": _QWEN_LAYOUT,
    "mixtral": MoeFamily(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
}
"""Families tried: routes equal the router's own top-k, and a checkpoint's experts arrive where they belong."""

_EXPERT_COUNT = re.compile(r"(^|_)(num|n)_.*experts$|^moe_num_experts$")


def expert_counts(config: dict[str, Any]) -> dict[str, int]:
    """The config's positive expert counts (`num_experts`, `num_local_experts`, ...), nested configs included."""
    found: dict[str, int] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found.update(expert_counts(value))
        elif isinstance(value, int) and value > 0 and _EXPERT_COUNT.search(key) and "per_tok" not in key:
            found[key] = value
    return found


def moe_family(model_type: str, config: dict[str, Any]) -> MoeFamily | None:
    """The family of an MoE model; None for a dense model.

    Raises:
        InvalidRequest: an MoE model of a family that is not in the table: its routes could not be trusted.
    """
    if model_type in MOE_FAMILIES:
        return MOE_FAMILIES[model_type]
    counts = expert_counts(config)
    if counts:
        raise InvalidRequest(
            f"model type {model_type!r} is a mixture of experts ({counts}) whose router hook is not known; "
            f"known MoE families: {', '.join(sorted(MOE_FAMILIES))}",
            param="model_type",
        )
    return None
