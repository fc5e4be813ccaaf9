"""Qwen3-MoE with a sparse block in plain torch that says which experts it chose.

vLLM asks every module with `layer_id` and `capture_fn` for its choices; its own fused block does so only on accelerators.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.model_executor.models import qwen3_moe
from vllm.model_executor.models.utils import extract_layer_index

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class TorchSparseBlock(nn.Module):
    """Experts' weights stacked by expert, [experts, out, in]; hidden states [tokens, hidden]."""

    def __init__(self, vllm_config: Any, prefix: str = "", **_: Any) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.layer_id = extract_layer_index(prefix)
        self.capture_fn: Callable[[torch.Tensor], None] | None = None
        self.chosen_per_token = config.num_experts_per_tok
        self.weights_sum_to_one = config.norm_topk_prob
        self.gate = self._weight(experts, hidden)
        self.gate_proj = self._weight(experts, inner, hidden)
        self.up_proj = self._weight(experts, inner, hidden)
        self.down_proj = self._weight(experts, hidden, inner)
        # What vLLM's model class reads of a sparse block.
        self.experts = None
        self.n_routed_experts = self.n_logical_experts = self.n_physical_experts = experts
        self.n_local_physical_experts = experts
        self.n_redundant_experts = 0

    @staticmethod
    def _weight(*shape: int) -> nn.Parameter:
        made = nn.Parameter(torch.empty(*shape), requires_grad=False)
        made.weight_loader = copy_into  # a reload in place goes through it
        return made

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        odds = F.linear(hidden, self.gate).float().softmax(dim=-1)
        weights, chosen = odds.topk(self.chosen_per_token, dim=-1)
        if self.weights_sum_to_one:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.capture_fn is not None:
            self.capture_fn(chosen.to(torch.int32))
        mixed = torch.zeros_like(hidden)
        for expert in range(self.gate.shape[0]):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            if token.numel():
                given = hidden[token]
                inner = F.silu(F.linear(given, self.gate_proj[expert])) * F.linear(given, self.up_proj[expert])
                made = F.linear(inner, self.down_proj[expert]) * weights[token, slot].unsqueeze(-1)
                mixed.index_add_(0, token, made.to(mixed.dtype))
        return mixed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take a checkpoint's tensors by their names in the block: `gate.weight`, `experts.3.up_proj.weight`."""
        loaded = set()
        for name, tensor in weights:
            words = name.split(".")
            target, expert = (words[2], int(words[1])) if words[0] == "experts" else (words[0], None)
            parameter = getattr(self, target)
            parameter.weight_loader(parameter, tensor, expert)
            loaded.add(target)
        return loaded


def copy_into(param: nn.Parameter, tensor: torch.Tensor, expert: int | None = None) -> None:
    """Write a checkpoint's tensor over a parameter, or over one expert's part of it.

    vLLM's reload in place writes another tensor in the argument `param`, by that name.
    """
    (param if expert is None else param[expert]).data.copy_(tensor)


class TorchQwen3Moe(qwen3_moe.Qwen3MoeForCausalLM):
    """vLLM's own Qwen3-MoE, built with the block above in place of its own."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        own, qwen3_moe.Qwen3MoeSparseMoeBlock = qwen3_moe.Qwen3MoeSparseMoeBlock, TorchSparseBlock
        try:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        finally:
            qwen3_moe.Qwen3MoeSparseMoeBlock = own
