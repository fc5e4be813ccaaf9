import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tests.models import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def test_a_seed_names_one_set_of_weights(tmp_path: Path) -> None:
    first = tiny.make_dense(tmp_path / "a", seed=1)
    torch.rand(1)  # the caller's random state plays no part
    assert digest(tiny.make_dense(tmp_path / "b", seed=1)) == digest(first)
    assert digest(tiny.make_dense(tmp_path / "c", seed=2)) != digest(first)


def test_making_a_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    tiny.make_dense(tmp_path / "a", layers=1)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "mixtral"])
def test_every_decoder_loads_and_spreads_its_logits(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.MAKERS[kind](tmp_path / kind))
    with torch.no_grad():
        logits = model(torch.arange(10, 40)[None]).logits[0]
    assert logits.shape == (30, tiny.VOCABULARY)
    assert 0.8 < logits.std().item() < 1.5


def test_the_tokenizer_keeps_any_text_and_has_the_special_ids(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.make_dense(tmp_path / "a", layers=1))
    text = "def f(x):\n\treturn 'é' + '漢' + '🙂'"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == tiny.VOCABULARY
    assert tokenizer.eos_token_id == tiny.EOS_ID
    assert tokenizer.convert_tokens_to_ids(list(tiny.SPECIAL_TOKENS)) == list(range(len(tiny.SPECIAL_TOKENS)))


def test_an_image_in_a_chat_becomes_one_placeholder(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.make_vl(tmp_path / "a", layers=1))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids.count(tiny.IMAGE_PAD_ID) == ids.count(tiny.VISION_START_ID) == ids.count(tiny.VISION_END_ID) == 1


def test_an_adapter_changes_weights_by_its_strength(tmp_path: Path) -> None:
    base = tiny.make_moe(tmp_path / "base", layers=2)
    adapter = tiny.make_lora(tmp_path / "lora", base=base, rank=4, strength=0.5)
    tensors = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    delta = 2 * tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
    assert delta.shape == (128, 128)
    assert np.std(delta) == pytest.approx(0.5 * tiny.WEIGHT_STD, rel=0.2)
    assert len(tensors) == 2 * 2 * 4  # factors, layers, targets
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4


def test_an_adapter_for_no_module_is_refused(tmp_path: Path) -> None:
    base = tiny.make_dense(tmp_path / "base", layers=1)
    with pytest.raises(ValueError, match="w_proj"):
        tiny.make_lora(tmp_path / "lora", base=base, targets=("q_proj", "w_proj"))


def test_a_shared_model_is_made_once(tmp_path: Path) -> None:
    first = tiny.shared_model("qwen3", cache=tmp_path, layers=1)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny.shared_model("qwen3", cache=tmp_path, layers=1) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert tiny.shared_model("qwen3", cache=tmp_path, layers=1, seed=1) != first
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
