"""A tiny dense policy, its rollouts, its trainer, and what the trainer's model says of them.

The task needs no data: a token is worth 1 where its id is even, an answer what its tokens are worth on average. The model begins
at one half and moves within a step, which is all that is asked: each policy must be told from the one before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollplane.client.replay import Mismatch, mismatch
from rollplane.demo.figures import score
from rollplane.demo.rollouts import Rollouts

VOCABULARY: Final = 1024
EOS, PAD = 1, 0
PROMPTS, GROUP = 8, 8
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 32
CONTEXT_TOKENS: Final = 2048
LEARNING_RATE: Final = 3e-3
GRADIENT_NORM: Final = 1.0


def make_policy(*, seed: int) -> Any:
    """A random float32 Qwen3 of 0.9 million parameters, in eval mode."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).eval()


def load_policy(path: Path) -> Any:
    """The float32 model in a checkpoint directory, in eval mode."""
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def save_policy(model: Any, path: Path) -> Path:
    """Write a checkpoint directory and return it."""
    model.save_pretrained(path, safe_serialization=True)
    return path


def prompts_of(step: int, *, seed: int) -> list[list[int]]:
    """The prompts of a step: random ids, none of them special."""
    rng = np.random.default_rng([seed, step])
    found: list[list[int]] = rng.integers(2, VOCABULARY, (PROMPTS, PROMPT_TOKENS)).tolist()
    return found


def sampling_of(index: int, step: int, *, seed: int) -> dict[str, Any]:
    """The sampling parameters of one prompt's group of answers."""
    return {
        "temperature": 1.0,
        "n": GROUP,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "seed": seed * 10**6 + step * 10**4 + index * GROUP,
        "logprobs": 0,
    }


def lay_out(prompts: Sequence[Sequence[int]], choices: Sequence[Any]) -> Rollouts:
    """Answers as arrays, with rewards; `prompts` has the prompt of each choice."""
    outputs = [np.asarray(choice.token_ids, dtype=np.int32) for choice in choices]
    longest = max(len(prompt) + ids.size for prompt, ids in zip(prompts, outputs, strict=True))
    token_ids = np.zeros((len(choices), longest), dtype=np.int32)
    for row, (prompt, ids) in enumerate(zip(prompts, outputs, strict=True)):
        token_ids[row, : len(prompt)] = prompt
        token_ids[row, len(prompt) : len(prompt) + ids.size] = ids
    tokens = sum(ids.size for ids in outputs)
    return Rollouts(
        token_ids=token_ids,
        prompt_tokens=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        output_tokens=np.array([ids.size for ids in outputs], dtype=np.int32),
        logprobs=np.concatenate([choice.logprobs.values for choice in choices]).astype(np.float32),
        routes=np.zeros((len(choices), longest, 0, 0), dtype=np.int16),
        mask_ids=np.zeros(0, dtype=np.int32),
        mask_offsets=np.zeros(tokens + 1, dtype=np.int32),
        spans=np.array([spans_text(choice.policy_versions) for choice in choices]),
        rewards=np.array([float((ids % 2 == 0).mean()) for ids in outputs], dtype=np.float32),
    )


def spans_text(spans: Sequence[Any]) -> str:
    """Spans as the JSON text that `Rollouts` keeps."""
    return msgspec.json.encode([list(span) for span in spans]).decode()


def compare(model: Any, rollouts: Rollouts) -> Mismatch:
    """The mismatch of a model against what the engine said of its own samples."""
    with torch.no_grad():
        ours = score(model, rollouts, routes=False, mask=False).numpy()
    return mismatch(ours, rollouts.logprobs)


def train(model: Any, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> None:
    """One step of GRPO with the engine's log-probabilities as the old policy's."""
    ours = score(model, rollouts, routes=False, mask=False)
    ratio = (ours - torch.from_numpy(rollouts.logprobs)).exp()
    groups = rollouts.rewards.reshape(-1, GROUP)
    centred = groups - groups.mean(1, keepdims=True)
    advantage = (centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).reshape(-1).astype(np.float32)
    weight = torch.from_numpy(advantage[rollouts.choice_of_token])
    loss: Tensor = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], GRADIENT_NORM)
    optimizer.step()
