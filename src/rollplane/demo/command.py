"""The `demo` command: options, exit codes, and what happens on Ctrl-C."""

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from rich.console import Console

from rollplane.errors import RollplaneError

MAX_SEED = 2**31 - 1
"""Seeds of single answers are sums with this one, and must stay in the range that engines take."""


def demo(
    steps: Annotated[int, typer.Option(min=5, help="Policy updates.")] = 60,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the model, the problems and the sampling.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Engines behind the frontend.")] = 2,
    out: Annotated[
        Path, typer.Option(help="Directory for the report, the rollouts and the checkpoints.", file_okay=False)
    ] = Path("runs/demo"),
    engine_dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="What the engines compute in; the trainer is float32.")
    ] = "bfloat16",
) -> None:
    """Teach a tiny mixture-of-experts model a task by GRPO over a real fleet, on this machine's CPU.

    Takes a minute or two. Exits with 1, naming the step, when a request was lost, versions were mixed unmarked, or an
    invariant or a check broke; with 130 on Ctrl-C. No process is left behind.
    """
    console = Console()
    # Also where a shell without job control started this in the background, with SIGINT ignored: a supervisor's SIGINT ends it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)  # so that `with` blocks end the fleet on a plain kill, too
    try:
        from rollplane.demo.run import Options, run  # torch and transformers load only here

        report = run(
            Options(steps=steps, seed=seed, workers=workers, out=out, engine_dtype=engine_dtype), console=console
        )
    except RollplaneError as error:
        console.print(f"demo failed: {error.message}", style="red", markup=False)
        raise typer.Exit(1) from error
    except OSError as error:  # a full disk, a directory that may not be written
        console.print(f"demo failed: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        raise typer.Exit(130) from None
    broken = [name for name, held in report["checks"].items() if not held]
    if broken:
        console.print(f"demo failed: {', '.join(broken)}", style="red", markup=False)
        raise typer.Exit(1)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(
        signal.SIGINT
    )  # asyncio cancels the main task then; an error raised here may be lost in a callback
