"""What a trainer's scheduler reads under vLLM's names."""

from typing import Any

from prometheus_client import CollectorRegistry

from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.server.vllm_metrics import VllmMetrics

INFO = EngineInfo(
    engine="vllm", model="m", max_model_len=64, vocab_bound=9, max_num_seqs=2, block_tokens=32, kv_blocks=100
)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:{name}", {"engine": "0", "model_name": "m", **labels})


def read(info: EngineInfo | None = INFO, **health: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = VllmMetrics(registry)
    metrics.read(EngineHealth(alive=True, **{"state": "ready", **health}), model="m", info=info)
    return registry


def test_requests_that_wait_for_room_are_told_from_those_that_an_update_holds() -> None:
    for state, capacity, deferred in (("ready", 3, 0), ("updating", 0, 3)):
        registry = read(state=state, running=2, waiting=3)
        assert value(registry, "num_requests_waiting") == 3
        assert value(registry, "num_requests_waiting_by_reason", reason="capacity") == capacity
        assert value(registry, "num_requests_waiting_by_reason", reason="deferred") == deferred


def test_the_size_of_the_cache_is_in_the_labels() -> None:
    size = {"block_size": "32", "num_gpu_blocks": "100", "kv_cache_size_tokens": "3200"}
    assert value(read(), "cache_config_info", **size) == 1


def test_what_is_not_known_is_left_out() -> None:
    text = [sample.name for family in read(info=None).collect() for sample in family.samples]
    assert "vllm:cache_config_info" not in text
    assert "vllm:num_preemptions_total" not in text
    assert "vllm:kv_cache_usage_perc" not in text


def test_preemptions_only_rise() -> None:
    registry = CollectorRegistry()
    metrics = VllmMetrics(registry)
    for said in (2, 5, 1):  # an engine that began anew counts from 0
        health = EngineHealth(alive=True, state="ready", counters={"preemptions": said})
        metrics.read(health, model="m", info=INFO)
    assert value(registry, "num_preemptions_total") == 5
