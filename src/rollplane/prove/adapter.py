"""A LoRA adapter on a trainer's model, saved in PEFT's layout."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TARGETS: Final = ("q_proj", "v_proj")
RANK: Final = 8
ALPHA: Final = 16


class Adapter:
    """Low-rank additions to the linear layers named in `TARGETS`; removed from the model by `detach`.

    Args:
        model: the base; its own parameters stay as they are.
        seed: of the first factor. The second is 0, so that a new adapter changes nothing.
    """

    def __init__(self, model: nn.Module, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.factors: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._hooks = []
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name.rsplit(".", 1)[-1] in TARGETS:
                down = torch.randn(RANK, layer.in_features, generator=generator) / layer.in_features**0.5
                pair = (nn.Parameter(down), nn.Parameter(torch.zeros(layer.out_features, RANK)))
                self.factors[name] = pair
                self._hooks.append(layer.register_forward_hook(_adding(*pair)))

    def __repr__(self) -> str:
        return f"<Adapter of {len(self.factors)} layers, rank {RANK}>"

    def parameters(self) -> list[nn.Parameter]:
        """All factors."""
        return [factor for pair in self.factors.values() for factor in pair]

    def detach(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def save(self, path: Path) -> Path:
        """Write PEFT's two files into a directory and return it."""
        path.mkdir(parents=True)
        tensors = {}
        for name, (down, up) in self.factors.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = down.detach().clone().contiguous()
            tensors[f"base_model.model.{name}.lora_B.weight"] = up.detach().clone().contiguous()
        save_file(tensors, path / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": list(TARGETS),
            "base_model_name_or_path": "",
            "inference_mode": True,
        }
        (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
        return path

    def load(self, path: Path) -> None:
        """Take the values of a saved adapter."""
        tensors = load_file(path / "adapter_model.safetensors")
        with torch.no_grad():
            for name, (down, up) in self.factors.items():
                down.copy_(tensors[f"base_model.model.{name}.lora_A.weight"])
                up.copy_(tensors[f"base_model.model.{name}.lora_B.weight"])


def _adding(down: nn.Parameter, up: nn.Parameter) -> Any:
    def hook(layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
        return made + (given[0] @ down.T) @ up.T * (ALPHA / RANK)

    return hook
