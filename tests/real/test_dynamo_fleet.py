"""One fleet of ours over a Dynamo deployment with our worker and Dynamo's own sidecar side by side."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes

pytestmark = pytest.mark.timeout(300)

BODY = {"token_ids": [300 + 7 * i for i in range(12)], "sampling_params": {"max_tokens": 2}}
KEY = "key-of-the-administration-0001"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Rig:
    theirs: processes.Server
    fleet: processes.Server
    worker: processes.Server
    sidecar: processes.Server
    model: str
    adapter: str

    def fleet_call(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        return deployment.post(f"{self.fleet.http_url}/engine/{route}", body, timeout_s=60)

    def sidecar_call(self, route: str) -> Any:
        return deployment.post(f"{self.sidecar.http_url}/engine/{route}", {})[1]

    def worker_call(self, route: str) -> Any:
        return deployment.post(f"{self.worker.http_url}/engine/{route}", {}, headers=WITH_KEY)[1]

    def worker_is_paused(self) -> bool:
        return bool(deployment.get(f"{self.worker.http_url}/is_paused", headers=WITH_KEY)["is_paused"])


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    root = tmp_path_factory.mktemp("dynamo-fleet")
    store = root / "kv"
    model = str(shared_model("qwen3"))
    adapter = str(shared_model("lora", base=model, seed=1))
    (grpc_port,) = processes.free_ports(1)
    mock = [sys.executable, "-m", "rollplane.cli.main", "mock-vllm", "--port", str(grpc_port), "--model", model]
    mock += ["--engine-option", "model=roll", "--engine-option", "vocab_tokens=1024"]
    mock += ["--ready-file", str(root / "mock.ready")]
    key = root / "admin.key"
    key.write_text(f"{KEY}\n")
    keyed = ["--admin-key-file", str(key), "--root", str(Path(model).parent)]
    with (
        deployment.frontend(store, root / "frontend.log", mode="round-robin") as theirs,
        processes.running(mock, root / "mock.log", environment={}),
        deployment.worker(store, root / "ours.log", card="qwen3", arguments=keyed) as worker,
    ):
        deployment.until((root / "mock.ready").exists, root / "mock.log")
        with deployment.sidecar(store, root / "sidecar.log", grpc_port=grpc_port) as sidecar:
            listed = f"{theirs.rl_url}/v1/rl/workers"
            deployment.until(lambda: len(deployment.get(listed)["workers"]) == 2, root / "frontend.log")
            arguments = ["--dynamo-rl-url", theirs.rl_url, "--worker-key-file", str(key)]
            with deployment.own_frontend(root / "fleet.log", arguments=arguments) as fleet:
                deployment.until(lambda: deployment.standing(fleet) == [None, None], root / "fleet.log")
                yield Rig(theirs, fleet, worker, sidecar, model, adapter)


def test_both_kinds_serve_behind_one_frontend(rig: Rig) -> None:
    kinds = set()
    for _ in range(8):
        status, answer = deployment.generate(rig.theirs, BODY)
        assert status == 200, answer
        kinds.add("ours" if answer.get("kv_transfer_params") else "theirs")
    assert kinds == {"ours", "theirs"}


def test_the_administration_that_the_deployment_names_has_keys(rig: Rig) -> None:
    urls = [worker["system_url"] for worker in deployment.get(f"{rig.theirs.rl_url}/v1/rl/workers")["workers"]]

    assert rig.worker.http_url in urls
    assert deployment.post(f"{rig.worker.http_url}/engine/pause_generation", {})[0] == 401
    assert not rig.worker_is_paused()


def test_one_pause_reaches_both_by_their_own_routes(rig: Rig) -> None:
    status, answer = rig.fleet_call("pause_generation", {"mode": "keep"})
    assert status == 200, answer
    assert rig.sidecar_call("control/is_paused") == {"is_paused": True}
    assert rig.worker_is_paused()

    status, answer = rig.fleet_call("resume_generation", {})
    assert status == 200, answer
    assert rig.sidecar_call("control/is_paused") == {"is_paused": False}
    assert not rig.worker_is_paused()


def test_one_label_reaches_both(rig: Rig) -> None:
    status, answer = rig.fleet_call("set_weight_version", {"weight_version": "v7"})

    assert status == 200, answer
    assert rig.sidecar_call("control/get_weight_version") == {"weight_version": "v7"}
    assert rig.worker_call("get_weight_version")["weight_version"] == "v7"


def test_one_adapter_reaches_both_and_is_a_model_of_the_deployment(rig: Rig) -> None:
    load = {"lora_name": "ad1", "source": {"uri": rig.adapter}}
    status, answer = rig.fleet_call("load_lora", load)
    assert status == 200, answer
    assert list(rig.sidecar_call("update/list_loras")["loras"]) == ["ad1"]
    deployment.until(lambda: "ad1" in deployment.models(rig.theirs), rig.theirs.log)
    answers = [deployment.generate(rig.theirs, {**BODY, "model": "ad1"}) for _ in range(4)]
    assert [status for status, _ in answers] == [200] * 4, answers

    status, answer = rig.fleet_call("unload_lora", {"lora_name": "ad1"})
    assert status == 200, answer
    assert rig.sidecar_call("update/list_loras")["loras"] == {}
    deployment.until(lambda: "ad1" not in deployment.models(rig.theirs), rig.theirs.log)


def test_an_update_is_refused_by_the_name_of_the_worker_and_the_route_that_it_lacks(rig: Rig) -> None:
    before = rig.worker_call("get_weight_version")
    status, answer = rig.fleet_call("update_weights_from_disk", {"model_path": rig.model, "weight_version": "v8"})

    assert status == 400, answer
    said = answer["error"]["message"]
    assert "advertises no route update_weights_from_disk" in said
    assert str(rig.sidecar.http_port) in said
    assert rig.worker_call("get_weight_version") == before
    assert deployment.standing(rig.fleet) == [None, None]
