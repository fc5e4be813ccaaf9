"""What a run shows at its end: `report.json`, a self-contained `report.html`, and tables for the terminal."""

import html
import io
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

SETTING_NAMES = {"none": "nothing", "routes": "routes", "mask": "sampling masks", "both": "routes and masks"}

CAVEAT = (
    "The reward of this toy task does not tell the settings apart; the mismatch KL does. The model is tiny, so the "
    "figures do not compare with those of real runs."
)
IN_FLIGHT_NOTE = (
    "Tokens after a boundary were sampled over keys and values of the older weights, which the update kept; no trainer "
    "recomputes those, so that column is not a replay error."
)


def write_report(report: dict[str, Any], out: Path) -> None:
    """Write `report.json` and `report.html` into `out`."""
    (out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    (out / "report.html").write_text(_page(report))


def print_report(report: dict[str, Any], console: Console) -> None:
    """Show the tables of a run."""
    for title, header, rows in _tables(report):
        table = Table(title=title, title_justify="left")
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(CAVEAT, style="dim")


def _tables(report: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of every table, as text."""
    steps, flights = report["steps"], [step for step in report["steps"] if "in_flight" in step]
    stride = max(1, len(steps) // 12)
    shown = [step for step in steps if step["step"] % stride == 0 or step is steps[-1]]
    tables = [
        (
            "GRPO",
            ["step", "reward", "seconds", "tokens/s", "mismatch KL, both", "made by"],
            [
                [
                    str(step["step"]),
                    f"{step['reward']:.3f}",
                    f"{step['seconds']:.2f}",
                    f"{step['tokens'] / step['rollout_seconds']:.0f}",
                    _number(step["kl"]),
                    " ".join(step["policy_versions"]),
                ]
                for step in shown
            ],
        ),
        (
            "Mismatch KL, trainer against engine (nats)",
            ["replayed", "before training", "routing stress"],
            [
                [name, _number(report["mismatch_kl"][key]), _number(report["stress_mismatch_kl"][key])]
                for key, name in SETTING_NAMES.items()
            ],
        ),
        (
            "Updates in flight",
            ["step", "mixed answers", "version", "tokens", "KL, own weights", "KL after a boundary"],
            [
                [
                    str(step["step"]),
                    str(step["in_flight"]["mixed_answers"]),
                    version,
                    str(part["tokens"]),
                    _number(part["kl"]),
                    _number(part["kl_after_boundary"]),
                ]
                for step in flights
                for version, part in step["in_flight"]["versions"].items()
            ],
        ),
        (
            "Run",
            ["", ""],
            [
                ["exact answers before, after", f"{report['reward_before']:.3f}, {report['reward_after']:.3f}"],
                ["requests, lost", f"{report['requests']}, {report['lost_requests']}"],
                ["policy versions seen", str(len(report["policy_versions"]))],
                ["previous policy's KL over the right one's", f"{report['previous_policy']['ratio']:.0f}x"],
                ["seconds", f"{report['seconds']:.0f}"],
                *([name.replace("_", " "), "holds" if held else "BROKEN"] for name, held in report["checks"].items()),
            ],
        ),
    ]
    return [table for table in tables if table[2]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _page(report: dict[str, Any]) -> str:
    options, steps = report["options"], report["steps"]
    measured = [step for step in steps if "mismatch_kl" in step]
    plots = [
        _plot("Reward (share of exact answers)", {"": _series(steps, "reward")}, floor=0.0),
        _plot("Seconds per step", {"": _series(steps, "seconds")}, floor=0.0),
        _plot(
            "Mismatch KL by what is replayed (nats)",
            {
                name: [(step["step"], step["mismatch_kl"][key]) for step in measured]
                for key, name in SETTING_NAMES.items()
            },
            logarithmic=True,
        ),
    ]
    tables = []
    for title, header, rows in _tables(report):
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        tables.append(
            f"<h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Rollplane demo</title><style>"
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:right}"
        "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}</style></head><body>"
        "<h1>Rollplane demo: GRPO over HTTP</h1>"
        f"<p>Seed {options['seed']}, {options['workers']} workers, {options['engine_dtype']} engine, "
        f"{len(steps)} steps.</p>{''.join(plots)}{''.join(tables)}"
        f"<p>{html.escape(CAVEAT)}</p><p>{html.escape(IN_FLIGHT_NOTE)}</p></body></html>\n"
    )


def _series(steps: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(step["step"], step[key]) for step in steps]


def _plot(
    title: str, curves: dict[str, list[tuple[int, float]]], *, floor: float | None = None, logarithmic: bool = False
) -> str:
    """One inline SVG."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name or None)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if floor is not None:
        axes.set_ylim(bottom=floor)
    if logarithmic:
        axes.set_yscale("log")
    if any(curves):
        axes.legend(fontsize=8)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
