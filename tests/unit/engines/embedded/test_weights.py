import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import tiny
from transformers import AutoModelForCausalLM

from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.model import CausalModel, load_model
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.embedded.weights import CheckpointLayout, content_digest
from rollplane.errors import InvalidRequest, NotFound
from rollplane.protocol.admin import TensorMismatch

Change = Callable[[dict[str, torch.Tensor]], Any]


def copy_with(source: Path, target: Path, change: Change) -> Path:
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def snapshot(model: CausalModel) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.module.named_parameters()}


@pytest.mark.parametrize("make", [tiny.make_dense, tiny.make_moe, tiny.make_mixtral])
def test_every_family_is_copied_as_transformers_would_load_it(make: Any, tmp_path: Path) -> None:
    model = load_model(make(tmp_path / "a", layers=2))
    layout = CheckpointLayout(model)
    other = make(tmp_path / "b", layers=2, seed=1)
    layout.copy_in(layout.read(other))
    wanted = dict(AutoModelForCausalLM.from_pretrained(other).named_parameters())
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(EXPERT), f"missing {EXPERT}"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), "unexpected extra.weight"),
        (lambda t: t.update({EXPERT: t[EXPERT][:-1].clone()}), "up_proj.weight has shape"),
        (lambda t: t.update({EXPERT: t[EXPERT].to(torch.int8)}), "int8"),
        (lambda t: t[EXPERT].view(-1)[7:8].fill_(float("nan")), f"not finite are in {EXPERT}"),
        (lambda t: t[EXPERT].view(-1)[7:8].fill_(float("inf")), f"not finite are in {EXPERT}"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name_and_nothing_is_touched(
    change: Change, says: str, moe_dir: Path, tmp_path: Path
) -> None:
    model = load_model(moe_dir)
    before = snapshot(model)
    bad = copy_with(moe_dir, tmp_path / "bad", lambda t: (t.update({k: v + 1 for k, v in t.items()}), change(t)))
    with pytest.raises(InvalidRequest, match=says):
        CheckpointLayout(model).read(bad)
    assert all(torch.equal(before[n], p) for n, p in model.module.named_parameters())


def test_what_was_allowed_is_counted_and_named_and_the_other_kind_is_still_refused(
    moe_dir: Path, tmp_path: Path
) -> None:
    layout = CheckpointLayout(load_model(moe_dir))
    less = copy_with(moe_dir, tmp_path / "less", lambda t: t.pop(EXPERT))
    more = copy_with(moe_dir, tmp_path / "more", lambda t: t.update({"extra.weight": torch.full((1,), float("nan"))}))
    assert layout.read(moe_dir, allow_tensors=("missing", "unexpected")).ignored is None
    assert layout.read(less, allow_tensors=("missing",)).ignored == TensorMismatch(missing=1, missing_names=[EXPERT])
    found = layout.read(more, allow_tensors=("unexpected",))
    assert found.ignored == TensorMismatch(unexpected=1, unexpected_names=["extra.weight"])
    assert found.digest == layout.read(moe_dir).digest
    for path, other in ((less, "unexpected"), (more, "missing")):
        with pytest.raises(InvalidRequest, match="allow_tensors allows a kind"):
            layout.read(path, allow_tensors=(other,))


async def test_missing_tensors_that_are_allowed_keep_what_the_model_has_and_the_digest_is_of_the_whole(
    moe_dir: Path, tmp_path: Path
) -> None:
    partial = copy_with(
        moe_dir, tmp_path / "partial", lambda t: (t.update({k: v + 1 for k, v in t.items()}), t.pop(EXPERT))
    )
    kept = load_file(moe_dir / "model.safetensors")[EXPERT]
    whole = copy_with(moe_dir, tmp_path / "whole", lambda t: t.update({k: v + 1 for k, v in t.items() if k != EXPERT}))
    model = load_model(moe_dir)
    engine = EmbeddedEngine(EmbeddedSettings(model=str(moe_dir), threads=1), model=model)
    await engine.start()
    try:
        staged = await engine.stage_weights(str(partial), allow_tensors=("missing",))
        assert staged.digest == CheckpointLayout(model).read(whole).digest
        assert staged.ignored == TensorMismatch(missing=1, missing_names=[EXPERT])
        await engine.pause("keep")
        await engine.apply_weights(staged, version="v1")
        targets, wanted = CheckpointLayout(model).targets, load_file(whole / "model.safetensors")
        assert torch.equal(targets[EXPERT], kept)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in targets.items())
    finally:
        await engine.close()


