import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.models import tiny
from transformers import AutoModelForCausalLM

from rollplane.engines.embedded.adapter_reader import LoraPair, read_contents
from rollplane.engines.embedded.lora import AdapterSet
from rollplane.engines.embedded.model import CausalModel, load_model
from rollplane.engines.embedded.sequence import Generation
from rollplane.errors import Conflict, InvalidRequest, NotFound

Make = Callable[..., Any]
Ask = Callable[..., Generation]


@pytest.fixture(scope="module")
def adapters(moe_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "a@1": tiny.make_lora(root / "a", base=moe_dir, seed=1),
        "b@1": tiny.make_lora(root / "b", base=moe_dir, seed=2, rank=4, targets=("q_proj", "o_proj")),
    }


@pytest.fixture
def own_moe(moe_dir: Path) -> CausalModel:
    return load_model(moe_dir)


def read(adapters: AdapterSet, directory: Path) -> dict[str, LoraPair]:
    """The pairs of an adapter that is not loaded."""
    slices = adapters.pairs(read_contents(directory))
    while True:
        try:
            next(slices)
        except StopIteration as done:
            pairs: dict[str, LoraPair] = done.value
            return pairs


def load(runner: Any, adapters: dict[str, Path]) -> Any:
    for name, path in adapters.items():
        runner.core.adapters.load(name, read(runner.core.adapters, path))
    return runner


def test_a_mixed_batch_gives_each_row_what_it_gets_alone(
    make_runner: Make, ask: Ask, own_moe: CausalModel, adapters: dict[str, Path]
) -> None:
    names = [None, "a@1", "b@1"]
    requests = [
        ask(f"r{i}", 5 + 7 * i, adapter=names[i % 3], max_tokens=6, logprobs=0, routed_experts=True) for i in range(9)
    ]
    together = load(make_runner(own_moe, max_slots=9, chunk_tokens=20), adapters).submit(*requests).finish()
    for request in requests:
        alone = load(make_runner(own_moe), adapters).submit(request).only()
        found = together[request.request_id, 0]
        assert found.tokens == alone.tokens
        assert np.allclose(found.logprobs, alone.logprobs, atol=1e-5)
        assert np.array_equal(found.end.routes.array, alone.end.routes.array)


def test_a_batch_leaves_layers_alone_that_only_other_adapters_touch(
    make_runner: Make, ask: Ask, own_moe: CausalModel, moe_dir: Path, tmp_path: Path
) -> None:
    """Adapters of other layers and other ranks in one decode step; one that touches further layers is loaded, not asked."""
    targets = {"q": ("q_proj",), "o": ("o_proj",), "wide": ("q_proj", "v_proj")}
    paths = {name: tiny.make_lora(tmp_path / name, base=moe_dir, rank=2 + i, targets=of, seed=i)
             for i, (name, of) in enumerate(targets.items())}  # fmt: skip
    runner = load(make_runner(own_moe), paths)
    for again in (False, True):
        requests = [
            ask(f"r{again}{i}", 9, adapter=name, max_tokens=4 + i, logprobs=0) for i, name in enumerate(("q", "o", "q"))
        ]
        if again:  # other contents under a name that was in the last batch
            runner.core.adapters.unload("o")
            paths["o"] = tiny.make_lora(tmp_path / "again", base=moe_dir, rank=3, targets=("o_proj",), seed=9)
            load(runner, {"o": paths["o"]})
        together = runner.submit(*requests).finish()
        for request in requests:
            alone = load(make_runner(own_moe), {request.adapter: paths[request.adapter]}).submit(request).only()
            assert together[request.request_id, 0].tokens == alone.tokens
            assert np.allclose(together[request.request_id, 0].logprobs, alone.logprobs, atol=1e-5)


def test_layers_that_see_flat_tokens_inside_a_moe_block_are_adapted_row_by_row(
    make_runner: Make, ask: Ask, make_other_moe: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    base = make_other_moe("qwen2_moe", tmp_path / "base")
    targets = ("gate_proj", "down_proj")  # of the shared expert, which gets [rows * tokens, features]
    paths = {f"{i}": tiny.make_lora(tmp_path / f"{i}", base=base, seed=i, targets=targets) for i in (1, 2)}
    requests = [ask(f"r{i}", 9, adapter=[None, "1", "2"][i % 3], max_tokens=6, logprobs=0) for i in range(6)]
    together = load(make_runner(load_model(base)), paths).submit(*requests).finish()
    for request in requests:
        alone = load(make_runner(load_model(base)), paths).submit(request).only()
        assert together[request.request_id, 0].tokens == alone.tokens
        assert np.allclose(together[request.request_id, 0].logprobs, alone.logprobs, atol=1e-5)
    assert together["r1", 0].logprobs[0] != pytest.approx(
        make_runner(load_model(base)).submit(ask("r1", 9, max_tokens=6, logprobs=0)).only().logprobs[0], abs=1e-4
    )


def test_an_adapter_is_what_peft_makes_of_it(
    make_runner: Make, ask: Ask, own_moe: CausalModel, adapters: dict[str, Path], moe_dir: Path
) -> None:
    for name, path in adapters.items():
        runner = load(make_runner(own_moe), {name: path})
        found = runner.submit(ask(adapter=name, logprobs=0)).only()
        reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moe_dir), path)
        ids = ask().prompt.tolist() + found.tokens
        with torch.no_grad():
            raw = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert np.allclose(found.logprobs, raw[range(11, 19), ids[12:]], atol=1e-4)
        base = make_runner(own_moe).submit(ask(logprobs=0)).only()
        assert found.tokens != base.tokens
        runner.core.adapters.unload(name)


