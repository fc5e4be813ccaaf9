"""Facts about replay inside a trainer's forward pass, on tiny random Transformers models."""

import gc

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollplane.client import replay
from rollplane.client.replay_torch import force_routes, masked_logprobs, moe_routers

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS, TOP_K = 8, 2


def qwen3_moe():
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, head_dim=16, moe_intermediate_size=32, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    )


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K))


def gpt_oss():
    return GptOssForCausalLM(
        GptOssConfig(**SMALL, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, sliding_window=16)
    )


def deepseek_v3():
    """One dense layer before one MoE layer, and a router that first ranks groups of experts."""
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 2},
            moe_intermediate_size=32,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        )
    )


@pytest.fixture(params=[qwen3_moe, mixtral, gpt_oss, deepseek_v3], ids=lambda make: make.__name__)
def model(request):
    torch.manual_seed(0)
    return request.param().eval()


@pytest.fixture
def input_ids():
    return torch.randint(3, 64, (3, 11), generator=torch.Generator().manual_seed(1))


def natural_routes(model, input_ids):
    """What each `experts(hidden, top_k_index, ...)` call was given: [B, S, L, K]."""
    seen = []
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[1] if len(args) > 1 else kwargs["top_k_index"]), with_kwargs=True
        )
        for name, module in model.named_modules()
        if name.endswith("experts") and hasattr(module, "_is_expert_parallel")
    ]
    with torch.no_grad():
        logits = model(input_ids).logits
    for handle in handles:
        handle.remove()
    routes = torch.stack(seen, 1).view(*input_ids.shape, len(handles), TOP_K)
    assert routes.shape[2] == len(moe_routers(model))
    return routes, logits


def other_routes(routes):
    """Every token sent to the experts after its own."""
    return (routes + 1) % EXPERTS


def test_replaying_a_models_own_routes_changes_nothing(model, input_ids):
    routes, expected = natural_routes(model, input_ids)
    with torch.no_grad(), force_routes(model, routes):
        assert torch.equal(model(input_ids).logits, expected)


def test_other_routes_reach_the_experts(model, input_ids):
    routes, expected = natural_routes(model, input_ids)
    with force_routes(model, other_routes(routes)):
        used, logits = natural_routes(model, input_ids)
    assert torch.equal(used, other_routes(routes))
    assert not torch.allclose(logits, expected)


def test_unrecorded_rows_route_naturally(model, input_ids):
    routes, expected = natural_routes(model, input_ids)
    with torch.no_grad(), force_routes(model, torch.full_like(routes, replay.UNRECORDED)):
        assert torch.equal(model(input_ids).logits, expected)
    # Causal: forcing only the second half of each sequence leaves the logits of the first half as they were.
    mixed = other_routes(routes)
    mixed[:, :5] = replay.UNRECORDED
    with torch.no_grad(), force_routes(model, mixed):
        logits = model(input_ids).logits
    assert torch.allclose(logits[:, :5], expected[:, :5], atol=1e-6)
    assert not torch.allclose(logits[:, 5:], expected[:, 5:], atol=1e-3)


def test_the_model_is_as_before_afterwards(model, input_ids):
    routes, expected = natural_routes(model, input_ids)
    with pytest.raises(KeyError), force_routes(model, other_routes(routes)):
        raise KeyError
    assert all("forward" not in router.__dict__ for _, router in moe_routers(model))
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, expected)


def test_routers_get_gradients_through_the_recorded_choice(model, input_ids):
    routes, _ = natural_routes(model, input_ids)
    with force_routes(model, other_routes(routes)):
        model(input_ids).logits.logsumexp(-1).sum().backward()
    for _, router in moe_routers(model):
        assert router.weight.grad is not None
        assert torch.isfinite(router.weight.grad).all()
        assert router.weight.grad.abs().sum() > 0


def test_gradients_under_checkpointing_are_those_without(input_ids):
    torch.manual_seed(0)
    model = qwen3_moe().train()
    routes = other_routes(natural_routes(model, input_ids)[0])

    def gradients():
        model.zero_grad()
        with force_routes(model, routes):
            model(input_ids, use_cache=False).logits.logsumexp(-1).sum().backward()
        return {name: one.grad.clone() for name, one in model.named_parameters()}

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, grad in gradients().items():
        assert torch.allclose(grad, plain[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda routes: routes.float(), "float32; must be integers"),
        (lambda routes: routes[:, :, :1], r"\[3, 11, 1, 2\]; must be \[batch, tokens, 2, 2\]"),
        (lambda routes: routes[..., :1], r"must be \[batch, tokens, 2, 2\]"),
        (lambda routes: routes + EXPERTS, "must be -1 or 0..7"),
        (lambda routes: routes * torch.tensor([1, 0]) - torch.tensor([0, 1]), "mixes recorded experts and -1"),
        (lambda routes: torch.zeros_like(routes), "names one expert twice"),
    ],
)
def test_routes_that_do_not_fit_the_model_are_refused(input_ids, change, says):
    model = qwen3_moe().eval()
    routes, _ = natural_routes(model, input_ids)
    with pytest.raises(replay.ReplayError, match=says), force_routes(model, change(routes)):
        raise AssertionError("the context must not open")


