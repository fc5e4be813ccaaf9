"""The metrics of all processes of a frontend as one page, made by the owner.

Counts are summed, also those of a process that has ended, as last seen. Gauges of what a process itself has under way are
summed; every other gauge is the owner's, for it speaks of the fleet.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rollplane.errors import RollplaneError
from rollplane.server.crew import METRICS_PATH, Crew

SUMMED_GAUGES: Final = frozenset(
    {
        "rollplane_requests_in_flight",
        "rollplane_queue_waiting",
        "rollplane_worker_sequences",
        "rollplane_worker_prompt_tokens_in_flight",
        "rollplane_worker_pending_prompt_tokens",
    }
)
_COUNTS: Final = ("counter", "histogram")


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One process's metrics. `life`: of the process; `held`: its requests that no worker has yet."""

    life: str
    held: int
    text: str


class OtherPages:
    """The pages of the other processes, as the owner collects them for one app.

    Args:
        app: which app's: the root's or a fleet's.
    """

    def __init__(self, crew: Crew, app: str) -> None:
        self._crew = crew
        self._path = METRICS_PATH + app
        self._last: dict[int, Page] = {}
        self._ended = ""

    def __repr__(self) -> str:
        return f"<OtherPages of {sorted(self._last)}>"

    async def collect(self) -> "Others":
        """Ask every process; of one that does not answer, the last page's counts."""
        answers = await asyncio.gather(*(self._ask(i) for i in self._crew.others))
        alive, silent = [], [self._ended] if self._ended else []
        for i, page in zip(self._crew.others, answers, strict=True):
            before = self._last.get(i)
            if page is None:
                silent += [] if before is None else [before.text]
                continue
            if before is not None and before.life != page.life:
                self._ended = merged("", [], [self._ended, before.text]).decode()
                silent = [self._ended, *silent[1:]] if silent else [self._ended]
            self._last[i] = page
            alive.append(page)
        return Others(held=sum(page.held for page in alive), alive=[page.text for page in alive], silent=silent)

    async def _ask(self, index: int) -> Page | None:
        try:
            return msgspec.json.decode(await self._crew.ask(index, "GET", self._path), type=Page)
        except (RollplaneError, msgspec.MsgspecError):
            return None


class Others(msgspec.Struct, frozen=True, kw_only=True):
    """What the other processes have: `held` requests, pages of those that answer, counts of those that do not."""

    held: int
    alive: list[str]
    silent: list[str]

    def merge(self, own: bytes) -> bytes:
        """The whole page."""
        return merged(own.decode(), self.alive, self.silent)


def merged(own: str, alive: Sequence[str], silent: Sequence[str]) -> bytes:
    """Pages as one; of `silent` ones the counts alone."""
    families: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for place, text in [(0, own), *((1, page) for page in alive), *((2, page) for page in silent)]:
        for family in text_string_to_metric_families(text):
            counts = family.type in _COUNTS
            if not (counts or place == 0 or (place == 1 and family.name in SUMMED_GAUGES)):
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                if place and sample.name.endswith("_created"):
                    continue
                key = (family.name, sample.name, tuple(sorted(sample.labels.items())))
                values[key] = values.get(key, 0.0) + sample.value
    for (name, sample_name, labels), value in values.items():
        families[name].add_sample(sample_name, dict(labels), value)
    return generate_latest(_Whole(families.values()))


class _Whole(CollectorRegistry, Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families
