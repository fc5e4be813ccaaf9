import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from rollplane.engines.embedded.model import CausalModel, check_servable, load_model
from rollplane.errors import EngineFailed, InvalidRequest, NotFound


def test_the_shape_is_that_of_the_model(moe: CausalModel) -> None:
    s = moe.shape
    assert (s.vocab_tokens, s.context_tokens, s.layers, s.kv_heads, s.head_dim) == (tiny.VOCABULARY, 4096, 2, 2, 32)
    assert (s.moe_layers, s.experts, s.experts_per_token) == (2, 8, 2)


def test_a_dense_model_has_no_routes(dense_dir: Path) -> None:
    model = load_model(dense_dir)
    assert model.family is None
    assert (model.shape.moe_layers, model.shape.experts, model.shape.experts_per_token) == (0, 0, 0)


def test_end_of_sequence_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    path = tiny.make_dense(tmp_path / "m", layers=1)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9], "top_k": 1}))
    assert load_model(path).eos_token_ids == {2, 9}


def test_bfloat16_is_bfloat16(dense_dir: Path) -> None:
    assert load_model(dense_dir, dtype="bfloat16").dtype == torch.bfloat16


def test_the_context_can_be_made_shorter_than_trained(dense_dir: Path) -> None:
    assert load_model(dense_dir, max_context_tokens=64).shape.context_tokens == 64


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "phimoe", "num_local_experts": 4}, "phimoe"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"sliding_window": 16, "use_sliding_window": True}, "window of 16"),
        ({"kv_lora_rank": 8}, "latent attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_what_the_step_loop_cannot_serve_exactly_is_refused(change: dict[str, Any], says: str, dense_dir: Path) -> None:
    class Config:
        model_type = "qwen3"
        max_position_embeddings = 4096

        def __init__(self) -> None:
            vars(self).update(change)

        def to_dict(self) -> dict[str, Any]:
            return vars(self)

    with pytest.raises(InvalidRequest, match=says):
        check_servable(Config())


def test_a_window_no_shorter_than_the_context_is_served() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=64, max_position_embeddings=4096)
    assert check_servable(config, max_context_tokens=64) is None


def test_a_directory_without_a_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFound, match="safetensors"):
        load_model(tmp_path)


def test_an_unknown_dtype_is_refused(dense_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="float8"):
        load_model(dense_dir, dtype="float8")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe"])
def test_routes_are_the_routers_own_choice(kind: str, tmp_path: Path, make_other_moe: Callable[..., Path]) -> None:
    made = {"qwen3_moe": tiny.make_moe, "mixtral": tiny.make_mixtral}
    path = made[kind](tmp_path / "m", layers=2) if kind in made else make_other_moe(kind, tmp_path / "m")
    model = load_model(path)
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ids = torch.arange(20, 40)[None]
    causal = torch.ones(20, 20).tril().bool()[None]
    with torch.no_grad():
        out = model.forward(
            ids, positions=torch.arange(20)[None], visible=causal, cache=PassThrough(), every_position=True
        )
        wanted = reference(ids, output_router_logits=True)
    assert torch.allclose(out.logits, wanted.logits, atol=1e-4)
    assert out.routes is not None
    top_k = model.shape.experts_per_token
    router = torch.stack(wanted.router_logits, 1)
    assert torch.equal(out.routes[0].sort(-1).values, router.topk(top_k, dim=-1).indices.sort(-1).values)


class PassThrough:
    is_compileable = False

    def update(self, k: Any, v: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        return k, v

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_mask_sizes(self, query: int, *args: Any) -> tuple[int, int]:
        return query, 0


def test_a_forward_that_bypasses_the_expert_hook_is_an_error(moe_dir: Path) -> None:
    model = load_model(moe_dir)
    block = model.module.get_submodule("model.layers.1.mlp")
    block.forward = lambda hidden: hidden  # type: ignore[method-assign]
    zero = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(EngineFailed, match="1 of 2 MoE layers"):
        model.forward(zero, positions=zero, visible=torch.ones(1, 1, 1, dtype=torch.bool), cache=PassThrough())
