"""A checkpoint against the one the engine was loaded from."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollplane.engines.vllm.checkpoints import (
    changed_files,
    check_adapter_fits,
    check_like,
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
        ({"extra": np.zeros(1, dtype=np.float32)}, "unknown extra"),
        (
            {"model.layers.0.q_proj.weight": np.ones((4, 8), dtype=np.float32)},
            r"shape \[4, 8\], the model's has \[8, 4\]",
        ),
        ({"model.layers.0.scale": np.array([3], dtype=np.float32)}, "dtype F32, the model's has I32"),
        ({"lm_head.weight": np.zeros((6, 4), dtype=np.float32)}, "unknown lm_head.weight"),
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
