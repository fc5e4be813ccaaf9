"""The commands. Each loads what it needs when it runs; options come from the settings' declarations."""

import importlib
from typing import Annotated, Any

import typer

import rollplane
from rollplane.cli.flags import settings_command
from rollplane.config import Settings

app = typer.Typer(
    name="rollplane",
    help="The rollout-serving plane of an RL post-training system: token ids in, token ids out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _worker(settings: Settings) -> None:
    """Serve one engine: Generate, administration and discovery of itself."""
    importlib.import_module("rollplane.cli.worker").main(settings)


def _frontend(settings: Settings) -> None:
    """Serve many workers as one: routing, fleet administration and discovery."""
    importlib.import_module("rollplane.cli.frontend").main(settings)


def _serve(settings: Settings) -> None:
    """Start a frontend and its workers on this machine, and keep them running."""
    importlib.import_module("rollplane.cli.supervisor").main(settings)


def _mock_vllm(settings: Settings) -> None:
    """Serve a mock engine as a vLLM gRPC server: for tests and load, without a model."""
    importlib.import_module("rollplane.cli.mock_vllm").main(settings)


app.command("worker")(settings_command(["server", "worker", "dynamo"], _worker))
app.command("frontend")(settings_command(["server", "frontend"], _frontend))
app.command("serve")(
    settings_command(
        ["server", "serve", "worker", "frontend"],
        _serve,
        without=frozenset(
            {
                "frontend.workers",
                "frontend.worker_key_file",
                "frontend.workers_file",
                "frontend.dynamo_rl_url",
                "worker.name",
                "worker.public_url",
                "worker.runtime",
            }
        ),
    )
)


def _check(settings: Settings) -> None:
    """Say what would go wrong with these settings: engine, model, roots, ports, keys, clocks, disks. Starts nothing."""
    importlib.import_module("rollplane.cli.check").main(settings)


def _config(settings: Settings) -> None:
    """Print every setting, its value, and where the value came from: default, file, variable or flag."""
    importlib.import_module("rollplane.cli.flags").show_settings(settings)


app.command("check")(settings_command(["server", "worker", "frontend"], _check))
app.command("config")(settings_command(["server", "worker", "frontend"], _config))
app.command("mock-vllm")(settings_command(["mock_vllm"], _mock_vllm))


@app.command(
    "demo",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Train a tiny policy through the whole stack on this machine.",
)
def demo(context: typer.Context) -> None:
    """Hand all arguments to the demo's own command."""
    run: Any = importlib.import_module("rollplane.demo.command").demo
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command()(run)
    inner(args=context.args, prog_name="rollplane demo", standalone_mode=True)


@app.command("status", help="Show a fleet, or one worker, live in the terminal.")
def status(
    url: Annotated[str, typer.Argument(help="Base URL of a frontend or a worker")] = "http://127.0.0.1:8000",
    key_file: Annotated[str | None, typer.Option(help="File whose first key is sent")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and stop, as into a pipe")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON and stop")] = False,
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks", min=0.1)] = 1.0,
) -> None:
    """Look at a server until interrupted."""
    run: Any = importlib.import_module("rollplane.cli.status").main
    run(url, key_file=key_file, once=once, as_json=as_json, interval_s=interval_s)


@app.command(
    "prove",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Show on this machine that RL runs end to end; every step passes, with its mismatch KL.",
)
def prove(context: typer.Context) -> None:
    """Hand all arguments to the proof's own command."""
    run: Any = importlib.import_module("rollplane.prove.command").prove
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command()(run)
    inner(args=context.args, prog_name="rollplane prove", standalone_mode=True)


@app.command("version")
def version() -> None:
    """Print the version."""
    typer.echo(rollplane.__version__)
