import msgspec

from rollplane.protocol.info import Capabilities, EngineInfo, LoraCapability, MoeShape
from rollplane.rl.facts import MUST_AGREE, disagreement, merge_infos

BASE = EngineInfo(engine="mock", model="m", max_model_len=64, vocab_bound=100, max_num_seqs=8, world_size=2)


def with_(info: EngineInfo, **changes: object) -> EngineInfo:
    return msgspec.structs.replace(info, **changes)


def test_a_worker_that_differs_in_what_a_request_depends_on_is_named() -> None:
    others = {"model": "n", "max_model_len": 32, "vocab_bound": 99, "moe": MoeShape(layers=1, top_k=1, num_experts=2)}
    assert set(others) == set(MUST_AGREE)
    for name, value in others.items():
        assert disagreement(BASE, with_(BASE, **{name: value})) == (
            f"its {name} is {value!r}, the fleet's {getattr(BASE, name)!r}"
        )
    assert disagreement(BASE, with_(BASE, max_num_seqs=1)) is None


def test_merged_limits_are_the_smallest_and_abilities_those_that_all_have() -> None:
    one = with_(
        BASE,
        max_num_seqs=4,
        max_logit_bias=None,
        capabilities=Capabilities(
            routed_experts=True,
            sampling_mask=True,
            lora=LoraCapability(max=4, rank=16),
            sampling_fields=["top_k", "top_p"],
            logprobs_mode="sampling",
        ),
    )
    two = with_(
        BASE,
        engine="embedded",
        max_logit_bias=10,
        capabilities=Capabilities(
            routed_experts=True,
            mask_needs_truncation=True,
            lora=LoraCapability(max=2, rank=32),
            sampling_fields=["top_p", "min_p"],
            logprobs_mode="raw",
        ),
    )
    merged = merge_infos([one, two])
    assert (merged.max_num_seqs, merged.max_logit_bias, merged.engine, merged.world_size) == (4, 10, "mixed", 4)
    caps = merged.capabilities
    assert (caps.routed_experts, caps.sampling_mask, caps.mask_needs_truncation) == (True, False, True)
    assert (caps.lora, caps.sampling_fields, caps.logprobs_mode) == (
        LoraCapability(max=2, rank=16),
        ["top_p"],
        "unknown",
    )


def test_one_worker_without_adapters_makes_a_fleet_without_them() -> None:
    lora = with_(BASE, capabilities=Capabilities(lora=LoraCapability(max=4, rank=16)))
    assert merge_infos([lora, BASE]).capabilities.lora is None


def test_world_sizes_add_up_also_where_all_workers_are_alike() -> None:
    assert merge_infos([BASE, BASE, BASE]).world_size == 6
