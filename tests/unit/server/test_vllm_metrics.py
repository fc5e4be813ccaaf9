"""What a trainer's scheduler reads under vLLM's names."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.server.metrics import Metrics
from rollplane.server.vllm_metrics import COUNT_HELD, VllmMetrics

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


def family(name: str, value: float) -> Metric:
    found = GaugeMetricFamily(f"vllm:{name}", "vLLM's own", labels=["engine", "model_name"])
    found.add_metric(["0", "m"], value)
    return found


def test_an_engines_own_metrics_stand_beside_ours_each_name_once() -> None:
    metrics = Metrics()
    health = EngineHealth(alive=True, state="paused", running=1, waiting=3, kv_usage=0.5)
    metrics.read_health(health, info=INFO, version="v1")
    delays = HistogramMetricFamily("vllm:inter_token_latency_seconds", "vLLM's own", labels=["engine", "model_name"])
    delays.add_metric(["0", "m"], buckets=[("1.0", 2), ("+Inf", 3)], sum_value=4.0)
    theirs = [family("num_requests_waiting", 0), family("kv_cache_usage_perc", 0.25), delays]

    page = list(text_string_to_metric_families(metrics.text(theirs).decode()))

    names = [found.name for found in page]
    assert len(names) == len(set(names))
    values = {(s.name, s.labels.get("le")): s.value for found in page for s in found.samples}
    assert values["vllm:num_requests_waiting", None] == 3  # vLLM does not know what a pause holds before it
    assert values["vllm:kv_cache_usage_perc", None] == 0.25
    assert values["vllm:inter_token_latency_seconds_bucket", "+Inf"] == 3
    assert values["rollplane_requests_held", None] == 3


@pytest.mark.parametrize("name", COUNT_HELD)
def test_what_counts_held_requests_is_ours(name: str) -> None:
    metrics = Metrics()
    metrics.read_health(EngineHealth(alive=True, state="ready", running=7, waiting=7), info=INFO, version="v1")
    page = metrics.text([family(name.removeprefix("vllm:"), 99)]).decode()
    assert "vLLM's own" not in page
    assert f"\n{name}{{" in page
