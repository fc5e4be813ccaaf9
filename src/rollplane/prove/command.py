"""The `prove` command: which runs, what they print and write, and the exit code."""

import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from rollplane.errors import InvalidRequest, RollplaneError
from rollplane.prove.record import REPORT, Run
from rollplane.prove.worker import EngineName

RunName = Literal["dense", "lora", "image", "moe"]
NAMES: Final[tuple[RunName, ...]] = ("dense", "lora", "image", "moe")
EngineChoice = Literal["auto", "embedded", "vllm"]
MARK: Final = ".rollplane-proof"
PLOT: Final = "proof.svg"
WIDTH: Final = 110
"""Columns of the table where it is not shown on a terminal."""
MOST_TIMES: Final = 100_000
"""A ratio above is written as such: float32 engine and trainer agree to the last bit or so."""


def prove(
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the runs as JSON.", dir_okay=False)] = None,
    out: Annotated[
        Path, typer.Option(help="Directory for rollouts, checkpoints and logs; an earlier proof there goes.")
    ] = Path("runs/proof"),
    run: Annotated[
        list[str] | None, typer.Option(help="Only this run (dense, lora, image, moe); may be given again.")
    ] = None,
    engine: Annotated[
        EngineChoice, typer.Option(help="Of the dense and LoRA runs; auto: vLLM where it is installed, else embedded.")
    ] = "auto",
    vllm_python: Annotated[
        Path | None,
        typer.Option(help="Interpreter that has vLLM; this one if it has, else .venv-vllm/bin/python where that is."),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="What that engine computes in; the trainer is float32.")
    ] = "bfloat16",
    vllm_env: Annotated[Path, typer.Option(help="Of the image run: an environment with vLLM.")] = Path(".venv-vllm"),
    vllm_rs: Annotated[Path, typer.Option(help="Of the image run: the binary of vLLM's Rust server.")] = Path(
        ".cache/vllm-rs/vllm-rs-0.31.0"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the models, the prompts and the sampling.")] = 0,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Run nothing: the figures again from the files in --out.")
    ] = False,
) -> None:
    """Show on this machine that RL runs end to end: every step of every run passes, with its mismatch KL.

    dense: three optimizer steps, weights by broadcast from memory. lora: three steps, adapters from disk, flipped while requests
    run. image: three steps on features that vLLM rendered, over its Rust server (left out where that is not there and the run was
    not named). moe: GRPO with routed experts and sampling masks replayed, one update in flight, and the routing stress.
    Exits with 1 where a step failed, or where --recompute finds other figures than the report in --out; with 2 where nothing can
    run with these options.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)  # so that `with` blocks end the workers on a plain kill, too
    try:
        _check_json_file(json_file)
        if recompute:
            _again(out, json_file=json_file, console=console)
            return
        chosen = chosen_runs(run)
        if not run and not image_is_possible(vllm_env=vllm_env, vllm_rs=vllm_rs):
            chosen.remove("image")
            console.print("image: left out, vLLM's Rust server is not here (`make vllm-env`)", style="yellow")
        place = prepare(out.resolve(), chosen)
        named, python = engine_of(engine, vllm_python)
        if engine == "auto" and named == "embedded" and {"dense", "lora"} & set(chosen):
            console.print("dense, lora: over the embedded engine, vLLM is not here (`make vllm-env`)", style="yellow")
        images = partial(_images, vllm_env=vllm_env, vllm_rs=vllm_rs, seed=seed)
        runs = prove_all(
            chosen, place, engine=named, python=python, dtype=dtype, seed=seed, images=images, console=console
        )
    except RollplaneError as error:
        console.print(f"proof failed: {error.message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2 if 400 <= error.status < 500 else 1) from error
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        raise typer.Exit(130) from None
    body = msgspec.json.format(msgspec.json.encode([each.tree() for each in runs]), indent=2)
    (place / REPORT).write_bytes(body)
    if importlib.util.find_spec("matplotlib") is not None:
        from rollplane.prove.plot import write_plot

        write_plot(runs, place / PLOT)
        console.print(f"plot: {place / PLOT}", markup=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_bytes(body)
    console.print(table_of(runs))
    for each in runs:
        for line in [*each.failures, *(f"step {s.step}: {f}" for s in each.steps for f in s.failures)]:
            console.print(f"{each.name}: {line}", style="red", markup=False, soft_wrap=True)
    if not all(each.passed for each in runs):
        raise typer.Exit(1)


def _check_json_file(path: Path | None) -> None:
    """Now, not after all runs."""
    if path is None:
        return
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error}", param="json") from None


def _again(out: Path, *, json_file: Path | None, console: Console) -> None:
    """`--recompute`: print what the files say, and where the report says otherwise."""
    import torch
    import transformers

    from rollplane.prove.recompute import differences
    from rollplane.prove.recompute import recompute as figures_of

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    figures = figures_of(out)
    body = msgspec.json.format(msgspec.json.encode(figures), indent=2)
    if json_file is not None:
        json_file.write_bytes(body)
    console.print(body.decode(), markup=False, highlight=False, soft_wrap=True)
    other = differences(out, figures)
    for line in other:
        console.print(line, style="red", markup=False, soft_wrap=True)
    console.print(f"{len(other)} figures differ from {out / REPORT}", markup=False, soft_wrap=True)
    if other:
        raise typer.Exit(1)


def prove_all(
    names: list[RunName],
    place: Path,
    *,
    engine: EngineName,
    python: str,
    dtype: str,
    seed: int,
    images: Callable[[Path], Run],
    console: Console,
) -> list[Run]:
    """The runs in order; one that breaks off is a failed run, and the next ones still run."""
    import torch
    import transformers

    from rollplane.prove.runs import run_adapters, run_dense

    def moe(path: Path) -> Run:
        from rollplane.prove.moe import run_moe  # its report draws plots; the others do without that library

        return run_moe(path, seed=seed, console=console)

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    work: dict[RunName, Callable[[Path], Run]] = {
        "dense": lambda path: run_dense(path, engine=engine, python=python, dtype=dtype, seed=seed),
        "lora": lambda path: run_adapters(path, engine=engine, python=python, dtype=dtype, seed=seed),
        "image": images,
        "moe": moe,
    }
    found = []
    for name in names:
        console.print(f"{name}: running", markup=False)
        try:
            found.append(work[name](place / name))
        except RollplaneError as error:
            by = {"image": ("vllm-rs", "float32"), "moe": ("embedded", "bfloat16")}.get(name, (engine, dtype))
            found.append(Run(name=name, engine=by[0], dtype=by[1], failures=[error.message]))
    return found


def _images(path: Path, *, vllm_env: Path, vllm_rs: Path, seed: int) -> Run:
    from rollplane.prove.image import run_images

    return run_images(path, vllm_env=vllm_env, vllm_rs=vllm_rs, seed=seed)


def image_is_possible(*, vllm_env: Path, vllm_rs: Path) -> bool:
    """Whether vLLM's environment and its Rust server are there."""
    return (vllm_env / "bin" / "vllm").exists() and vllm_rs.exists()


