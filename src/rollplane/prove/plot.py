"""A proof as a plot: mismatch KL per step of every run, and what each replay leaves of it."""

from pathlib import Path
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.figure import Figure

from rollplane.prove.record import KL_LIMIT, Run

COLOURS: Final = ("#4269d0", "#efb118", "#3ca951", "#ff725c")
REPLAYS: Final = {"none": "nothing", "routes": "routes", "mask": "masks", "both": "both"}
PLAIN_SVG: Final = {"svg.hashsalt": "proof", "svg.fonttype": "none", "font.family": "sans-serif"}
"""Text as text, and the same bytes for the same figures."""


def write_plot(runs: list[Run], path: Path) -> None:
    """Write an SVG: one panel of steps, and one of replays where a run has figures of them."""
    replayed = next((run.figures for run in runs if "stress_mismatch_kl" in run.figures), None)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 1 if replayed is None else 2, squeeze=False)[0]
    _steps(panels[0], runs)
    if replayed is not None:
        _replays(panels[1], replayed)
    with rc_context(PLAIN_SVG):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _steps(axes: Any, runs: list[Run]) -> None:
    for run, colour in zip(runs, COLOURS, strict=False):
        name = run.name.split("-")[0]
        axes.plot([s.step for s in run.steps], [s.mismatch_kl for s in run.steps], "o-", color=colour, label=name)
        previous = [(s.step, s.previous_kl) for s in run.steps if s.previous_kl is not None]
        if previous:
            axes.plot(*zip(*previous, strict=True), "x--", color=colour, label=f"{name}, policy before")
    axes.axhline(KL_LIMIT, color="#888888", linewidth=0.8)
    axes.set(yscale="log", xlabel="step", ylabel="mismatch KL (nats)", title="Trainer against engine, per step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _replays(axes: Any, figures: dict[str, Any]) -> None:
    series = (("before training", "mismatch_kl_before_training"), ("routing stress", "stress_mismatch_kl"))
    for at, (label, name) in enumerate(series):
        found = [figures[name][key] for key in REPLAYS]
        axes.bar([i + 0.4 * at for i in range(len(REPLAYS))], found, 0.38, color=COLOURS[at], label=label)
    axes.set_xticks([i + 0.2 for i in range(len(REPLAYS))], list(REPLAYS.values()))
    axes.set(yscale="log", xlabel="replayed", title="Mixture of experts, by what is replayed")
    axes.legend(fontsize="small")
