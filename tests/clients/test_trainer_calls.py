"""The HTTP calls of trainers whose clients cannot be installed here, in their order, with their bodies and defaults.

prime-rl's administration: its packages are not published. TRL's client runs itself, in vLLM's environment: `trl_client.py`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.clients.conftest import MODEL, model_directory
from tests.clients.scripts import trl

VLLM_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
)


@pytest.fixture
async def http(server: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server, timeout=60) as client:
        yield client


async def test_prime_rl_starts_updates_and_reads_metrics(http: httpx.AsyncClient) -> None:
    checkpoint = model_directory("qwen3-moe", layers=2, seed=1)
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/liveness")).status_code == 200
    card = (await http.get("/v1/models")).json()["data"][0]
    assert (card["id"], type(card["max_model_len"])) == (MODEL, int)
    metrics = (await http.get("/metrics")).text
    assert [name for name in VLLM_GAUGES if name not in metrics] == []

    for call, body in (
        ("/pause?mode=keep&clear_cache=false", None),
        ("/update_weights", {"weight_dir": str(checkpoint)}),
        ("/update_weights", {"weight_dir": str(checkpoint)}),  # it asks again after a 5xx, without a new pause
        ("/resume", None),
    ):
        answer = await http.post(call, json=body)
        assert answer.status_code == 200, (call, answer.text)

    rollout = await http.post(
        "/inference/v1/generate",
        json={"model": MODEL, "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "logprobs": 1}},
    )
    assert rollout.json()["choices"][0]["policy_versions"] == [[checkpoint.name, 0]]


async def test_prime_rl_scores_with_the_prompts_own_token_first(http: httpx.AsyncClient) -> None:
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": MODEL, "token_ids": [301, 302, 303], "sampling_params": sampling}

    answer = (await http.post("/inference/v1/generate", json=body)).json()

    assert answer["choices"][0]["routed_experts"] is None  # it parses with vLLM's model, which takes no such object
    assert answer["prompt_logprobs"][0] is None
    assert [next(iter(row)) for row in answer["prompt_logprobs"][1:]] == ["302", "303"]


async def test_prime_rl_replaces_an_adapter_under_one_name(http: httpx.AsyncClient, adapters: list[Path]) -> None:
    missing = await http.post("/load_lora_adapter", json={"lora_name": "rl", "lora_path": str(adapters[0] / "no")})
    assert missing.status_code == 404  # files may still be on their way: it asks again after 404 and 500 only

    generations = []
    for path in adapters:
        answer = await http.post("/load_lora_adapter", json={"lora_name": "rl", "lora_path": str(path)})
        assert answer.status_code == 200, answer.text
        rollout = await http.post(
            "/inference/v1/generate",
            json={"model": "rl", "token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
        )
        generations.append(rollout.json()["rollplane"]["adapter_generation"])
    cards = (await http.get("/v1/models")).json()["data"]
    unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": "rl"})

    assert generations[0] < generations[1]
    assert "rl" in [card["id"] for card in cards]
    assert unloaded.status_code == 200


async def test_prime_rls_broadcast_over_nccl_is_refused_with_the_reason(http: httpx.AsyncClient) -> None:
    body = {
        "host": "127.0.0.1",
        "port": 29501,
        "rank_offset": 1,
        "inference_world_size": 1,
        "timeout": 5,
        "quantize_in_weight_transfer": False,
        "session_id": "s",
    }
    answer = await http.post("/init_broadcaster", json=body)

    assert answer.status_code == 400
    assert "pickle" in answer.text


def test_trls_own_client_generates_chats_and_scores(server: str) -> None:
    found = trl("trl_client.py", server)

    assert [len(ids) for ids in found["generated"]] == [5, 5, 5, 5]
    assert found["prompts"] == [[11, 12, 13], [14, 15]]
    assert [len(rows) for rows in found["logprobs"]] == [5, 5, 5, 5]
    assert len(found["chat"]) == 1
    assert len(found["scored"][0]) == 3
    assert found["world_size"] == 1
    assert "no weight-transfer engine" in found["refused"]


def test_trls_asynchronous_client_publishes_an_adapter_per_version(server: str, adapters: list[Path]) -> None:
    found = trl("trl_async.py", server, *map(str, adapters))

    assert (found["max_model_len"], found["dtype"]) == (1024, "torch.float32")
    assert (found["world_size"], found["data_parallel_size"]) == (1, 1)
    assert set(found["lora_config"]) == {"max_loras", "max_lora_rank"}
    assert [len(each["ids"]) == len(each["logprobs"]) for each in [*found["rollouts"], found["after"]]] == [True] * 3
    for what, status in (("init", 400), ("start", 400), ("update", 400), ("finish", 400)):
        assert found["refused"][what].startswith(f"Request failed: {status}"), what
