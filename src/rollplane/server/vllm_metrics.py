"""The vLLM names that trainers' schedulers read, with vLLM's meanings, from any engine's health."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from rollplane.protocol.info import EngineHealth, EngineInfo

_HELD_STATES = ("paused", "pausing", "updating")

COUNT_HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason")
"""Names that are ours also where vLLM says them: it does not know the requests that a pause holds before it."""


class VllmMetrics:
    """Gauges and counters of one app; what an engine does not say is left out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        to: dict[str, Any] = {"labelnames": ["engine", "model_name"], "registry": registry}
        self._running = Gauge("vllm:num_requests_running", "Requests that the engine runs", **to)
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests that wait", **to)
        self._kv_usage = Gauge("vllm:kv_cache_usage_perc", "Share of KV cache in use, 0 to 1", **to)
        self._preemptions = Counter("vllm:num_preemptions", "Times a running request was put back to wait", **to)
        self._reasons = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait, for room (capacity) or for a pause or an update to end (deferred)",
            ["engine", "model_name", "reason"],
            registry=registry,
        )
        self._cache = Gauge(
            "vllm:cache_config_info",
            "1; the labels say how large the KV cache is",
            ["engine", "model_name", "block_size", "num_gpu_blocks", "kv_cache_size_tokens"],
            registry=registry,
        )
        self._preempted = 0

    def __repr__(self) -> str:
        return f"<VllmMetrics, {self._preempted} preemptions>"

    def read(self, health: EngineHealth, *, model: str, info: EngineInfo | None) -> None:
        """Set all from a moment's health. `info`: None before the engine says what it is."""
        labels = {"engine": "0", "model_name": model}
        self._running.labels(**labels).set(health.running)
        self._waiting.labels(**labels).set(health.waiting)
        held = health.waiting if health.state in _HELD_STATES else 0
        self._reasons.labels(**labels, reason="capacity").set(health.waiting - held)
        self._reasons.labels(**labels, reason="deferred").set(held)
        if health.kv_usage is not None:
            self._kv_usage.labels(**labels).set(health.kv_usage)
        preempted = health.counters.get("preemptions")
        if preempted is not None:
            self._preemptions.labels(**labels).inc(max(0, preempted - self._preempted))
            self._preempted = preempted
        if info is not None and info.kv_blocks is not None and info.block_tokens is not None:
            size = {
                "block_size": str(info.block_tokens),
                "num_gpu_blocks": str(info.kv_blocks),
                "kv_cache_size_tokens": str(info.kv_blocks * info.block_tokens),
            }
            self._cache.labels(**labels, **size).set(1)
