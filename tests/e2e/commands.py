"""Rollplane's commands as child processes of a test, ended with it."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "rollplane.cli.main"]
START_S = 120.0


@contextlib.contextmanager
def running(*arguments: str, log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **(env or {})},
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def ready_line(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """The JSON line that a program reads; the test's own time limit bounds the wait."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log.read_text()
    found: dict[str, Any] = json.loads(line)
    assert found["event"] == "ready"
    return found


# The demo with a shorter imitation: what its tests are about comes after it.
DEMO = """
import typer
from rollplane.demo import command, run
run.IMITATION_STEPS = {imitation_steps}
typer.run(command.demo)
"""


def demo(*arguments: str, imitation_steps: int) -> list[str]:
    return [sys.executable, "-c", DEMO.format(imitation_steps=imitation_steps), "--engine-dtype", "float32", *arguments]
