"""The trainer of the image run: a LoRA of the decoder, trained by REINFORCE on the very pixels that the engine saw."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplane.demo.image.model import IMAGE_PAD
from rollplane.demo.image.pictures import Rendered, pixels_of

RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # of the decoder: the tower's have other names
LEARNING_RATE = 1e-2


class Trainer:
    """A float32 copy of the policy with a trainable adapter.

    Args:
        model: the checkpoint directory that the engine serves.
        pictures: every picture as it was rendered.
        support: token ids that sampling is restricted to, [W].
    """

    def __init__(self, model: Path, *, pictures: Sequence[Rendered], support: Sequence[int], seed: int) -> None:
        torch.manual_seed(seed)
        base = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, lora_dropout=0.0, bias="none")
        self._model: Any = get_peft_model(base, config).eval()
        self._trained = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=LEARNING_RATE, weight_decay=0.0)
        self._pictures: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        for each in pictures:
            pixels, grid = pixels_of(each)
            self._pictures.append((each.token_ids, torch.tensor(pixels), torch.tensor(grid)))
        self._support = torch.tensor(support)

    def __repr__(self) -> str:
        return f"<Trainer rank {RANK}, {len(self._pictures)} pictures>"

    def save(self, path: Path) -> Path:
        """Write the adapter as a PEFT directory."""
        self._model.save_pretrained(path, safe_serialization=True)
        return path

    def load(self, path: Path) -> None:
        """Take the values of a saved adapter."""
        set_peft_model_state_dict(self._model, load_peft_weights(str(path), device="cpu"))

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the adapter's weights."""
        return {name: each.detach().clone() for name, each in self._trained.items()}

    def score(self, tokens: Sequence[NDArray[np.integer[Any]]]) -> torch.Tensor:
        """Log-probabilities over the support of the sampled tokens, [pictures, choices, T].

        Args:
            tokens: per picture, sampled ids [choices, T].
        """
        scores = []
        for (prompt, pixels, grid), sampled in zip(self._pictures, tokens, strict=True):
            choices, length = sampled.shape
            answers = torch.from_numpy(sampled.astype(np.int64))
            ids = torch.cat([torch.tensor(prompt).expand(choices, -1), answers], dim=1)
            logits = self._model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=pixels.repeat(choices, 1),
                image_grid_thw=grid.expand(choices, -1),
                mm_token_type_ids=(ids == IMAGE_PAD).int(),
                use_cache=False,
            ).logits[:, -length - 1 : -1]
            places = (answers[..., None] == self._support).int().argmax(dim=-1, keepdim=True)
            scores.append(logits[..., self._support].log_softmax(-1).gather(-1, places).squeeze(-1))
        return torch.stack(scores)

    def score_with(self, weights: dict[str, torch.Tensor], tokens: Sequence[NDArray[np.integer[Any]]]) -> torch.Tensor:
        """`score` under other weights of the adapter, without gradients; its own are back afterwards."""
        own = self.weights()
        try:
            self._put(weights)
            with torch.no_grad():
                return self.score(tokens)
        finally:
            self._put(own)

    def learn(self, tokens: Sequence[NDArray[np.integer[Any]]], rewards: NDArray[np.floating[Any]]) -> float:
        """One step of REINFORCE with each picture's mean reward as its baseline; the loss.

        Args:
            tokens: see `score`.
            rewards: of every choice, [pictures, choices].
        """
        advantages = rewards - rewards.mean(axis=1, keepdims=True)
        loss = -(torch.from_numpy(advantages).float()[..., None] * self.score(tokens)).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, each in self._trained.items():
                each.copy_(weights[name])
