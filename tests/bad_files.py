"""Checkpoints and adapters that no engine may take, made from good ones: each is refused by name and touches nothing."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def bad_checkpoints(root: Path, good: str) -> list[str]:
    """One that lacks a part of a fused tensor, of another shape, with values that are not finite, cut off, and none."""
    tensors = load_file(Path(good) / "model.safetensors")
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    spoiled = {
        "lacking": {key: value for key, value in tensors.items() if key != name},
        "shape": {**tensors, name: tensors[name][:-1].contiguous()},
        "nan": {**tensors, name: torch.full_like(tensors[name], float("nan"))},
    }
    for word, made in spoiled.items():
        (root / word).mkdir(parents=True)
        save_file(made, root / word / "model.safetensors")
    (root / "cut").mkdir()
    shutil.copy(Path(good) / "model.safetensors", root / "cut" / "model.safetensors")
    with (root / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    return [*(str(root / word) for word in (*spoiled, "cut")), str(root / "nowhere")]


def bad_adapters(root: Path, good: str) -> list[str]:
    """One of another model's width, without a partner, of a rank over every limit, of no module here, not finite, cut off,
    and none.
    """
    tensors = load_file(Path(good) / "adapter_model.safetensors")
    config = json.loads((Path(good) / "adapter_config.json").read_text())
    a = min(tensors)
    b = a.replace(".lora_A.", ".lora_B.")
    big = {key: value.repeat((64, 1) if ".lora_A." in key else (1, 64)) for key, value in tensors.items()}
    spoiled = {
        "width": ({**tensors, a: torch.cat([tensors[a], tensors[a]], dim=1)}, config),
        "partner": ({key: value for key, value in tensors.items() if key != b}, config),
        "rank": (big, {**config, "r": config["r"] * 64}),
        "module": ({key.replace("self_attn", "elsewhere"): value for key, value in tensors.items()}, config),
        "nan": ({**tensors, a: torch.full_like(tensors[a], float("nan"))}, config),
    }
    for word, (made, said) in spoiled.items():
        (root / word).mkdir(parents=True)
        save_file({key: value.contiguous() for key, value in made.items()}, root / word / "adapter_model.safetensors")
        (root / word / "adapter_config.json").write_text(json.dumps(said))
    shutil.copytree(good, root / "cut")
    with (root / "cut" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 8)
    return [*(str(root / word) for word in (*spoiled, "cut")), str(root / "nowhere")]
