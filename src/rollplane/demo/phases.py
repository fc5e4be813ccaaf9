"""What the demo shows while it runs: moving bars on a terminal, else a plain line per phase and step."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Phases:
    """The phases of a run, one after the other; a context manager.

    Args:
        console: where they are shown.
        quiet_s: a line that says no more than how far a phase is comes no more often than this.
    """

    def __init__(self, console: Console, *, quiet_s: float = 5.0) -> None:
        self._console = console
        self._quiet_s = quiet_s
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
            )

    def __repr__(self) -> str:
        return f"<Phases as {'lines' if self._bars is None else 'bars'}>"

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, name: str, *, total: int | None) -> "Phase":
        """Show that a phase begins; `total`: its steps, None where they cannot be counted."""
        return Phase(name, total=total, console=self._console, bars=self._bars, quiet_s=self._quiet_s)


class Phase:
    """One phase; see `Phases.begin`."""

    def __init__(
        self, name: str, *, total: int | None, console: Console, bars: Progress | None, quiet_s: float
    ) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._console = console
        self._bars = bars
        self._quiet_s = quiet_s
        self._began = self._said = time.monotonic()
        self._task = None if bars is None else bars.add_task(name, total=total, note="")
        if bars is None:
            self._say("begins")

    def __repr__(self) -> str:
        return f"<Phase {self.name} {self.done}/{self.total}>"

    def advance(self, note: str = "") -> None:
        """One step is done; `note` says something of it."""
        self.done += 1
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, advance=1, note=note)
        elif self.done == self.total or note or time.monotonic() - self._said >= self._quiet_s:
            self._say(f"{self.done}/{self.total}" + (f" {note}" if note else ""))

    def end(self) -> None:
        """The phase is over; for one whose steps cannot be counted."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, total=1, completed=1)
        else:
            self._say("done")

    def _say(self, what: str) -> None:
        self._said = time.monotonic()
        self._console.print(
            f"{self.name}: {what} ({self._said - self._began:.1f} s)", markup=False, highlight=False, soft_wrap=True
        )
