"""Discovery by Kubernetes: Dynamo's real client for it, in the frontend and in our worker, against a stand-in of the API."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.models.tiny import shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes
from tests.real.kubernetes_api import uid_of

pytestmark = pytest.mark.timeout(300)

KUBERNETES = {"DYN_DISCOVERY_BACKEND": "kubernetes", "POD_NAMESPACE": "default"}
BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "logprobs": 1}}


def pod(name: str) -> dict[str, str]:
    return {"POD_NAME": name, "POD_UID": uid_of(name)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a pod of the cluster is told of it."""
    (port,) = processes.free_ports(1)
    api = [sys.executable, str(Path(__file__).with_name("kubernetes_api.py")), str(port), "frontend-0", "worker-0"]
    config = tmp_path / "kubeconfig"
    config.write_text(
        f'apiVersion: v1\nkind: Config\ncurrent-context: x\nclusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]\n'
        "users: [{name: u, user: {token: t}}]\ncontexts: [{name: x, context: {cluster: c, user: u, namespace: default}}]\n"
    )
    with processes.running(api, tmp_path / "api.log", environment={}) as process:
        processes.wait_for_http(f"http://127.0.0.1:{port}/", process, tmp_path / "api.log", timeout_s=30)
        yield KUBERNETES | {"KUBECONFIG": str(config)}


def test_frontend_and_worker_find_each_other_by_kubernetes(tmp_path: Path, cluster: dict[str, str]) -> None:
    kv = tmp_path / "unused"
    with deployment.frontend(kv, tmp_path / "f.log", environment=cluster | pod("frontend-0")) as theirs:
        with deployment.worker(kv, tmp_path / "w.log", environment=cluster | pod("worker-0")):
            deployment.until(lambda: "roll" in deployment.models(theirs), theirs.log)
            status, answer = deployment.generate(theirs, BODY)
            assert status == 200, answer
            assert deployment.passed(answer)["worker"] == "w"
            (listed,) = deployment.get(f"{theirs.rl_url}/v1/rl/workers")["workers"]
            assert "update_weights_from_disk" in listed["routes"]
        assert deployment.generate(theirs, BODY)[0] >= 400
    assert not kv.exists()


def test_a_worker_outside_a_cluster_ends_with_what_is_missing() -> None:
    command = [str(processes.DYNAMO_ENV / "bin" / "python"), "-m", "rollplane.cli.main", "worker", "--port", "0"]
    command += ["--runtime", "dynamo", "--engine", "mock", "--model-card", str(shared_model("qwen3"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POD_")} | KUBERNETES
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)

    assert done.returncode != 0
    assert "Dynamo's runtime does not start: POD_NAME not available" in done.stderr
