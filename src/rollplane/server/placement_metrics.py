"""Placement in Prometheus' form, read from the router when scraped."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rollplane.router.queue_counts import BUCKETS_S, QueueReport
from rollplane.router.report import PlacementReport


@runtime_checkable
class Placing(Protocol):
    """An engine that places requests on workers; `router.router.Router` is one."""

    def placement(self) -> PlacementReport:
        """What it knows now."""
        ...


class PlacementCollector(Collector):
    """Metric families of one router."""

    def __init__(self, router: Placing) -> None:
        self._router = router

    def __repr__(self) -> str:
        return f"<PlacementCollector of {self._router!r}>"

    def describe(self) -> list[Metric]:
        """Nothing: names are not asked for before there is a worker."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, now."""
        report = self._router.placement()
        labels = ["worker", "policy_version"]
        gauges = {
            "sequences": ("sequences", "Choices placed from here and not ended"),
            "load": ("load", "Sequences a worker works on, also of other frontends"),
            "prompt_tokens": ("prompt_tokens_in_flight", "Prompt tokens placed from here and not ended"),
            "cached_blocks": ("cached_blocks", "Blocks a worker said it caches"),
            "pending_tokens": ("pending_prompt_tokens", "Prompt tokens placed whose blocks are not reported yet"),
            "policy_lag": ("policy_lag", "Updates that a worker's version is behind the newest"),
            "routable": ("routable", "1 while a worker may get requests"),
        }
        for field, (name, text) in gauges.items():
            family = GaugeMetricFamily(f"rollplane_worker_{name}", text, labels=labels)
            for worker in report.workers:
                value = getattr(worker, field)
                if value is not None:
                    family.add_metric([worker.url, worker.policy_version or ""], float(value))
            yield family
        circuits = GaugeMetricFamily("rollplane_worker_circuit", "1 for a circuit's state", labels=["worker", "state"])
        for worker in report.workers:
            circuits.add_metric([worker.url, worker.circuit], 1.0)
        yield circuits
        observed = report.observed
        yield CounterMetricFamily(
            "rollplane_predicted_cached_prompt_tokens",
            "Prompt tokens that placement expected to be cached, of answers that say what was",
            value=observed.predicted_tokens,
        )
        yield CounterMetricFamily(
            "rollplane_actual_cached_prompt_tokens",
            "Prompt tokens that were cached, of answers that placement had an expectation of",
            value=observed.cached_tokens,
        )
        wrong = CounterMetricFamily(
            "rollplane_mispredicted_cached_prompt_tokens",
            "Prompt tokens expected and not cached (over), or cached and not expected (under)",
            labels=["direction"],
        )
        wrong.add_metric(["over"], observed.over_tokens)
        wrong.add_metric(["under"], observed.under_tokens)
        yield wrong
        yield from queue_families(report.queues)
        if report.index is None:
            return
        blocks = GaugeMetricFamily("rollplane_prefix_index_blocks", "Blocks in the prefix index", labels=["kind"])
        for kind in ("blocks", "forgotten", "predicted"):
            blocks.add_metric(["reported" if kind == "blocks" else kind], getattr(report.index, kind))
        yield blocks
        left_out = CounterMetricFamily(
            "rollplane_prefix_index_left_out",
            "What did not get in or had to go: blocks of an unknown parent, evicted ones; batches of an older generation",
            labels=["why"],
        )
        for why, field in (("orphan", "orphans"), ("evicted", "evicted"), ("stale", "stale")):
            left_out.add_metric([why], getattr(report.index, field))
        yield left_out


def queue_families(queues: Sequence[QueueReport]) -> Iterator[Metric]:
    """How long each fleet's queue is, how long requests waited there, and which were turned away."""
    running = GaugeMetricFamily("rollplane_queue_running", "Sequences let into a fleet and not ended", labels=["fleet"])
    limits = GaugeMetricFamily("rollplane_queue_limit", "A configured limit, by setting", labels=["fleet", "limit"])
    whose = ["fleet", "traffic_class", "model", "caller"]
    waiting = GaugeMetricFamily("rollplane_queue_waiting", "Requests that wait before a fleet", labels=whose)
    away = CounterMetricFamily(
        "rollplane_queue_turned_away",
        "Requests over a limit (full, key_full: 429), or whose deadline passed while they waited",
        labels=[*whose, "why"],
    )
    waited = HistogramMetricFamily(
        "rollplane_queue_wait_seconds", "How long requests waited before a fleet, 0 included", labels=whose[:2]
    )
    for queue in queues:
        running.add_metric([queue.fleet], queue.running)
        for name, limit in queue.limits.items():
            limits.add_metric([queue.fleet, name], limit)
        for who, count in queue.waiting.items():
            waiting.add_metric([queue.fleet, who.traffic, who.model, who.caller], count)
        for (who, why), count in queue.turned_away.items():
            away.add_metric([queue.fleet, who.traffic, who.model, who.caller, why], count)
        for traffic, times in queue.waited.items():
            sums = list(itertools.accumulate(times.counts))
            buckets = list(zip([*map(str, BUCKETS_S), "+Inf"], sums, strict=True))
            waited.add_metric([queue.fleet, traffic], buckets, times.sum_s)
    yield from (running, limits, waiting, away, waited)