def test_many_offending_tensors_are_counted(moe_dir: Path, tmp_path: Path) -> None:
    bad = copy_with(moe_dir, tmp_path / "bad", lambda t: [t.pop(n) for n in list(t) if ".experts." in n])
    with pytest.raises(InvalidRequest, match="and 40 more"):
        CheckpointLayout(load_model(moe_dir)).read(bad)


def test_a_damaged_file_is_refused(moe_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((moe_dir / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(InvalidRequest, match="not a readable safetensors file"):
        CheckpointLayout(load_model(moe_dir)).read(tmp_path)


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(moe: CausalModel, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        CheckpointLayout(moe).read(tmp_path)


def test_a_directory_without_weights_is_not_found(moe: CausalModel, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        CheckpointLayout(moe).read(tmp_path / "nowhere")
    with pytest.raises(NotFound, match="safetensors"):
        CheckpointLayout(moe).read(tmp_path)


def test_a_checkpoint_in_shards_is_read_by_its_index(moe: CausalModel, moe_dir: Path, tmp_path: Path) -> None:
    layout = CheckpointLayout(moe)
    AutoModelForCausalLM.from_pretrained(moe_dir).save_pretrained(tmp_path, max_shard_size="200KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    (tmp_path / "consolidated.safetensors").write_bytes((moe_dir / "model.safetensors").read_bytes())
    assert layout.read(tmp_path).digest == layout.read(moe_dir).digest
    shards[1].rename(shards[1].with_suffix(".part"))
    with pytest.raises(NotFound, match=shards[1].name):
        layout.read(tmp_path)
    save_file(load_file(shards[0]), shards[1])
    with pytest.raises(InvalidRequest, match="in two files"):
        layout.read(tmp_path)


def test_the_digest_is_of_the_content_not_of_the_files(moe: CausalModel, moe_dir: Path, tmp_path: Path) -> None:
    layout = CheckpointLayout(moe)
    tensors = load_file(moe_dir / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "cut").mkdir()
    save_file({n: tensors[n] for n in names[::2]}, tmp_path / "cut" / "model-1.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, tmp_path / "cut" / "model-2.safetensors")
    whole = layout.read(moe_dir)
    assert layout.read(tmp_path / "cut").digest == whole.digest
    assert whole.bytes == sum(t.numel() * 4 for t in tensors.values())
    changed = copy_with(moe_dir, tmp_path / "changed", lambda t: t[EXPERT].view(-1)[5:6].add_(1e-3))
    assert layout.read(changed).digest != whole.digest


def test_the_digest_tells_names_dtypes_and_shapes_apart() -> None:
    zeros = torch.zeros(4)
    variants = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.view(2, 2)},
        {"a": zeros.view(torch.int32)},
        {"a": zeros[:2], "b": zeros[2:]},
    ]
    assert len({content_digest(v) for v in variants}) == len(variants)


def test_a_tied_output_embedding_may_be_there_if_it_is_the_same(tmp_path: Path) -> None:
    path = tiny.make_dense(tmp_path / "tied", layers=1, tie_word_embeddings=True)
    layout = CheckpointLayout(load_model(path))
    layout.read(path)
    layout.read(copy_with(path, tmp_path / "same", lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"].clone()})))  # fmt: skip
    differs = copy_with(path, tmp_path / "differs", lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"] + 1}))  # fmt: skip
    with pytest.raises(InvalidRequest, match="ties them"):
        layout.read(differs)


def test_bfloat16_files_fit_a_float32_engine(moe_dir: Path, tmp_path: Path) -> None:
    half = copy_with(moe_dir, tmp_path / "half", lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    model = load_model(moe_dir)
    layout = CheckpointLayout(model)
    layout.copy_in(layout.read(half))
    wanted = load_file(half / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model.module.get_parameter("model.norm.weight"), wanted.float())
