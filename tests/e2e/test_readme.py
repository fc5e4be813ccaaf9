"""The README's examples, run as they stand there (but for the port)."""

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.commands import ready_line, running

from rollplane.cli.commands import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
VARYING = ("request_id", "created", "instance", "worker")


def blocks(language: str, containing: str = "") -> list[str]:
    return [text.strip() for kind, text in BLOCKS if kind == language and containing in text]


def settled(tree: Any) -> Any:
    """A JSON tree without what differs from run to run."""
    if isinstance(tree, dict):
        return {key: settled(value) for key, value in tree.items() if key not in VARYING}
    return [settled(value) for value in tree] if isinstance(tree, list) else tree


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_set_up_is_two_commands_and_ci_runs_the_same_install() -> None:
    setup = blocks("bash", "python3 -m venv")[0].splitlines()
    assert len(setup) == 2
    install = setup[1].removeprefix("pip install ")
    assert install in (ROOT / ".ci" / "run").read_text()


def test_the_main_job_is_a_command_of_the_package() -> None:
    assert blocks("bash", "rollplane demo") == ["rollplane demo"]
    assert "demo" in {command.name for command in app.registered_commands}


def test_every_link_leads_to_a_page() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.timeout(300)
def test_the_curl_example_gives_its_answer_and_the_client_example_runs(tmp_path: Path) -> None:
    port = str(free_port())
    serve = shlex.split(blocks("bash", "rollplane serve")[0].replace("\\\n", " ").replace("8000", port))
    curl = shlex.split(blocks("bash", "curl")[0].replace("\\\n", " ").replace("8000", port))
    with running(*serve[1:], log=tmp_path / "serve.log") as process:
        ready_line(process, tmp_path / "serve.log")
        said = subprocess.run(curl, capture_output=True, check=True, timeout=30, text=True).stdout
        example = blocks("python")[0].replace("8000", port)
        printed = subprocess.run([sys.executable, "-c", example], capture_output=True, timeout=60, text=True)
    assert settled(json.loads(said)) == settled(json.loads(blocks("json")[0]))
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("[27200  4402]")
    assert "(4, 2, 2) [('initial', 0)]" in printed.stdout
