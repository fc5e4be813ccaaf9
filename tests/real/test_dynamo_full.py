"""What takes longer of a Dynamo deployment: a worker that is killed, etcd instead of files, an engine that is vLLM."""

import concurrent.futures
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes
from tests.real.test_dynamo_worker import same

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

PROMPT = [300 + 7 * i for i in range(12)]
ETCD = processes.ROOT / ".cache" / "etcd" / "etcd"
SLOW = ["--engine", "mock", "--served-model-name", "roll", "--engine-option", "vocab_tokens=1024"]


@contextlib.contextmanager
def etcd(root: Path) -> Iterator[dict[str, str]]:
    """One etcd; yields what a Dynamo process is told of it."""
    if not ETCD.exists():
        raise FileNotFoundError(f"{ETCD} is missing: run scripts/fetch_etcd.sh")
    client, peer = processes.free_ports(2)
    urls = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = [str(ETCD), "--data-dir", str(root / "etcd"), "--listen-client-urls", urls[0]]
    command += ["--advertise-client-urls", urls[0], "--listen-peer-urls", urls[1]]
    command += ["--initial-advertise-peer-urls", urls[1], "--initial-cluster", f"default={urls[1]}"]
    with processes.running(command, root / "etcd.log", environment={}) as process:
        processes.wait_for_http(f"{urls[0]}/health", process, root / "etcd.log", timeout_s=30)
        yield {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": urls[0], "ETCD_LEASE_TTL": "3"}


def asked_until_served(server: processes.Server, body: dict[str, Any]) -> Any:
    """The first answer; a client asks again after a 5xx, as Dynamo does not move a Generate to another worker."""
    answers: list[Any] = []

    def served() -> bool:
        answers.append(deployment.generate(server, body))
        assert answers[-1][0] == 200 or answers[-1][0] >= 500, answers[-1]
        return bool(answers[-1][0] == 200)

    deployment.until(served, server.log, timeout_s=40)
    return answers[-1][1]


@pytest.mark.parametrize("store", ["file", "etcd"])
def test_after_a_kill_the_clients_retry_is_served_by_the_other_worker(tmp_path: Path, store: str) -> None:
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(etcd(tmp_path)) if store == "etcd" else {}
        kv = tmp_path / "kv"
        theirs = stack.enter_context(
            deployment.frontend(kv, tmp_path / "frontend.log", mode="round-robin", environment=environment)
        )
        workers = {
            name: stack.enter_context(
                deployment.worker(kv, tmp_path / f"{name}.log", engine=SLOW, environment=environment)
            )
            for name in ("a", "b")
        }
        deployment.until(lambda: "roll" in deployment.models(theirs), theirs.log)
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "seed": 1, "top_k": 3}}
        seen = set[str]()

        def both_answered() -> (
            bool
        ):  # the frontend lists the model by its first worker, and may know the second a little later
            seen.add(deployment.passed(asked_until_served(theirs, body))["worker"])
            return seen == {"a", "b"}

        deployment.until(both_answered, theirs.log)

        os.kill(workers["a"].pid, signal.SIGKILL)
        for _ in range(4):
            assert deployment.passed(asked_until_served(theirs, body))["worker"] == "b"
        listed = f"{theirs.rl_url}/v1/rl/workers"
        deployment.until(lambda: len(deployment.get(listed)["workers"]) == 1, theirs.log)
        assert [deployment.generate(theirs, body)[0] for _ in range(6)] == [200] * 6


