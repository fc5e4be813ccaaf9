"""The trainer's adapter is the adapter that PEFT reads."""

from pathlib import Path

import torch
from peft import PeftModel

from rollplane.prove.adapter import Adapter
from rollplane.prove.policy import load_policy, make_policy, save_policy

IDS = torch.arange(2, 34)[None]


def test_peft_computes_the_same_from_the_saved_files(tmp_path: Path) -> None:
    model = make_policy(seed=0)
    base = save_policy(model, tmp_path / "base")
    plain = model(IDS).logits
    adapter = Adapter(model)
    with torch.no_grad():
        for _, up in adapter.factors.values():
            up.copy_(torch.randn(up.shape) * 0.05)
    ours = model(IDS).logits
    path = adapter.save(tmp_path / "adapter")

    theirs = PeftModel.from_pretrained(load_policy(base), str(path))(input_ids=IDS).logits

    assert not torch.allclose(ours, plain)
    assert torch.allclose(ours, theirs, atol=1e-4)
    adapter.detach()
    assert torch.equal(model(IDS).logits, plain)


def test_a_saved_adapter_is_read_back(tmp_path: Path) -> None:
    model = make_policy(seed=0)
    adapter = Adapter(model, seed=1)
    path = adapter.save(tmp_path / "adapter")
    other = make_policy(seed=0)
    again = Adapter(other, seed=2)

    again.load(path)

    assert torch.equal(other(IDS).logits, model(IDS).logits)
