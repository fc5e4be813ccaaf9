"""vLLM's statistics of steps, for its own loggers: added up as they come, told some steps at a time.

vLLM tells its Prometheus metrics after every step, which costs more than the step's tokens do. Its statistics of one step
are sums and lists, so those of several steps are one record; its gauges are those of the last step. The one figure that
would change, tokens per step, is kept apart. What a scrape reads is what vLLM would have said, to the last observation.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final

TELL_AFTER_S: Final = 1.0
"""How old untold steps become while steps go on, for loggers other than a scrape."""

TELL_AFTER_TOKENS: Final = 8192

_MOMENTARY: Final = frozenset(
    {
        "num_running_reqs",
        "num_waiting_reqs",
        "num_skipped_waiting_reqs",
        "step_counter",
        "current_wave",
        "kv_cache_usage",
        "waiting_lora_adapters",
        "running_lora_adapters",
    }
)
"""Fields of vLLM's `SchedulerStats` of which only the last value counts; a step that says anything else is told at once."""


@dataclass
class Progress:
    """What the engine core said last: monotonic seconds, requests, share of the KV cache in use (0 to 1)."""

    moved_at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    preemptions: int = 0


class StepStats:
    """The statistics of one engine's steps.

    Args:
        manager: vLLM's `StatLoggerManager`. SchedulerStats, IterationStats: its classes.
        cache_stats: what its multimodal processor cache did since it was last asked.
    """

    def __init__(
        self,
        manager: Any,
        *,
        SchedulerStats: Any,
        IterationStats: Any,
        cache_stats: Callable[[], Any],
        progress: Progress,
    ) -> None:
        self._manager = manager
        self._new = IterationStats
        self._cache_stats = cache_stats
        self.progress = progress
        self._rest = attrgetter(*(field.name for field in fields(SchedulerStats) if field.name not in _MOMENTARY))
        self._quiet = self._rest(SchedulerStats())
        self._steps = _each_step(manager)
        self._iteration: Any = None
        self._scheduler: Any = None
        self._engine_index = 0
        self._counted = 0
        self._preempted = 0
        self._since = 0.0

    def __repr__(self) -> str:
        return f"<StepStats, {len(self._steps)} steps untold>"

    def begin(self) -> Any:
        """vLLM's `IterationStats` to add the present step's outputs to."""
        if self._iteration is None:
            self._iteration = self._new()
        else:
            self._iteration.iteration_timestamp = time.time()
        return self._iteration

    def end(self, scheduler: Any, *, outputs: bool, engine_index: int) -> None:
        """The step's outputs are added; `scheduler`: its `SchedulerStats`, if it has any."""
        progress = self.progress
        now = progress.moved_at = time.monotonic()
        self._engine_index = engine_index
        if not self._steps and self._scheduler is None:
            self._since = now
        if outputs:
            iteration = self._iteration
            total = iteration.prompt_token_stats.computed + iteration.num_generation_tokens
            self._steps.append(total - self._counted)
            self._counted = total
            progress.preemptions = self._preempted + iteration.num_preempted_reqs
        if scheduler is not None:
            self._scheduler = scheduler
            progress.running = scheduler.num_running_reqs
            progress.waiting = scheduler.num_waiting_reqs
            progress.kv_usage = scheduler.kv_cache_usage
            if self._rest(scheduler) != self._quiet:
                self.tell()
                return
        if now - self._since > TELL_AFTER_S or self._counted > TELL_AFTER_TOKENS:
            self.tell()

    def tell(self) -> None:
        """Have vLLM's loggers record every step that they have not heard of."""
        iteration, self._iteration = self._iteration, None
        scheduler, self._scheduler = self._scheduler, None
        self._counted = 0
        if iteration is None and scheduler is None:
            return
        if iteration is not None:
            self._preempted += iteration.num_preempted_reqs
        self._manager.record(
            engine_idx=self._engine_index,
            scheduler_stats=scheduler,
            iteration_stats=iteration,
            mm_cache_stats=self._cache_stats(),
        )
        self._steps.clear()


class _PerStep:
    """Stands for a histogram of something per step: one observation for each step there was."""

    def __init__(self, histogram: Any, steps: list[int]) -> None:
        self._histogram = histogram
        self._steps = steps

    def observe(self, total: float) -> None:
        """Take the steps' own values in place of their sum."""
        for value in self._steps:
            self._histogram.observe(value)


def _each_step(manager: Any) -> list[int]:
    """A list whose numbers the Prometheus loggers observe as tokens per step."""
    steps: list[int] = []
    for logger in manager.stat_loggers:
        histograms = getattr(logger, "histogram_iteration_tokens", None)
        if isinstance(histograms, dict):
            for index, histogram in histograms.items():
                histograms[index] = _PerStep(histogram, steps)
    return steps


def vllm_families() -> Iterator[Any]:
    """The metric families that vLLM keeps in this process, as they are now."""
    from prometheus_client import REGISTRY

    for family in REGISTRY.collect():
        if family.name.startswith("vllm:"):
            yield family
