import pytest

from rollplane.engines.embedded.families import MOE_FAMILIES, expert_counts, moe_family
from rollplane.errors import InvalidRequest


@pytest.mark.parametrize("kind", ["llama4_text", "jetmoe", "phimoe", "granitemoe", "dbrx"])
def test_an_unknown_mixture_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=kind):
        moe_family(kind, {"num_local_experts": 8, "ffn_config": {"moe_num_experts": 4}})


@pytest.mark.parametrize("kind", sorted(MOE_FAMILIES))
def test_a_known_mixture_is_served(kind: str) -> None:
    assert moe_family(kind, {"num_experts": 8}) is MOE_FAMILIES[kind]


def test_a_dense_model_has_no_family() -> None:
    assert moe_family("qwen3", {"num_hidden_layers": 4, "num_experts_per_tok": 2}) is None


def test_expert_counts_are_found_in_nested_configs() -> None:
    config = {"num_experts_per_tok": 2, "text_config": {"n_routed_experts": 64, "num_local_experts": 0}}
    assert expert_counts(config) == {"n_routed_experts": 64}
