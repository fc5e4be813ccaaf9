"""schemathesis, unmodified, makes thousands of requests out of our own API description: none may be answered by a fault.

`ROLLPLANE_FUZZ_EXAMPLES` sets how many it makes per operation on top of the boundary cases, for a long run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.models.tiny import shared_model
from tests.real.processes import running, wait_for_http

EXAMPLES = os.environ.get("ROLLPLANE_FUZZ_EXAMPLES", "5")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
DATA = ["data", "evaluation", "health", "description"]
LIMIT_S = 3600


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A worker over the mock engine, with a tokenizer. A pause holds requests no longer than they may take."""
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    command = [sys.executable, "-m", "rollplane.cli.main", "worker", "--engine", "mock", "--port", "0"]
    command += ["--engine-option", "vocab_tokens=1024", "--tokenizer", str(shared_model("qwen3", layers=2))]
    command += ["--ready-file", str(ready), "--log-level", "error"]
    with running(command, log, environment={}) as process:
        while not ready.exists():
            assert process.poll_s(0.1) is None, log.read_text()
        found: str = json.loads(ready.read_text())["url"]
        wait_for_http(f"{found}/health", process, log, timeout_s=60)
        yield found
        assert "Traceback" not in log.read_text()


def attack(url: str, place: Path, options: Sequence[str]) -> None:
    schemathesis = Path(sys.executable).with_name("schemathesis")
    command = [str(schemathesis), "run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "-n", EXAMPLES]
    command += ["--request-timeout", "60"]  # the cores are busy
    command += ["--seed", "1", "--checks", CHECKS, "--suppress-health-check", "all", "--warnings", "off"]
    done = subprocess.run(
        [*command, "--continue-on-failure", *options],
        cwd=place,  # it keeps what it found in the working directory
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "No issues found" in done.stdout


@pytest.mark.timeout(LIMIT_S)
def test_no_request_to_the_data_plane_is_answered_by_a_fault(url: str, tmp_path: Path) -> None:
    attack(url, tmp_path, [word for tag in DATA for word in ("--include-tag", tag)])


@pytest.mark.timeout(LIMIT_S)
def test_no_request_to_the_administration_is_answered_by_a_fault(url: str, tmp_path: Path) -> None:
    attack(url, tmp_path, [word for tag in DATA for word in ("--exclude-tag", tag)])
