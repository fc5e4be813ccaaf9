"""What transformers' forward makes of the weights that an engine says it has."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollplane.protocol.response import GenerateResponse

TOLERANCE_NATS = 1e-4
"""Two float32 forwards of the tiny models, in other orders of summation."""


LORA_SCALE = 2.0
"""lora_alpha / r of the tiny adapters."""


class Reference:
    """A tiny model in transformers, whose weights can be trained. `adapter`: its change is added to them."""

    def __init__(self, path: str | Path, *, adapter: str | None = None) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if adapter is not None:
            self._merge(load_file(Path(adapter) / "adapter_model.safetensors"))

    def _merge(self, factors: Mapping[str, Tensor]) -> None:
        tensors = self.tensors()
        for name, a in factors.items():
            if ".lora_A." in name:
                weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
                tensors[weight] += LORA_SCALE * factors[name.replace(".lora_A.", ".lora_B.")] @ a
        self.model.load_state_dict(tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, copied, by the names that a checkpoint has."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def train(self, seed: int, *, learning_rate: float = 0.01) -> None:
        """One step of Adam on random tokens."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(300, 1000, (2, 32), generator=generator)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)
        self.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """log-probabilities [tokens, vocabulary] in each place of an answer."""
        logits = self.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float(), dim=-1).numpy()

    def check(self, prompt: list[int], response: GenerateResponse) -> None:
        """Hold a greedy answer to these weights: every token is the best one, with this forward's log-probability."""
        choice = response.choices[0]
        tokens = choice.token_ids.tolist()
        rows = self.logprobs(prompt, tokens)
        own = rows[np.arange(len(tokens)), tokens]
        assert choice.logprobs is not None
        np.testing.assert_allclose(choice.logprobs.values, own, atol=TOLERANCE_NATS)
        np.testing.assert_allclose(own, rows.max(axis=1), atol=TOLERANCE_NATS)
