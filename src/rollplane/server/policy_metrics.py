"""Gauges of a worker's policy: its state and how long it has been there, its adapters and who uses them, its weight group."""

from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from rollplane.protocol.admin import TensorMismatch
from rollplane.worker import Worker


class PolicyMetrics:
    """Set from a worker at every scrape; what is gone is shown no more."""

    def __init__(self, registry: CollectorRegistry) -> None:
        to: dict[str, Any] = {"registry": registry}
        adapter: dict[str, Any] = {"labelnames": ["adapter", "generation", "state"], **to}
        self.state_age = Gauge("rollplane_policy_state_age_seconds", "Age of the policy's state", ["state"], **to)
        self.mismatch = Gauge(
            "rollplane_weights_mismatched_tensors",
            "Tensors in which the checkpoint in place was allowed to differ from the model",
            ["kind"],
            **to,
        )
        self.generations = Gauge("rollplane_adapter_generations", "Adapter generations in the engine", ["state"], **to)
        self.slots = Gauge("rollplane_adapter_slots", "Adapter generations that fit at once", **to)
        self.leases = Gauge("rollplane_adapter_leases", "Requests that use a generation now", **adapter)
        self.adapter_age = Gauge("rollplane_adapter_state_age_seconds", "Age of a generation's state", **adapter)
        self.stuck = Gauge("rollplane_adapters_not_dropped", "Generations that the engine refused to drop", **to)
        self.group = Gauge(
            "rollplane_weight_group_state_age_seconds", "Age of the weight group's state", ["state"], **to
        )

    def __repr__(self) -> str:
        return "<PolicyMetrics>"

    def read(self, worker: Worker) -> None:
        """Set every gauge from what the worker says now."""
        if worker.policy is not None:
            self.state_age.clear()
            self.state_age.labels(state=worker.policy.state).set(worker.policy.state_age_s)
            ignored = worker.policy.ignored or TensorMismatch()
            self.mismatch.labels(kind="missing").set(ignored.missing)
            self.mismatch.labels(kind="unexpected").set(ignored.unexpected)
        if worker.broadcast is not None:
            self.group.clear()
            self.group.labels(state=worker.broadcast.state).set(worker.broadcast.state_age_s)
        table = worker.adapter_table
        if table is None:
            return
        records, ages = table.records(), table.ages_s()
        self.slots.set(table.capability.max)
        self.stuck.set(sum(record.trouble is not None for record in records))
        for gauge in (self.generations, self.leases, self.adapter_age):
            gauge.clear()
        for record in records:
            labels = {"adapter": record.name, "generation": str(record.generation), "state": record.state}
            self.generations.labels(state=record.state).inc()
            self.leases.labels(**labels).set(record.leases)
            self.adapter_age.labels(**labels).set(ages.get(record.engine_name, 0.0))
