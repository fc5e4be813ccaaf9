"""A checkpoint against the one the engine was loaded from."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from rollplane.engines.tensors import content_digest as digest_in_memory
from rollplane.engines.vllm.checkpoints import (
    changed_files,
    check_adapter_fits,
    check_like,
    check_values,
    content_digest,
    embedding_rows,
    read_checkpoint,
)
from rollplane.errors import InvalidRequest, NotFound

WEIGHTS = {
    "model.embed_tokens.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
    "model.layers.0.q_proj.weight": np.ones((8, 4), dtype=np.float32),
    "model.layers.0.scale": np.array([3], dtype=np.int32),
}


def write(path: Path, tensors: dict[str, np.ndarray], *, files: int = 1) -> str:
    path.mkdir()
    names = sorted(tensors)
    for i in range(files):
        save_file({n: tensors[n] for n in names[i::files]}, path / f"model-{i}.safetensors")
    return str(path)


def test_the_digest_is_of_the_contents_not_of_the_files(tmp_path: Path) -> None:
    one, three = (read_checkpoint(write(tmp_path / str(n), WEIGHTS, files=n)) for n in (1, 3))
    other = read_checkpoint(
        write(tmp_path / "other", {**WEIGHTS, "model.layers.0.scale": np.array([4], dtype=np.int32)})
    )

    assert content_digest(one) == content_digest(three) != content_digest(other)
    assert one.bytes == sum(w.nbytes for w in WEIGHTS.values())
    assert embedding_rows(one) == 6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.layers.0.q_proj.weight": None}, "missing model.layers.0.q_proj.weight"),
        ({"extra": np.zeros(1, dtype=np.float32)}, "unexpected extra"),
        (
            {"model.layers.0.q_proj.weight": np.ones((4, 8), dtype=np.float32)},
            r"shape \[4, 8\], the model's has \[8, 4\]",
        ),
        ({"model.layers.0.scale": np.array([3], dtype=np.float32)}, "dtype F32, the model's has I32"),
        ({"lm_head.weight": np.zeros((6, 4), dtype=np.float32)}, "unexpected lm_head.weight"),
    ],
)
def test_other_tensors_are_refused_by_name(tmp_path: Path, changes: dict[str, np.ndarray | None], says: str) -> None:
    loaded = read_checkpoint(write(tmp_path / "loaded", WEIGHTS))
    made = {name: tensor for name, tensor in {**WEIGHTS, **changes}.items() if tensor is not None}

    with pytest.raises(InvalidRequest, match=says):
        check_like(read_checkpoint(write(tmp_path / "new", made)), loaded, tied=False)


def test_another_float_and_a_tied_head_are_taken(tmp_path: Path) -> None:
    loaded = read_checkpoint(write(tmp_path / "loaded", WEIGHTS))
    half = {**WEIGHTS, "model.layers.0.q_proj.weight": np.ones((8, 4), dtype=np.float16)}
    half["lm_head.weight"] = np.zeros((6, 4), dtype=np.float32)

    check_like(read_checkpoint(write(tmp_path / "new", half)), loaded, tied=True)


def test_what_is_no_checkpoint_is_not_found_or_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(NotFound):
        read_checkpoint(str(tmp_path))
    path = Path(write(tmp_path / "cut", WEIGHTS)) / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InvalidRequest, match="ends past the file"):
        read_checkpoint(str(path.parent))
    path.write_bytes(b"not a checkpoint at all")
    with pytest.raises(InvalidRequest, match="not a readable safetensors file"):
        read_checkpoint(str(path.parent))


def test_files_are_known_again(tmp_path: Path) -> None:
    path = write(tmp_path / "step", WEIGHTS)
    stamps = read_checkpoint(path).stamps

    assert changed_files(path, stamps) is None
    os.utime(tmp_path / "step" / "model-0.safetensors", ns=(1, 1))
    assert changed_files(path, stamps) == "model-0.safetensors changed after it was checked"
    (tmp_path / "step" / "model-0.safetensors").unlink()
    assert "cannot be read any more" in str(changed_files(path, stamps))


def test_an_adapter_is_as_wide_as_its_module(tmp_path: Path) -> None:
    loaded = read_checkpoint(write(tmp_path / "loaded", WEIGHTS))
    prefix = "base_model.model.model.layers.0.q_proj"
    fits = {f"{prefix}.lora_A.weight": [2, 4], f"{prefix}.lora_B.weight": [8, 2]}

    check_adapter_fits(fits, loaded)
    for name, shape in ((f"{prefix}.lora_A.weight", [2, 8]), (f"{prefix}.lora_B.weight", [4, 2])):
        with pytest.raises(InvalidRequest, match="its module's weight has"):
            check_adapter_fits({**fits, name: shape}, loaded)


def test_an_adapter_of_modules_that_are_elsewhere_in_the_model_is_refused(tmp_path: Path) -> None:
    names = ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.experts.0.gate_proj", "model.visual.merger.mlp.0")
    save_torch({f"{name}.weight": torch.zeros(4, 4) for name in names}, tmp_path / "model.safetensors")
    loaded = read_checkpoint(str(tmp_path))
    known = (*names, "model.layers.7.mlp.experts.9.gate_proj", "lm_head", "model.layers.0.self_attn.qkv_proj")
    check_adapter_fits({f"base_model.model.{name}.lora_A.weight": [2, 4] for name in known}, loaded)
    for module in ("model.layers.0.elsewhere.k_proj", "model.layers.0.self_attn.gate_proj"):
        with pytest.raises(InvalidRequest, match=rf"{module}\.lora_B\.weight is of no module of this model"):
            check_adapter_fits({f"base_model.model.{module}.lora_B.weight": [4, 2]}, loaded)


def test_the_digest_is_that_of_the_same_tensors_in_memory(tmp_path: Path) -> None:
    """A trainer that sends weights and a worker that reads them from disk must know them by one name."""
    tensors = {
        "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "c": torch.tensor([1, 2], dtype=torch.int64),
        "d": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    save_torch(tensors, tmp_path / "model.safetensors")

    assert content_digest(read_checkpoint(str(tmp_path))) == digest_in_memory(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    tensors = {"good": torch.full((3,), torch.finfo(dtype).max, dtype=dtype), "bad": torch.ones(3, dtype=dtype)}
    save_torch(tensors, tmp_path / "model.safetensors")
    check_values(read_checkpoint(str(tmp_path)), tied=False)

    tensors["bad"][1] = value
    save_torch(tensors, tmp_path / "model.safetensors")

    with pytest.raises(InvalidRequest, match="not finite are in bad"):
        check_values(read_checkpoint(str(tmp_path)), tied=False)


def test_embeddings_that_the_model_ties_must_be_equal(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(4, 2)}
    save_torch(tensors, tmp_path / "model.safetensors")
    check_values(read_checkpoint(str(tmp_path)), tied=True)

    tensors["lm_head.weight"][3, 1] = 2.0
    save_torch(tensors, tmp_path / "model.safetensors")

    check_values(read_checkpoint(str(tmp_path)), tied=False)
    with pytest.raises(InvalidRequest, match=r"lm_head\.weight differs"):
        check_values(read_checkpoint(str(tmp_path)), tied=True, param="tensors")
