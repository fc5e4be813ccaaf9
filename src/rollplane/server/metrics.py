"""What the server counts, in Prometheus' text form: our own `rollplane_*` names, and vLLM's.

One registry per app, none global. Counters move as requests move; gauges are read from the engine when scraped. An engine
that counts by itself (vLLM in this process) has its families on the same page; of those that both know, such as
`vllm:num_requests_waiting`, the page has ours, which count the requests that a pause holds before the engine too.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from rollplane.errors import EngineProtocolError, RollplaneError
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.response import GenerateResponse
from rollplane.server.policy_metrics import PolicyMetrics
from rollplane.server.vllm_metrics import COUNT_HELD, VllmMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_HOLDING = ("paused", "pausing", "updating")


class Metrics:
    """The counters and gauges of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)  # before the counters that it hands to
        to: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("rollplane_requests", "Generate requests by outcome", ["outcome", "stream"], **to)
        self.in_flight = Gauge("rollplane_requests_in_flight", "Generate requests now in this process", **to)
        self.prompt_tokens = Counter("rollplane_prompt_tokens", "Prompt tokens of answered requests", **to)
        self.completion_tokens = Counter("rollplane_completion_tokens", "Tokens returned", **to)
        self.cached_tokens = Counter("rollplane_cached_prompt_tokens", "Prompt tokens read from a cache", **to)
        self.latency = Histogram(
            "rollplane_request_seconds", "Arrival to last byte", ["stream"], buckets=_SECONDS, **to
        )
        self.first_token = Histogram(
            "rollplane_time_to_first_token_seconds", "Arrival to first token of a stream", buckets=_SECONDS, **to
        )
        self.floored = Counter("rollplane_floored_logprobs", "Alternatives whose log-probability was not finite", **to)
        self.breaches = Counter("rollplane_invariant_breaches", "Engine answers that broke the response contract", **to)
        self.admin = Counter(
            "rollplane_admin_calls", "Administration calls by operation and result", ["call", "result"], **to
        )
        self.alive = Gauge("rollplane_engine_alive", "1 while the engine lives", **to)
        self.state = Gauge("rollplane_engine_state", "1 for the present state", ["state"], **to)
        self.state_age = Gauge("rollplane_engine_state_age_seconds", "Age of the present state", **to)
        self.running = Gauge("rollplane_requests_running", "Requests that the engine runs", **to)
        self.waiting = Gauge("rollplane_requests_waiting", "Requests that wait, held ones included", **to)
        self.held = Gauge("rollplane_requests_held", "Requests held by a pause or an update", **to)
        self.stall = Gauge(
            "rollplane_engine_seconds_without_progress", "Age of the last progress while there is work", **to
        )
        self.policy = Gauge("rollplane_policy_version_info", "1 for the version that makes tokens", ["version"], **to)
        self.policy_age = Gauge("rollplane_policy_version_age_seconds", "How long this version has been current", **to)
        self.vllm = VllmMetrics(self.registry)
        self.worker_policy = PolicyMetrics(self.registry)
        # Finding the child of two labels costs more than counting, and these are counted with every request.
        self._whole = self.requests.labels(outcome="ok", stream="false")
        self._whole_latency = self.latency.labels(stream="false")
        # So many more than the counters say: adding here costs a tenth, and `collect` hands it over.
        self._answered = self._prompt_tokens = self._completion_tokens = 0
        self._state_since: tuple[str, float] = ("", 0.0)
        self._version_since: tuple[str, float] = ("", 0.0)

    def __repr__(self) -> str:
        return f"<Metrics at {self._version_since[0]!r}, {self._state_since[0] or 'not scraped'}>"

    def count_whole(self, seconds: float) -> None:
        """Count a request that was answered in one go, so long after it arrived."""
        self._answered += 1
        self._whole_latency.observe(seconds)

    def count_response(self, response: GenerateResponse) -> None:
        """Count what a whole answer says."""
        usage, floored = response.usage, response.served_by.floored_logprobs
        self._prompt_tokens += usage.prompt_tokens
        self._completion_tokens += usage.completion_tokens
        if usage.cached_tokens:
            self.cached_tokens.inc(usage.cached_tokens)
        if floored:
            self.floored.inc(floored)

    def describe(self) -> Iterable[Metric]:
        """No families of its own."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Bring the counters up to date, before the registry reads them. On the event loop, as all that counts."""
        counts = self._answered, self._prompt_tokens, self._completion_tokens
        self._answered = self._prompt_tokens = self._completion_tokens = 0  # first: none is handed over twice
        for counter, count in zip((self._whole, self.prompt_tokens, self.completion_tokens), counts, strict=True):
            counter.inc(count)
        return ()

    def count_error(self, error: RollplaneError, *, stream: bool) -> None:
        """Count a request that failed, by its error's code."""
        self.requests.labels(outcome=error.code, stream=str(stream).lower()).inc()
        if isinstance(error, EngineProtocolError):
            self.breaches.inc()

    def read_health(self, health: EngineHealth, *, info: EngineInfo | None, version: str | None) -> None:
        """Set the gauges from a moment's health. `info`: None before the engine says what it is."""
        now = time.time()
        self.alive.set(health.alive)
        if health.state != self._state_since[0]:
            self._state_since = (health.state, now)
            self.state.clear()
            self.state.labels(state=health.state).set(1)
        self.state_age.set(now - self._state_since[1])
        self.running.set(health.running)
        self.waiting.set(health.waiting)
        self.held.set(health.waiting if health.state in _HOLDING else 0)
        self.stall.set(health.last_progress_s)
        if version is not None:
            if version != self._version_since[0]:
                self._version_since = (version, now)
                self.policy.clear()
                self.policy.labels(version=version).set(1)
            self.policy_age.set(now - self._version_since[1])
        self.vllm.read(health, model=info.model if info is not None else "", info=info)

    def text(self, engine: Iterable[Metric] = ()) -> bytes:
        """The exposition.

        Args:
            engine: families that the engine counts itself.
        """
        return generate_latest(_Page(self.registry, [family for family in engine if family.name not in COUNT_HELD]))


class _Page(CollectorRegistry):
    """Two sources of families as one: each name once, the engine's before ours."""

    def __init__(self, ours: CollectorRegistry, engine: list[Metric]) -> None:
        super().__init__()
        self._ours = ours
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Every family, whole."""
        told = {family.name for family in self._engine}
        yield from (family for family in self._ours.collect() if family.name not in told)
        yield from self._engine
