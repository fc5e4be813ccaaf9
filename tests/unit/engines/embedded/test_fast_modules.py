from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import tiny
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from rollplane.engines.embedded import fast_modules
from rollplane.engines.embedded.fast_modules import EXPERTS, FAST_FAMILIES, experts_forward, norm_forward, rotate
from rollplane.engines.embedded.model import CausalModel, load_model
from rollplane.engines.embedded.slots import DecodeCache, PrefillCache, SlotTable

MAKERS: dict[str, Callable[..., Path]] = {
    "qwen3": tiny.make_dense,
    "qwen3_moe": tiny.make_moe,
    "mixtral": tiny.make_mixtral,
}


def replaced(model: CausalModel) -> list[str]:
    return sorted({type(m).__name__ for m in model.module.modules() if "forward" in vars(m)})


@pytest.mark.parametrize("kind", sorted(FAST_FAMILIES))
def test_decoding_gives_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / "m", layers=3)
    model, plain = load_model(path), AutoModelForCausalLM.from_pretrained(path)
    assert model.fast
    family = FAST_FAMILIES[kind]
    assert replaced(model) == sorted({family.model, family.norm, family.attention})
    table = SlotTable(model.shape, max_slots=4, dtype=torch.float32)
    ids = torch.randint(7, tiny.VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(0))
    caches = [DynamicCache(config=plain.config) for _ in ids]
    late = torch.tensor([0, 7, 2])  # rows of different lengths share a step
    with torch.inference_mode():
        for step in range(32):
            positions = (step - late).clamp(min=0)
            cache = DecodeCache(table, positions)
            token = ids[torch.arange(3), positions][:, None]
            visible = torch.arange(cache.keys)[None] <= positions[:, None]
            got = model.forward(token, positions=positions[:, None], visible=visible[:, None], cache=cache).logits
            for row in range(3):
                if step >= late[row]:
                    wanted = plain(token[row : row + 1], past_key_values=caches[row]).logits
                    assert (got[row, -1] - wanted[0, -1]).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", sorted(FAST_FAMILIES))