def test_a_forward_pass_over_other_tokens_is_refused(input_ids):
    model = qwen3_moe().eval()
    routes, _ = natural_routes(model, input_ids)
    with pytest.raises(replay.ReplayError, match="got 30 tokens; the routes are for 33"), force_routes(model, routes):
        model(input_ids[:, :-1])


def test_a_context_without_a_forward_pass_is_refused(input_ids):
    model = qwen3_moe().eval()
    routes, _ = natural_routes(model, input_ids)
    with pytest.raises(replay.ReplayError, match="2 of 2 routers never ran"), force_routes(model, routes):
        gc.collect()


def test_a_router_that_does_not_rank_by_topk_is_an_error(input_ids, monkeypatch):
    model = qwen3_moe().eval()
    routes, _ = natural_routes(model, input_ids)
    router = moe_routers(model)[0][1]

    def sorting(hidden_states):
        logits = torch.nn.functional.linear(hidden_states, router.weight)
        values, ids = logits.softmax(-1).sort(-1, descending=True)
        return logits, values[:, :TOP_K], ids[:, :TOP_K]

    monkeypatch.setattr(router, "forward", sorting)
    says = r"router 'model\.layers\.0\.mlp\.gate' did not call torch\.topk over its 8 experts"
    with pytest.raises(replay.ReplayError, match=says), force_routes(model, routes):
        model(input_ids)


def test_families_that_cannot_replay_are_refused_by_name():
    refused = [
        PhimoeForCausalLM(PhimoeConfig(**SMALL, num_local_experts=EXPERTS)),
        JetMoeForCausalLM(
            JetMoeConfig(**{**SMALL, "num_key_value_heads": 2}, kv_channels=16, num_local_experts=EXPERTS)
        ),
    ]
    for model in refused:
        family = model.config.model_type
        with pytest.raises(replay.ReplayError, match=f"model family '{family}' cannot replay routes: "):
            moe_routers(model)


def test_llama4_is_refused_by_name():
    class Llama4(torch.nn.Module):
        class config:
            model_type = "llama4_text"

            @classmethod
            def get_text_config(cls):
                return cls

    with pytest.raises(replay.ReplayError, match="'llama4_text' cannot replay routes: its experts see every token"):
        moe_routers(Llama4())


def test_a_dense_model_has_nothing_to_replay():
    with pytest.raises(replay.ReplayError, match="'qwen3' records no router_logits"):
        moe_routers(Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)))


class TestMaskedLogprobs:
    logits = torch.randn(5, 13, generator=torch.Generator().manual_seed(2)) * 4
    token_ids = torch.tensor([3, 0, 12, 7, 7], dtype=torch.int32)

    def mask(self):
        keep = torch.rand(5, 13, generator=torch.Generator().manual_seed(3)) < 0.3
        keep[torch.arange(5), self.token_ids.long()] = True
        offsets = torch.cat([torch.zeros(1, dtype=torch.int32), keep.sum(1).cumsum(0).int()])
        return keep, keep.nonzero()[:, 1].int(), offsets

    def test_they_are_those_of_the_numpy_reference(self):
        _, ids, offsets = self.mask()
        got = masked_logprobs(self.logits.double(), self.token_ids, ids=ids, offsets=offsets, temperature=0.7)
        expected = replay.masked_logprobs(
            self.logits.numpy(), self.token_ids.numpy(), ids.numpy(), offsets.numpy(), temperature=0.7
        )
        assert np.allclose(got.numpy(), expected, atol=1e-6)

    def test_without_a_mask_they_are_a_log_softmax(self):
        got = masked_logprobs(self.logits, self.token_ids)
        expected = self.logits.log_softmax(-1).gather(1, self.token_ids.long()[:, None])[:, 0]
        assert torch.allclose(got, expected, atol=1e-6)

    def test_gradients_are_those_of_a_masked_softmax(self):
        keep, ids, offsets = self.mask()
        one, two = (self.logits.double().clone().requires_grad_() for _ in range(2))
        masked_logprobs(one, self.token_ids, ids=ids, offsets=offsets).sum().backward()
        two.masked_fill(~keep, -torch.inf).log_softmax(-1).gather(1, self.token_ids.long()[:, None]).sum().backward()
        assert torch.allclose(one.grad, two.grad, atol=1e-12)

    def test_what_does_not_fit_is_refused(self):
        _, ids, offsets = self.mask()
        with pytest.raises(replay.ReplayError, match=r"\[5, 13\] and token_ids \[4\]"):
            masked_logprobs(self.logits, self.token_ids[:4])
        with pytest.raises(replay.ReplayError, match="needs both ids and offsets"):
            masked_logprobs(self.logits, self.token_ids, ids=ids)
        with pytest.raises(replay.ReplayError, match="ending at"):
            masked_logprobs(self.logits, self.token_ids, ids=ids[:-1], offsets=offsets)
        with pytest.raises(replay.ReplayError, match="temperature must be above 0, got 0"):
            masked_logprobs(self.logits, self.token_ids, temperature=0)
