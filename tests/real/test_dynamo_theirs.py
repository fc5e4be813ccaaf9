"""One fleet of ours over a deployment with our worker and Dynamo's own vLLM worker (`python -m dynamo.vllm`), both real."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

BODY = {"token_ids": [300 + 7 * i for i in range(12)], "sampling_params": {"max_tokens": 6, "temperature": 0}}


@dataclass(frozen=True)
class Rig:
    theirs: processes.Server
    fleet: processes.Server
    ours: processes.Server
    other: processes.Server
    model: Path

    def fleet_call(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        return deployment.post(f"{self.fleet.http_url}/engine/{route}", body, timeout_s=120)

    def other_call(self, route: str) -> Any:
        return deployment.post(f"{self.other.http_url}/engine/{route}", {})[1]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    root = tmp_path_factory.mktemp("dynamo-theirs")
    store, model = root / "kv", shared_model("qwen3")
    with (
        deployment.frontend(store, root / "frontend.log", mode="round-robin") as theirs,
        deployment.their_vllm_worker(
            store,
            root / "theirs.log",
            model=model,
            arguments=["--enable-lora", "--max-loras", "2"],
            environment={"DYN_LORA_ENABLED": "true"},
        ) as other,
        deployment.embedded_worker(store, root / "ours.log", model=model) as ours,
    ):
        listed = f"{theirs.rl_url}/v1/rl/workers"
        deployment.until(lambda: len(deployment.get(listed)["workers"]) == 2, root / "theirs.log", timeout_s=200)
        with deployment.own_frontend(root / "fleet.log", arguments=["--dynamo-rl-url", theirs.rl_url]) as fleet:
            deployment.until(lambda: deployment.standing(fleet) == [None, None], root / "fleet.log")
            yield Rig(theirs, fleet, ours, other, model)


def test_both_serve_behind_one_frontend_with_the_same_tokens(rig: Rig) -> None:
    found = {}
    for _ in range(8):
        status, answer = deployment.generate(rig.theirs, BODY)
        assert status == 200, answer
        found["ours" if answer.get("kv_transfer_params") else "theirs"] = answer["choices"][0]["token_ids"]
    assert set(found) == {"ours", "theirs"}
    assert found["ours"] == found["theirs"]


def test_one_pause_one_update_and_one_version_reach_both(rig: Rig) -> None:
    status, answer = rig.fleet_call("pause_generation", {"mode": "keep"})
    assert status == 200, answer
    assert deployment.get(f"{rig.ours.http_url}/is_paused")["is_paused"]
    status, answer = rig.fleet_call("resume_generation", {})
    assert status == 200, answer

    other = str(shared_model("qwen3", seed=5))
    _, before = deployment.generate(rig.theirs, BODY)
    status, answer = rig.fleet_call("update_weights_from_disk", {"model_path": other, "weight_version": "v1"})
    assert status == 200, answer
    assert rig.other_call("get_weight_version")["version"] == "v1"
    tokens = {tuple(deployment.generate(rig.theirs, BODY)[1]["choices"][0]["token_ids"]) for _ in range(6)}
    assert len(tokens) == 1
    assert tokens != {tuple(before["choices"][0]["token_ids"])}

    status, answer = rig.fleet_call("set_weight_version", {"weight_version": "v2"})
    assert status == 200, answer
    assert rig.other_call("get_weight_version")["version"] == "v2"
    assert deployment.standing(rig.fleet) == [None, None]


def test_one_adapter_reaches_both_and_makes_the_same_tokens(rig: Rig) -> None:
    adapter = str(shared_model("lora", base=str(rig.model), seed=1))
    status, answer = rig.fleet_call("load_lora", {"lora_name": "ad1", "source": {"uri": adapter}})
    assert status == 200, answer
    deployment.until(lambda: "ad1" in deployment.models(rig.theirs), rig.theirs.log)
    _, base = deployment.generate(rig.theirs, BODY)

    def answered() -> dict[str, list[int]]:
        found = {}
        for _ in range(8):
            status, answer = deployment.generate(rig.theirs, {**BODY, "model": "ad1"})
            assert status == 200, answer
            found["ours" if answer.get("kv_transfer_params") else "theirs"] = answer["choices"][0]["token_ids"]
        return found

    deployment.until(lambda: set(answered()) == {"ours", "theirs"}, rig.theirs.log, timeout_s=20)
    found = answered()
    assert found["ours"] == found["theirs"] != base["choices"][0]["token_ids"]

    status, answer = rig.fleet_call("unload_lora", {"lora_name": "ad1"})
    assert status == 200, answer
    deployment.until(lambda: "ad1" not in deployment.models(rig.theirs), rig.theirs.log)