def test_a_worker_that_is_told_to_stop_finishes_what_it_has(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    engine = [*SLOW, "--engine-option", "step_s=0.05"]
    with (
        deployment.frontend(kv, tmp_path / "frontend.log", mode="round-robin") as theirs,
        deployment.worker(kv, tmp_path / "slow.log", engine=engine) as worker,
    ):
        deployment.until(lambda: "roll" in deployment.models(theirs), theirs.log)
        body = {"model": "roll", "token_ids": PROMPT, "sampling_params": {"max_tokens": 40, "ignore_eos": True}}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(deployment.generate, theirs, body)
            deployment.until(lambda: deployment.get(f"{worker.http_url}/health")["running"] == 1, worker.log)
            os.kill(worker.pid, signal.SIGTERM)
            status, answer = asked.result(timeout=30)
        assert status == 200, answer
        assert len(answer["choices"][0]["token_ids"]) == 40


def test_without_the_frontends_adapter_setting_a_worker_that_lacks_the_adapter_refuses(tmp_path: Path) -> None:
    """Dynamo then sends its requests to every worker; none is answered by the base model."""
    kv = tmp_path / "kv"
    adapter = str(shared_model("lora", base=str(shared_model("qwen3")), seed=1))
    with (
        deployment.frontend(
            kv, tmp_path / "f.log", mode="round-robin", environment={"DYN_LORA_ENABLED": "false"}
        ) as theirs,
        deployment.worker(kv, tmp_path / "a.log", engine=SLOW) as with_it,
        deployment.worker(kv, tmp_path / "b.log", engine=SLOW),
    ):
        load = {"lora_name": "ad1", "source": {"uri": adapter}}
        assert deployment.post(f"{with_it.http_url}/engine/load_lora", load)[0] == 200
        deployment.until(lambda: "ad1" in deployment.models(theirs), theirs.log)
        body = {"model": "ad1", "token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
        answers = [deployment.generate(theirs, body) for _ in range(8)]
        assert {status for status, _ in answers} == {200, 400}
        for status, answer in answers:
            if status == 200:
                assert deployment.passed(answer)["worker"] == "a"
            else:
                assert "ad1" in answer["error"]["message"]


SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 8, "temperature": 0, "logprobs": 2},
    {"max_tokens": 8, "temperature": 0, "prompt_logprobs": 1},
    {"max_tokens": 32, "temperature": 0, "stop": [" ", "e"], "logprobs": 0},
    {"max_tokens": 6, "seed": 3, "top_k": 5, "n": 2, "logprobs": 1},
]


def answers_alike(theirs: processes.Server, worker: processes.Server) -> None:
    """Through Dynamo and past it, the second time from the cache that the first one filled."""
    (model,) = deployment.models(theirs)
    for sampling in SAMPLINGS:
        body = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
        status, answer = deployment.generate(theirs, body)
        assert status == 200, (sampling, answer)
        status, alone = deployment.generate(worker, body)
        assert status == 200, (sampling, alone)
        same(answer, alone)
    stopped = {"model": model, "token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "seed": 3, "stop": ["e"]}}
    _, answer = deployment.generate(theirs, stopped)
    assert deployment.passed(answer)["choices"][0]["stop_reason"] == "e"


def test_a_vllm_server_behind_our_worker_answers_as_it_does_without_dynamo(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    with (
        processes.vllm_rs(
            shared_model("qwen3"), tmp_path / "vllm.log", arguments=["--served-model-name", "roll"]
        ) as vllm,
        deployment.frontend(kv, tmp_path / "frontend.log") as theirs,
    ):
        engine = ["--engine", "vllm-grpc", "--grpc-endpoint", vllm.grpc_target, "--vllm-http-endpoint", vllm.http_url]
        with deployment.worker(kv, tmp_path / "vllm-worker.log", engine=engine, card="qwen3") as worker:
            deployment.until(lambda: deployment.models(theirs), theirs.log)
            answers_alike(theirs, worker)


def test_vllm_in_our_worker_answers_as_it_does_without_dynamo(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    with (
        deployment.frontend(kv, tmp_path / "frontend.log") as theirs,
        deployment.vllm_worker(kv, tmp_path / "vllm.log", model=shared_model("qwen3")) as worker,
    ):
        deployment.until(lambda: deployment.models(theirs), theirs.log)
        answers_alike(theirs, worker)
