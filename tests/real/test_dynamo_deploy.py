"""What is in `deploy/`: the Kubernetes files are what Kubernetes takes, and the local script serves."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
from tests.models.tiny import shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes

pytestmark = pytest.mark.timeout(300)

DEPLOY = processes.ROOT / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def test_the_kubernetes_files_are_valid_to_the_last_field() -> None:
    validate = processes.DYNAMO_ENV / "bin" / "kubernetes-validate"
    done = subprocess.run([str(validate), "--strict", *map(str, FILES)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(" passed ") >= 13


def test_the_flags_of_the_kubernetes_workers_are_flags_of_ours() -> None:
    text = (DEPLOY / "kubernetes" / "workers.yaml").read_text()
    asked = set(re.findall(r"^ +- (--[a-z-]+)=", text, flags=re.MULTILINE))
    python = processes.DYNAMO_ENV / "bin" / "python"
    command = [str(python), "-m", "rollplane.cli.main", "worker", "--help"]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"COLUMNS": "200", "TERM": "dumb"}
    ).stdout

    assert {"--runtime", "--public-url", "--admin-key-file"} <= asked
    assert {flag for flag in asked if flag not in said} == set()


def test_the_local_script_serves_and_ends_with_all_it_started(tmp_path: Path) -> None:
    http, rl, first = processes.free_ports(3)
    log = tmp_path / "log"
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "PYTHON": str(processes.DYNAMO_ENV / "bin" / "python"),
        "HTTP_PORT": str(http),
        "RL_PORT": str(rl),
        "WORKER_PORT": str(first),
    }
    engine = ["--engine", "mock", "--served-model-name", "roll", "--engine-option", "vocab_tokens=1024"]
    command = ["bash", str(DEPLOY / "dynamo-local.sh"), "1", "--", *engine, "--model-card", str(shared_model("qwen3"))]
    with processes.running(command, log, environment=environment) as process:
        server = processes.Server(process.pid, http, log, rl_port=rl)
        processes.wait_for_http(f"{server.http_url}/health", process, log, timeout_s=60)
        deployment.until(lambda: "roll" in deployment.models(server), log)
        status, answer = deployment.generate(server, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}})
        assert status == 200, answer
        assert len(deployment.get(f"{server.rl_url}/v1/rl/workers")["workers"]) == 1
        process.stop(stop_s=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "killed" not in log.read_text(encoding="utf-8", errors="replace").lower()
