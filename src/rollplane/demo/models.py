"""The tiny Qwen3-MoE models of the demo: made here, saved as Hugging Face directories, never downloaded."""

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS = 32
LAYERS = 4


def make_model(*, vocabulary: int, top_k: int, seed: int, eos: int, pad: int) -> Qwen3MoeForCausalLM:
    """A random float32 model: hidden size 128, 4 layers, 32 experts, about 7 million parameters, in eval mode."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        attn_implementation="sdpa",
    )
    return _prepared(Qwen3MoeForCausalLM(config))


def load_model(path: Path) -> Qwen3MoeForCausalLM:
    """The float32 trainer's model from a checkpoint directory, in eval mode."""
    return _prepared(Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True))


def save_model(model: Qwen3MoeForCausalLM, path: Path) -> Path:
    """Write a checkpoint directory (safetensors and config) and return it."""
    model.save_pretrained(path, safe_serialization=True)
    return path


def _prepared(model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    model.set_experts_implementation("grouped_mm")
    return model.eval()