def chosen_runs(given: list[str] | None) -> list[RunName]:
    """The runs that were asked for, all where none was named.

    Raises:
        InvalidRequest: an unknown name.
    """
    unknown = [name for name in given or () if name not in NAMES]
    if unknown:
        raise InvalidRequest(f"run must be one of {', '.join(NAMES)}, got {unknown[0]!r}", param="run")
    return [name for name in NAMES if not given or name in given]


def engine_of(choice: EngineChoice, vllm_python: Path | None) -> tuple[EngineName, str]:
    """The engine that a choice means here, and the interpreter that runs it.

    Raises:
        InvalidRequest: vLLM was asked for, and no interpreter here has it, or the one that was named is none.
    """
    beside = Path(".venv-vllm/bin/python")
    if vllm_python is not None:
        if not os.access(vllm_python, os.X_OK) or vllm_python.is_dir():
            raise InvalidRequest(f"{vllm_python} is no program that can be run", param="vllm_python")
        python = str(vllm_python.absolute())
    elif importlib.util.find_spec("vllm") is not None:
        python = sys.executable
    else:
        python = str(beside.absolute()) if beside.exists() else ""
    if choice == "embedded" or (choice == "auto" and not python):
        return "embedded", sys.executable
    if not python:
        raise InvalidRequest(
            "vLLM is not installed here; `make vllm-env` makes an environment with it in .venv-vllm, --vllm-python names another's "
            "interpreter",
            param="engine",
        )
    return "vllm", python


def prepare(out: Path, names: list[RunName]) -> Path:
    """An empty directory per run.

    Raises:
        InvalidRequest: `out` holds something else than a proof.
    """
    if out.exists() and any(out.iterdir()) and not (out / MARK).is_file():
        raise InvalidRequest(f"{out} holds files that no proof made", param="out")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    for name in names:
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir()
    return out


def table_of(runs: list[Run]) -> Table:
    """One row per step."""
    table = Table(title="Proof")
    for column in ("run", "step", "policy", "reward", "mismatch KL", "by the previous", "passed"):
        table.add_column(column, no_wrap=True)
    for run in runs:
        run_name = run.name.split("-")[0]
        for step in run.steps:
            ratio = None if step.previous_kl is None else step.previous_kl / step.mismatch_kl
            previous = "" if ratio is None else f"{step.previous_kl:.1e} ({_times(ratio)})"
            table.add_row(
                run_name,
                str(step.step),
                step.policy_version,
                "" if step.reward is None else f"{step.reward:.3f}",
                f"{step.mismatch_kl:.1e}",
                previous,
                "yes" if step.passed else "NO",
            )
        stress: dict[str, Any] | None = run.figures.get("stress_mismatch_kl")
        for name, kl in (stress or {}).items():
            table.add_row(run_name, "stress", "", "", f"{kl:.1e}", f"replay: {name}", "")
        flight: dict[str, Any] = run.figures.get("in_flight") or {"versions": {}}
        for version, part in flight["versions"].items():
            for name, kl in (("own keys", part["kl"]), ("over older keys", part["kl_after_boundary"])):
                if kl is not None:
                    says = f"{part['tokens']} tokens, {name}"
                    table.add_row(run_name, "in flight", version, "", f"{kl:.1e}", says, "")
        made_by = f"{run.engine} {run.dtype}"
        table.add_row(run_name, made_by, "", "", "", "", "PASSED" if run.passed else "FAILED", end_section=True)
    return table


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio <= MOST_TIMES else f"over {MOST_TIMES:,}x"


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
