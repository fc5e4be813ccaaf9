"""Cheaper float32 forwards for modules of named families; all other modules keep Transformers' own.

A small model's decode step is bound by the number of operations dispatched, not by arithmetic. The functions here do
what the modules of Transformers that they stand in for do, in fewer operations, and call the same submodules (so that
LoRA's hooks and the expert hook see every call) on the same parameters (so that weights change in place). They are set
on instances, never on classes. `install` compares the logits before and after, and takes everything back if they differ
by more than rounding: a newer Transformers may have changed a module. bfloat16 models keep Transformers' modules, whose
rounding between operations is part of the result.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

EXPERTS: Final = "rollplane_grouped"
"""The name of `experts_forward` among Transformers' expert implementations."""

TOLERANCE: Final = 1e-4
"""Largest difference of logits, relative to the largest logit, that counts as rounding."""


@dataclass(frozen=True, kw_only=True)
class FastFamily:
    """Class names of the modules that have a stand-in.

    Args:
        model: the causal language model over a stack of pre-norm layers, each `self_attn` and `mlp`.
        norm: the RMS normalisation, with `weight` and `variance_epsilon`.
        attention: grouped-query attention with rotary positions over the whole head.
        experts: the model has fused, gated experts without biases.
    """

    model: str
    norm: str
    attention: str
    experts: bool


FAST_FAMILIES: Final = {
    "qwen3": FastFamily(model="Qwen3ForCausalLM", norm="Qwen3RMSNorm", attention="Qwen3Attention", experts=False),
    "qwen3_moe": FastFamily(
        model="Qwen3MoeForCausalLM", norm="Qwen3MoeRMSNorm", attention="Qwen3MoeAttention", experts=True
    ),
    "mixtral": FastFamily(
        model="MixtralForCausalLM", norm="MixtralRMSNorm", attention="MixtralAttention", experts=True
    ),
}
"""By the config's model type."""


def install(module: Any, logits: Callable[[], Tensor]) -> bool:
    """Give a float32 model of a known family its stand-ins; False, and nothing changed, for every other model.

    Args:
        module: the Transformers model.
        logits: runs a decode step on fixed inputs and returns its logits.
    """
    family = FAST_FAMILIES.get(module.config.model_type)
    if family is None or next(module.parameters()).dtype != torch.float32:
        return False
    wanted = logits()
    before = module.config._experts_implementation
    stand_ins: dict[str, Callable[..., Any]] = {
        family.model: model_forward,
        family.norm: norm_forward,
        family.attention: attention_forward,
    }
    changed: list[nn.Module] = [m for m in module.modules() if type(m).__name__ in stand_ins]
    for m in changed:
        m.forward = MethodType(stand_ins[type(m).__name__], m)
    if family.experts and hasattr(nn.functional, "grouped_mm"):
        register_experts()
        module.set_experts_implementation(EXPERTS)
    try:
        difference = float((logits() - wanted).abs().max() / wanted.abs().max())
    except (AttributeError, TypeError, RuntimeError):  # a module has other parts than ours expects
        difference = float("inf")
    if difference <= TOLERANCE:
        return True
    logger.warning(
        "the fast modules of %s differ from Transformers' by %g of the largest logit; Transformers' are used",
        module.config.model_type,
        difference,
    )
    for m in changed:
        del m.forward
    module.set_experts_implementation(before)
    return False


def register_experts() -> None:
    """Make `experts_forward` known to Transformers; once or again."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS, experts_forward)


def model_forward(
    self: Any,
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    cache: Any = None,
    rows: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """The stack of layers without the outputs that nobody asked for; without a cache, the class's own forward.

    Args:
        input_ids, position_ids: int64 [rows, tokens].
        attention_mask: added to the scores, [rows, 1, tokens, keys].
        logits_to_keep: logits of so many last positions; 0 for all.
        cache: gets the new keys and values of each layer.
        rows: int64, the rows that get logits; all if None.
    """
    from transformers.modeling_outputs import CausalLMOutput

    if cache is None:
        return type(self).forward(
            self,
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
    hidden_states = self.model.embed_tokens(input_ids)
    angles = self.model.rotary_emb(hidden_states, position_ids)
    for layer in self.model.layers:
        mixed, _ = layer.self_attn(layer.input_layernorm(hidden_states), angles, attention_mask, cache=cache)
        hidden_states = hidden_states + mixed
        hidden_states = hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))
    hidden_states = hidden_states[:, -logits_to_keep:]
    if rows is None:
        return CausalLMOutput(logits=self.lm_head(self.model.norm(hidden_states)))
    if self.lm_head._forward_hooks:  # an adapter's, which knows its rows among all
        return CausalLMOutput(logits=self.lm_head(self.model.norm(hidden_states)).index_select(0, rows))
    return CausalLMOutput(logits=self.lm_head(self.model.norm(hidden_states.index_select(0, rows))))


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMS normalisation of the last dimension: `weight * x / sqrt(mean(x^2) + epsilon)`."""
    return normalize(hidden_states, self.variance_epsilon).mul_(self.weight)