@pytest.mark.parametrize("every_position", [False, True])
def test_a_prompt_gives_the_logits_of_transformers(kind: str, every_position: bool, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path / "m", layers=3)
    model, plain = load_model(path), AutoModelForCausalLM.from_pretrained(path)
    table = SlotTable(model.shape, max_slots=4, dtype=torch.float32)
    ids = torch.randint(7, tiny.VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20).expand(2, -1)
    valid = torch.ones(2, 20, dtype=torch.bool)
    cache = PrefillCache(table, slots=torch.tensor([2, 0]), valid=valid, positions=positions, history=False)
    visible = valid[:, None].expand(-1, 20, -1).tril()
    with torch.inference_mode():
        got = model.forward(ids, positions=positions, visible=visible, cache=cache, every_position=every_position)
        wanted = plain(ids).logits if every_position else plain(ids).logits[:, -1:]
    assert got.logits.shape == wanted.shape
    assert (got.logits - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", sorted(FAST_FAMILIES))
def test_next_tokens_and_prompts_together_have_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    """Two running rows of different lengths, a prompt's second chunk and another's first; logits of some rows only."""
    path = MAKERS[kind](tmp_path / "m", layers=3)
    model, plain = load_model(path), AutoModelForCausalLM.from_pretrained(path)
    table = SlotTable(model.shape, max_slots=4, dtype=torch.float32)
    ids = torch.randint(7, tiny.VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(0))
    known = torch.tensor([9, 14, 5, 0])  # tokens of each slot that were computed before
    with torch.inference_mode():
        for slot, size in enumerate(known.tolist()):
            if size:
                positions, valid = torch.arange(size)[None], torch.ones(1, size, dtype=torch.bool)
                cache = PrefillCache(table, slots=torch.tensor([slot]), valid=valid, positions=positions, history=False)
                visible = valid[:, None].expand(-1, size, -1).tril()
                model.forward(ids[slot : slot + 1, :size], positions=positions, visible=visible, cache=cache)
        step = DecodeCache(table, known[:2], [(2, 5, 11), (3, 0, 4)])
        assert step.slots.tolist() == [0, 1] + [2] * 6 + [3] * 4
        assert step.positions.tolist() == [9, 14, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3]
        rows = torch.tensor([0, 1, 2, 7, 10, 11])
        got = model.forward(
            ids[step.slots, step.positions][:, None],
            positions=step.positions[:, None],
            visible=(torch.arange(step.keys)[None] <= known[:2, None])[:, None],
            cache=step,
            rows=rows,
        )
        wanted = plain(ids).logits[step.slots, step.positions][rows]
    assert got.logits.shape == (6, 1, tiny.VOCABULARY)
    assert (got.logits[:, 0] - wanted).abs().max() <= 1e-5
    if got.routes is not None:  # of every row, those without logits too
        assert got.routes.shape[:2] == (12, 1)


@pytest.mark.parametrize("kind", ["qwen2_moe", "olmoe"])
def test_other_families_keep_their_own_modules(kind: str, tmp_path: Path, make_other_moe: Callable[..., Path]) -> None:
    model = load_model(make_other_moe(kind, tmp_path / "m"))
    assert not model.fast
    assert replaced(model) == []
    assert model.config._experts_implementation == "grouped_mm"


def test_bfloat16_keeps_its_own_modules(moe_dir: Path) -> None:
    model = load_model(moe_dir, dtype="bfloat16")
    assert not model.fast
    assert replaced(model) == []


@pytest.mark.parametrize("broken", ["model_forward", "norm_forward", "attention_forward", "experts_forward"])
def test_a_stand_in_that_differs_is_taken_back(
    broken: str, moe_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = getattr(fast_modules, broken)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        if broken == "model_forward":
            out.logits = 1.01 * out.logits
            return out
        return (1.01 * out[0], None) if isinstance(out, tuple) else 1.01 * out

    monkeypatch.setattr(fast_modules, broken, wrong)
    model = load_model(moe_dir)
    monkeypatch.undo()
    fast_modules.register_experts()  # the right one again, by the name that others use
    assert not model.fast
    assert replaced(model) == []
    assert model.config._experts_implementation == "grouped_mm"
    assert "qwen3_moe differ from Transformers'" in caplog.text


def test_a_stand_in_that_fails_is_taken_back(moe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_modules, "norm_forward", lambda self, hidden: self.epsilon)
    model = load_model(moe_dir)
    assert not model.fast
    assert replaced(model) == []


def test_the_stand_ins_are_of_the_instance_not_of_the_class(moe: CausalModel, moe_dir: Path) -> None:
    assert moe.fast
    assert moe.config._experts_implementation == EXPERTS
    plain = AutoModelForCausalLM.from_pretrained(moe_dir)
    assert not [m for m in plain.modules() if "forward" in vars(m)]


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("routing", ["any", "one expert"])
def test_experts_give_what_transformers_own_loop_gives(tokens: int, routing: str, moe_dir: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(moe_dir, experts_implementation="eager")
    experts = plain.get_submodule("model.layers.0.mlp.experts")
    g = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, experts.hidden_dim, generator=g)
    index = torch.rand(tokens, experts.num_experts, generator=g).argsort(-1)[:, :2]
    if routing == "one expert":
        index = torch.tensor([[5, 3]]).repeat(tokens, 1)
    weights = torch.rand(tokens, 2, generator=g)
    with torch.inference_mode():
        assert torch.allclose(
            experts_forward(experts, hidden, index, weights), experts(hidden, index, weights), atol=1e-5
        )


def test_positions_rotate_as_transformers_does() -> None:
    x, y = torch.randn(3, 4, 1, 32), torch.randn(3, 2, 1, 32)
    angles = torch.rand(3, 1, 16).repeat(1, 1, 2)
    wanted, _ = apply_rotary_pos_emb(x, y, angles.cos(), angles.sin())
    assert torch.allclose(rotate(x[:, :, 0], angles.cos(), angles.sin()), wanted[:, :, 0], atol=1e-6)


def test_the_norm_is_that_of_transformers(moe: CausalModel, moe_dir: Path) -> None:
    norm = AutoModelForCausalLM.from_pretrained(moe_dir).get_submodule("model.norm")
    x = torch.randn(2, 3, 128) * torch.tensor([1e-4, 1.0, 1e4])[None, :, None]
    with torch.inference_mode():
        assert torch.allclose(norm_forward(norm, x), norm(x), rtol=1e-5, atol=0)
