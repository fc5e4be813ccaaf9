"""docs/metrics.md lists exactly the metrics that the code registers: name, type and labels."""

import ast
import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from rollplane.router.health import CircuitState
from rollplane.router.observed import Observed
from rollplane.router.prefix_index import IndexSizes
from rollplane.router.queue_counts import QueueReport, WaitTimes, Who
from rollplane.router.report import PlacementReport, WorkerLoad
from rollplane.server.metrics import Metrics
from rollplane.server.placement_metrics import PlacementCollector

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `([a-z_:]+)` \| (\w+) \| ([^|]*) \| [^|]", flags=re.MULTILINE)
NAME = re.compile(r"(rollplane_|vllm:)[a-z_]+")

Family = tuple[str, tuple[str, ...]]


class Placed:
    """A router that placed something: every placement family then has a sample."""

    def placement(self) -> PlacementReport:
        circuit: CircuitState = "closed"
        worker = WorkerLoad(
            url="http://worker",
            policy_version="v1",
            policy_lag=0,
            routable=True,
            circuit=circuit,
            sequences=1,
            prompt_tokens=1,
            load=1,
            cached_blocks=1,
            pending_tokens=1,
        )
        sizes = IndexSizes(**dict.fromkeys(IndexSizes.__struct_fields__, 0))
        who = Who(traffic="train", model="", caller="")
        queue = QueueReport(
            fleet="default",
            running=1,
            limits={"max_running": 1},
            waiting={who: 1},
            turned_away={(who, "full"): 1},
            waited={"train": WaitTimes()},
        )
        return PlacementReport(policy="PrefixAware", workers=[worker], observed=Observed(), index=sizes, queues=[queue])


def registered() -> dict[str, Family]:
    """Type and labels of every family, by the name that Prometheus shows."""
    metrics = Metrics()
    metrics.registry.register(PlacementCollector(Placed()))
    collectors: set[Collector] = set(metrics.registry._collector_to_names)
    found: dict[str, Family] = {}
    for collector in collectors:
        for family in collector.collect():
            labels = {name for sample in family.samples for name in sample.labels} - {"le"}
            if isinstance(collector, MetricWrapperBase):
                labels |= set(collector._labelnames)
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = (family.type, tuple(sorted(labels)))
    return found


def documented() -> dict[str, Family]:
    rows = [(name, kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in ROW.findall(PAGE)]
    names = [name for name, _, _ in rows]
    assert len(set(names)) == len(names), "a metric is there twice"
    return {name: (kind, labels) for name, kind, labels in rows}


def test_the_page_lists_what_is_registered_and_nothing_else() -> None:
    assert documented() == registered()


def test_no_metric_is_made_elsewhere() -> None:
    """A metric of a registry that `registered` does not see would be missing on the page unnoticed."""
    known = registered()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            made = isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
            if not made or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in ("Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"):
                name = node.args[0].value
                shown = f"{name}_total" if node.func.id == "Counter" else name
                assert shown in known, path


def test_every_metric_named_in_the_documentation_is_there() -> None:
    known = set(registered())
    suffixed = {name + end for name in known for end in ("_bucket", "_count", "_sum")}
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "decisions" not in path.parts]
    for path in pages:
        named = {found[0] for found in re.finditer(r"(?<=`)(?:rollplane_|vllm:)[a-z_]+(?=[`{])", path.read_text())}
        assert named <= known | suffixed, path