def normalize(x: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon)` over the last dimension."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_scalar(epsilon), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@functools.cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value)


@functools.cache
def _numbers(count: int) -> Tensor:
    return torch.arange(count)


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """One new token per row; anything else goes to the class's own forward.

    The query heads that share a key head are the rows of one matrix product, so keys and values are read once from the
    cache's own memory. Rows that the keys are not for are tokens of prompts, each in the cache's `chunks`.

    Args:
        hidden_states: [rows, 1, features].
        position_embeddings: cosines and sines [rows, 1, head dim].
        attention_mask: added to the scores, [rows, 1, 1, keys].
        cache: keeps the new key and value, and returns all [rows, key heads, keys, head dim].
    """
    rows, tokens = hidden_states.shape[:2]
    if tokens != 1 or cache is None or attention_mask is None:
        own: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, cache=cache, **kwargs
        )
        return own
    heads = (rows, -1, self.head_dim)
    query = self.q_proj(hidden_states).view(heads)
    queries = query.shape[1]
    both = torch.cat((query, self.k_proj(hidden_states).view(heads)), dim=1)
    if hasattr(self, "q_norm"):
        both = normalize(both, self.q_norm.variance_epsilon)
        both[:, :queries].mul_(self.q_norm.weight)
        both[:, queries:].mul_(self.k_norm.weight)
    both = rotate(both, *position_embeddings)
    query, key = both[:, :queries], both[:, queries:]
    value = self.v_proj(hidden_states).view(heads)
    keys, values = cache.update(key[:, :, None], value[:, :, None], self.layer_idx)
    batch = len(keys)
    grouped = (query[:batch] * self.scaling).view(batch * key.shape[1], self.num_key_value_groups, self.head_dim)
    scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2))
    scores.view(batch, queries, -1).add_(attention_mask[:, 0])
    mixed = torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(batch, 1, -1)
    if batch < rows:
        views = ((chunk, *cache.of_chunk(chunk, self.layer_idx)) for chunk in cache.chunks)
        chunks = [attend_chunk(query, *view, scaling=self.scaling) for view in views]
        mixed = torch.cat((mixed, *chunks))
    return self.o_proj(mixed), None


def attend_chunk(query: Tensor, chunk: Any, keys: Tensor, values: Tensor, *, scaling: float) -> Tensor:
    """What a prompt's rows [tokens] of `query` [rows, heads, dim] find: [tokens, 1, heads * dim].

    Args:
        chunk: its `rows` and their `mask`.
        keys, values: [key heads, keys, dim].
    """
    own = query[chunk.rows].transpose(0, 1)[None]
    mixed = nn.functional.scaled_dot_product_attention(
        own, keys[None], values[None], attn_mask=chunk.mask, scale=scaling, enable_gqa=True
    )
    return mixed[0].transpose(0, 1).flatten(1)[:, None]


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary positions: [rows, heads, dim] by [rows, 1, dim]; the second half of each head is the imaginary part."""
    real, imaginary = x.chunk(2, dim=-1)
    return (x * cosines).addcmul_(torch.cat((-imaginary, real), dim=-1), sines)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Tokens sorted by expert, one grouped product per projection; each token's results are added in top-k order.

    Args:
        hidden_states: [tokens, features].
        top_k_index: int64 [tokens, top_k].
        top_k_weights: [tokens, top_k].
    """
    tokens, top_k = top_k_index.shape
    expert_ids, order = top_k_index.reshape(-1).sort()
    ends = torch.searchsorted(expert_ids, _numbers(self.num_experts), right=True, out_int32=True)
    x = hidden_states.index_select(0, order // top_k)
    gate, up = nn.functional.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    x = nn.functional.grouped_mm(self.act_fn(gate).mul_(up), self.down_proj.transpose(1, 2), offs=ends)
    back = x.index_select(0, order.argsort()).view(tokens, top_k, -1)
    return back.mul_(top_k_weights[:, :, None]).sum(1)