def test_patterns_and_rank_stabilisation_scale_as_peft_does(
    make_runner: Make, ask: Ask, own_moe: CausalModel, adapters: dict[str, Path], moe_dir: Path, tmp_path: Path
) -> None:
    path = changed(adapters["a@1"], tmp_path / "p", {"use_rslora": True, "alpha_pattern": {"0.self_attn.q_proj": 40}})
    found = load(make_runner(own_moe), {"p": path}).submit(ask(adapter="p", logprobs=0)).only()
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moe_dir), path)
    ids = ask().prompt.tolist() + found.tokens
    with torch.no_grad():
        raw = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert np.allclose(found.logprobs, raw[range(11, 19), ids[12:]], atol=1e-4)


def test_unloading_leaves_the_base_model_as_it_was(
    make_runner: Make, ask: Ask, own_moe: CausalModel, adapters: dict[str, Path]
) -> None:
    before = make_runner(own_moe).submit(ask(logprobs=0)).only()
    runner = load(make_runner(own_moe), adapters)
    assert runner.core.adapters.names == ["a@1", "b@1"]
    for name in [*adapters, "never loaded"]:
        runner.core.adapters.unload(name)
    assert runner.core.adapters.names == []
    assert not any(m._forward_hooks for m in own_moe.module.modules())
    after = runner.submit(ask(logprobs=0)).only()
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)


def test_a_request_for_an_adapter_that_is_not_loaded_is_refused(make_runner: Make, ask: Ask) -> None:
    with pytest.raises(NotFound, match="ghost"):
        make_runner().submit(ask(adapter="ghost"))


def test_slots_and_names_are_bounded(make_runner: Make, own_moe: CausalModel, adapters: dict[str, Path]) -> None:
    core = make_runner(own_moe, max_adapters=1).core
    pairs = read(core.adapters, adapters["a@1"])
    core.adapters.load("a@1", pairs)
    with pytest.raises(Conflict, match="loaded already"):
        core.adapters.load("a@1", pairs)
    with pytest.raises(Conflict, match="all 1 adapter slots"):
        core.adapters.load("a@2", pairs)


def test_a_rank_over_the_limit_is_refused(make_runner: Make, own_moe: CausalModel, adapters: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="rank 8, the limit is 4"):
        read(make_runner(own_moe, max_adapter_rank=4).core.adapters, adapters["a@1"])


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"r": 16}, "its config says 16"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"setting_of_tomorrow": 3}, "setting_of_tomorrow=3"),
        ({"lora_alpha": "x"}, r"Expected `float \| null`, got `str` - at `\$.lora_alpha`"),
        ({"alpha_pattern": {"q_proj": []}}, "alpha_pattern"),
        ({"rank_pattern": {"(": 8}}, "unterminated subpattern"),
        ({"use_rslora": "yes"}, "use_rslora"),
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_name(
    setting: dict[str, Any], says: str, make_runner: Make, adapters: dict[str, Path], tmp_path: Path
) -> None:
    path = changed(adapters["a@1"], tmp_path / "x", setting)
    with pytest.raises(InvalidRequest, match=says):
        read(make_runner().core.adapters, path)


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj"), "layers.9"),
        (("lora_A", "lora_embedding_A"), "lora_embedding_A"),
        (("q_proj", "missing_proj"), "missing_proj is not a linear layer"),
    ],
)
def test_a_tensor_that_fits_no_layer_is_refused_by_name(
    rename: tuple[str, str], says: str, make_runner: Make, adapters: dict[str, Path], tmp_path: Path
) -> None:
    path = changed(adapters["a@1"], tmp_path / "x", {}, rename)
    with pytest.raises(InvalidRequest, match=says):
        read(make_runner().core.adapters, path)


def test_values_that_are_not_finite_are_refused_by_name(
    make_runner: Make, adapters: dict[str, Path], tmp_path: Path
) -> None:
    path = changed(adapters["a@1"], tmp_path / "x", {})
    tensors = load_file(path / "adapter_model.safetensors")
    key = sorted(tensors)[3]
    tensors[key][0, 0] = float("nan")
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(InvalidRequest, match=f"{key} holds values that are not finite"):
        read(make_runner().core.adapters, path)


def test_null_settings_are_the_defaults(make_runner: Make, adapters: dict[str, Path], tmp_path: Path) -> None:
    path = changed(adapters["a@1"], tmp_path / "x", {"alpha_pattern": None, "rank_pattern": None, "use_rslora": None})
    core = make_runner().core
    found, wanted = read(core.adapters, path), read(core.adapters, adapters["a@1"])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].b, wanted[name].b) for name in found)


def test_an_adapter_of_another_model_is_refused(make_runner: Make, tmp_path: Path) -> None:
    base = tiny.make_dense(tmp_path / "wide", layers=2, hidden_size=64)
    path = tiny.make_lora(tmp_path / "lora", base=base)
    with pytest.raises(InvalidRequest, match="the layer maps"):
        read(make_runner().core.adapters, path)


def test_a_directory_without_an_adapter_is_not_found(make_runner: Make, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"adapter_config\.json"):
        read(make_runner().core.adapters, tmp_path)


def changed(source: Path, target: Path, settings: dict[str, Any], rename: tuple[str, str] = ("", "")) -> Path:
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | settings))
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({k.replace(*rename): v for k, v in tensors.items()}, target / "adapter_model.safetensors")
    return target
