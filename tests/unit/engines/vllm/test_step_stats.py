"""vLLM's loggers hear of every step, some at a time, and say what they would have said."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rollplane.engines.vllm import step_stats
from rollplane.engines.vllm.step_stats import Progress, StepStats


@dataclass
class Scheduler:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_hits: int = 0
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)


class Iteration:
    def __init__(self) -> None:
        self.iteration_timestamp = 0.0
        self.num_generation_tokens = 0
        self.num_preempted_reqs = 0
        self.prompt_token_stats = SimpleNamespace(computed=0)


class Histogram:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def observe(self, value: float) -> None:
        self.seen.append(value)


class Manager:
    """vLLM's manager with one Prometheus logger."""

    def __init__(self) -> None:
        self.histogram = Histogram()
        self.stat_loggers = [SimpleNamespace(histogram_iteration_tokens={0: self.histogram}), object()]
        self.told: list[tuple[Any, Any]] = []

    def record(self, *, engine_idx: int, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any) -> None:
        self.told.append((scheduler_stats, iteration_stats))
        if iteration_stats is not None:
            total = iteration_stats.prompt_token_stats.computed + iteration_stats.num_generation_tokens
            self.stat_loggers[0].histogram_iteration_tokens[engine_idx].observe(total)  # type: ignore[attr-defined]


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def stats(manager: Manager) -> StepStats:
    return StepStats(
        manager,
        SchedulerStats=Scheduler,
        IterationStats=Iteration,
        cache_stats=lambda: None,
        progress=Progress(moved_at=0.0),
    )


def step(stats: StepStats, tokens: int, *, prompt: int = 0, preempted: int = 0, **scheduler: Any) -> None:
    iteration = stats.begin()
    iteration.num_generation_tokens += tokens
    iteration.num_preempted_reqs += preempted
    iteration.prompt_token_stats.computed += prompt
    stats.end(Scheduler(**scheduler), outputs=True, engine_index=0)


def test_quiet_steps_are_one_record_with_one_observation_each(manager: Manager, stats: StepStats) -> None:
    step(stats, 1, prompt=40, num_running_reqs=1)
    step(stats, 2, num_running_reqs=3)
    assert manager.told == []

    stats.tell()
    stats.tell()

    [(scheduler, iteration)] = manager.told
    assert scheduler.num_running_reqs == 3
    assert iteration.num_generation_tokens == 3
    assert manager.histogram.seen == [41, 2]
    step(stats, 5)
    stats.tell()
    assert manager.histogram.seen == [41, 2, 5]


def test_a_step_that_adds_to_a_counter_is_told_at_once(manager: Manager, stats: StepStats) -> None:
    step(stats, 1)
    step(stats, 1, prefix_cache_hits=7)

    [(scheduler, iteration)] = manager.told
    assert scheduler.prefix_cache_hits == 7
    assert iteration.num_generation_tokens == 2


def test_a_step_without_outputs_is_no_observation(manager: Manager, stats: StepStats) -> None:
    stats.end(Scheduler(num_waiting_reqs=2), outputs=False, engine_index=0)
    stats.tell()

    assert manager.told == [(Scheduler(num_waiting_reqs=2), None)]
    assert manager.histogram.seen == []


def test_nothing_waits_long_nor_grows_without_bound(
    manager: Manager, stats: StepStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(stats, step_stats.TELL_AFTER_TOKENS + 1)
    assert len(manager.told) == 1

    monkeypatch.setattr(step_stats, "TELL_AFTER_S", 0.0)
    step(stats, 1)
    step(stats, 1)
    assert len(manager.told) == 2


def test_progress_is_up_to_date_whether_told_or_not(stats: StepStats) -> None:
    step(stats, 1, preempted=2, num_running_reqs=4, kv_cache_usage=0.5)
    stats.tell()
    step(stats, 1, preempted=1, num_running_reqs=3)

    assert (stats.progress.running, stats.progress.preemptions) == (3, 3)
    assert stats.progress.moved_at > 0
