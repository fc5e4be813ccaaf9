"""Our worker behind NVIDIA Dynamo's real frontend, beside our own frontend over the same workers."""

import base64
import concurrent.futures
import itertools
import json
import random
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.models.qwen_features import image_fields, payload
from tests.models.tiny import IMAGE_PAD_ID, shared_model
from tests.real import dynamo_deployment as deployment
from tests.real import processes

from rollplane import Client, DynamoClient
from rollplane.client.options import GenerateOptions

pytestmark = pytest.mark.timeout(300)

PROMPT = [300 + 7 * i for i in range(12)]
PAYLOAD = payload(**image_fields(grid=(1, 2, 2)))
FEATURES = {
    "mm_hashes": {"image": ["theirs"]},
    "mm_placeholders": {"image": [{"offset": 2, "length": 4, "is_embed": [True, True, False, True]}]},
    "kwargs_data": {"image": [base64.b64encode(PAYLOAD).decode()]},
}
# What the router takes into account: all of the model's image tokens, and nothing else, are an image's.
IMAGE = {**FEATURES, "mm_placeholders": {"image": [{"offset": 20, "length": 4}]}}


@dataclass(frozen=True)
class Rig:
    theirs: processes.Server
    ours: processes.Server
    workers: list[processes.Server]
    adapter: str
    store: Path


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    root = tmp_path_factory.mktemp("dynamo-worker")
    store = root / "kv"
    adapter = str(shared_model("lora", base=str(shared_model("qwen3")), seed=1))
    with (
        deployment.frontend(store, root / "frontend.log") as theirs,
        deployment.worker(store, root / "a.log") as a,
        deployment.worker(store, root / "b.log") as b,
        deployment.own_frontend(root / "own.log", arguments=["--dynamo-rl-url", theirs.rl_url]) as ours,
    ):
        deployment.until(lambda: "roll" in deployment.models(theirs), root / "frontend.log")
        deployment.until(lambda: deployment.standing(ours) == [None, None], root / "own.log")
        yield Rig(theirs, ours, [a, b], adapter, store)


def same(theirs: Any, ours: Any) -> None:
    """Ids, logprobs, routes and masks are equal; see `docs/dynamo.md` for what differs."""
    assert len(theirs["choices"]) == len(ours["choices"])
    for mine, other in zip(ours["choices"], theirs["choices"], strict=True):
        for name in ("index", "token_ids", "finish_reason", "sampling_mask", "routed_experts"):
            assert (name, other.get(name)) == (name, mine[name])
        if mine["logprobs"] is None:
            assert other.get("logprobs") is None
            continue
        cells = [(c["token"], c["logprob"]) for c in mine["logprobs"]["content"]]
        assert [(c["token"], c["logprob"]) for c in other["logprobs"]["content"]] == cells
        for c, d in zip(mine["logprobs"]["content"], other["logprobs"]["content"], strict=True):
            tops = [(t["token"], t["logprob"]) for t in c["top_logprobs"]]
            assert set(tops) <= {(t["token"], t["logprob"]) for t in d["top_logprobs"]}
    assert deployment.passed(theirs)["choices"] == [
        {name: choice[name] for name in ("index", "finish_reason", "stop_reason", "policy_versions")}
        for choice in ours["choices"]
    ]


def without_texts(prompt_logprobs: Any) -> Any:
    """Dynamo's frontend leaves `decoded_token` out where it is null."""
    if prompt_logprobs is None:
        return None
    return [row and {token: {k: v for k, v in cell.items() if k != "decoded_token"} for token, cell in row.items()}
            for row in prompt_logprobs]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {"max_tokens": 9, "temperature": 0.8, "top_k": 7, "seed": 4, "logprobs": 1}},
        {"sampling_params": {"max_tokens": 5, "top_p": 0.7, "seed": 1, "logprobs": 3, "prompt_logprobs": 1}},
        {"sampling_params": {"max_tokens": 4, "top_k": 3, "seed": 2, "n": 3, "logprobs": 0}},
        {"sampling_params": {"max_tokens": 4, "top_k": 3, "seed": 2}, "cache_salt": "v7", "priority": 3},
        {"sampling_params": {"max_tokens": 4, "top_k": 3, "seed": 2, "cache_salt": "nested"}},
        {"sampling_params": {"max_tokens": 3, "top_k": 3, "seed": 2, "routed_experts_prompt_start": 5}},
        {"sampling_params": {"max_tokens": 40, "top_k": 3, "seed": 5, "stop_token_ids": [380, 472, 867]}},
        {"sampling_params": {"max_tokens": 4, "top_k": 3, "seed": 2}, "features": FEATURES},
        {"sampling_params": {"max_tokens": 4, "top_k": -1, "min_p": 0.0, "seed": 3, "return_token_ids": True,
                             "logprobs": 1, "skip_special_tokens": False}},
    ],
    ids=["logprobs", "prompt", "three", "salt", "nested-salt", "start", "stop-ids", "features", "prime-rl"],
)  # fmt: skip
def test_both_frontends_answer_alike(rig: Rig, body: dict[str, Any]) -> None:
    body = {"token_ids": PROMPT, **body}
    status, theirs = deployment.generate(rig.theirs, body)
    assert status == 200, theirs
    status, ours = deployment.generate(rig.ours, body)
    assert status == 200, ours

    same(theirs, ours)
    assert theirs["prompt_logprobs"] == without_texts(ours["prompt_logprobs"])


async def test_our_client_reads_through_dynamo_what_it_reads_from_us(rig: Rig) -> None:
    """All arrays, alternatives, prompt log-probabilities, routes, masks, versions and reasons to stop."""
    options: GenerateOptions = {
        "model": "roll",
        "sampling_params": {"max_tokens": 9, "top_k": 7, "seed": 4, "n": 2, "logprobs": 3, "prompt_logprobs": 2},
        "features": FEATURES,
        "request_id": "twice",
        "return_token_ids": True,
        "echo_sampling": True,
    }
    async with DynamoClient(rig.theirs.http_url) as theirs, Client(rig.ours.http_url) as ours:
        through, direct = await theirs.generate(PROMPT, **options), await ours.generate(PROMPT, **options)

    assert through.choices[0].routed_experts is not None
    assert through.choices[0].sampling_mask is not None
    assert through.prompt_logprobs is not None
    assert through.model == direct.model == "roll"
    assert deployment.comparable(through) == deployment.comparable(direct)
    assert through.served_by.effective_sampling == direct.served_by.effective_sampling
    assert through.usage.prompt_tokens == direct.usage.prompt_tokens


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"sampling_params": {"nope": 1}}, "sampling_params.nope is not a sampling parameter"),
        ({"sampling_params": {}, "token_ids": [5000]}, "5000"),
        ({"sampling_params": {}, "token_ids": [5] * 5000}, "maximum context length"),
        ({"sampling_params": {"stop": ["x"]}}, "stop_token_ids"),
        ({"sampling_params": {"max_tokens": 1}, "cache_salt": ""}, "cache_salt"),
        ({"sampling_params": {"max_tokens": 1}, "mystery": 1}, "mystery"),
        ({"sampling_params": {"max_tokens": 1}, "rollplane": {"policy_version": "v99"}}, "v99"),
        ({"sampling_params": {"max_tokens": 1}, "features": {**FEATURES, "kwargs_data": {"image": ["!"]}}}, "base64"),
    ],
    ids=["field", "vocabulary", "context", "stop", "salt", "unknown", "version", "features"],
)
def test_a_refusal_arrives_with_its_sentence(rig: Rig, body: dict[str, Any], says: str) -> None:
    status, answer = deployment.generate(rig.theirs, {"token_ids": PROMPT, **body})

    assert status == 400, answer
    assert says in answer["error"]["message"]


def test_the_frontends_request_id_is_the_workers(rig: Rig) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    _, answer = deployment.generate(rig.theirs, body, **{"X-Request-Id": "mine"})

    assert answer["request_id"] == "mine"


def test_the_models_card_says_what_the_engine_has(rig: Rig) -> None:
    cards = [json.loads(path.read_text()) for path in (rig.store / "v1" / "mdc").rglob("*") if path.is_file()]

    assert len(cards) == 2
    for card in cards:
        found = json.dumps(card)
        told = deep(card)
        assert told["context_length"] == 4096, found
        assert told["kv_cache_block_size"] == 16, found
        assert told["total_kv_blocks"] == 65_536, found
        assert told["max_num_seqs"] == 256, found
        assert told["vllm_inference_v1_generate"] in (True, "true"), found
        assert told["vllm_enable_tower_connector_lora"] in (False, "false"), found


def deep(tree: Any) -> dict[str, Any]:
    """Every plain member of a tree by its name, whatever it stands in."""
    found: dict[str, Any] = {}
    for name, value in tree.items() if isinstance(tree, dict) else ():
        found |= deep(value) if isinstance(value, dict) else {name: value}
    return found


def test_completions_are_tokenized_by_dynamo_and_made_by_us(rig: Rig) -> None:
    body = {"model": "roll", "prompt": "def answer", "max_tokens": 6, "seed": 1, "logprobs": 1}
    status, answer = deployment.post(f"{rig.theirs.http_url}/v1/completions", body)

    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 6


def test_a_chat_streams_and_ends_at_dynamos_stop_string(rig: Rig) -> None:
    chat = {"model": "roll", "messages": [{"role": "user", "content": "answer"}], "max_tokens": 40, "seed": 1}
    url = f"{rig.theirs.http_url}/v1/chat/completions"
    status, whole = deployment.post(url, {**chat, "temperature": 0.8})
    assert status == 200, whole
    text = whole["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]

    status, cut = deployment.post(url, {**chat, "temperature": 0.8, "stop": [stop]})
    assert status == 200, cut
    assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    deployment.until(lambda: all(running(worker) == 0 for worker in rig.workers), rig.theirs.log, timeout_s=10)

    data = json.dumps({**chat, "temperature": 0.8, "stream": True}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answered:
        lines = [line[6:] for line in answered.read().decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    deltas = [choice["delta"].get("content") or "" for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert "".join(deltas) == text


@pytest.mark.parametrize("scope", [{}, {"cache_salt": "v7"}, {"features": IMAGE}], ids=["text", "salt", "image"])
@pytest.mark.parametrize("warm", [0, 1])
def test_the_router_finds_the_worker_that_has_a_prompt_cached(rig: Rig, scope: dict[str, Any], warm: int) -> None:
    """One worker is warmed past Dynamo, so that its router can know of it by our events alone.

    An event takes a moment, and a prompt that came before its event is cached on both: then other prompts are tried.
    """
    seeds = itertools.count(10_000 * warm)

    def all_hit() -> bool:
        prompts = [fresh_prompt(next(seeds), image="features" in scope) for _ in range(12)]
        bodies = [{"token_ids": prompt, "sampling_params": {"max_tokens": 1}, **scope} for prompt in prompts]
        for body in bodies:
            assert deployment.generate(rig.workers[warm], body)[0] == 200
        answers = [
            deployment.generate(rig.theirs, {**body, "token_ids": [*body["token_ids"], 8, 9]}) for body in bodies
        ]
        found = [deployment.passed(answer) for _, answer in answers]
        cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found]
        return {each["worker"] for each in found} == {"ab"[warm]} and set(cached) == {160}

    deployment.until(all_hit, rig.theirs.log, timeout_s=20)


def fresh_prompt(seed: int, *, image: bool) -> list[int]:
    """160 tokens that no other seed begins with."""
    prompt = random.Random(seed).choices(range(7, 900), k=160)
    if image:
        prompt[20:24] = [IMAGE_PAD_ID] * 4
    return prompt


def test_an_adapter_is_a_model_while_it_is_loaded(rig: Rig) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "top_k": 3, "seed": 2}, "model": "ad1"}
    load = {"lora_name": "ad1", "source": {"uri": rig.adapter}}
    assert deployment.post(f"{rig.workers[0].http_url}/engine/load_lora", load)[0] == 200
    deployment.until(lambda: "ad1" in deployment.models(rig.theirs), rig.theirs.log)
    answers = [deployment.generate(rig.theirs, body) for _ in range(6)]
    assert [status for status, _ in answers] == [200] * 6, answers
    assert {deployment.passed(answer)["worker"] for _, answer in answers} == {"a"}
    _, base = deployment.generate(rig.theirs, {**body, "model": "roll"})
    assert base["choices"][0]["token_ids"] != answers[0][1]["choices"][0]["token_ids"]

    unload = {"lora_name": "ad1"}
    assert deployment.post(f"{rig.workers[0].http_url}/engine/unload_lora", unload)[0] == 200
    deployment.until(lambda: "ad1" not in deployment.models(rig.theirs), rig.theirs.log)
    assert deployment.generate(rig.theirs, body)[0] == 404


def test_the_deployment_finds_our_own_administration(rig: Rig) -> None:
    found = deployment.get(f"{rig.theirs.rl_url}/v1/rl/workers")
    by_url = {worker["system_url"]: worker for worker in found["workers"]}

    assert set(by_url) == {worker.http_url for worker in rig.workers}
    for record in by_url.values():
        assert (record["model"], record["world_size"]) == ("roll", 1)
        assert "update_weights_from_disk" in record["routes"]


def test_an_update_of_the_fleet_shows_in_the_versions_of_rollouts_through_dynamo(rig: Rig) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "seed": 1, "top_k": 3}, "cache_salt": "s"}
    update = {"model_path": str(shared_model("qwen3")), "weight_version": "v1"}
    status, report = deployment.post(f"{rig.ours.http_url}/engine/update_weights_from_disk", update)
    assert status == 200, report

    versions = {}
    for _ in range(6):
        _, answer = deployment.generate(rig.theirs, body)
        passed = deployment.passed(answer)
        versions[passed["worker"]] = passed["choices"][0]["policy_versions"]
    assert set(map(str, versions.values())) == {"[['v1', 0]]"}
    for worker in rig.workers:
        _, answer = deployment.generate(worker, body)
        assert answer["choices"][0]["policy_versions"] == [["v1", 0]]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[processes.Server, processes.Server, int]]:
    """A frontend and one worker that takes its time, returns what an abort leaves, takes large requests; its system port."""
    (system_port,) = processes.free_ports(1)
    root = tmp_path_factory.mktemp("dynamo-slow")
    engine = ("--engine", "mock", "--served-model-name", "roll")
    arguments = ["--engine-option", "step_s=0.05", "--engine-option", "vocab_tokens=1024"]
    arguments += ["--partial-rollouts", "length", "--max-hold-s", "0.5", "--max-feature-bytes", str(64 * 2**20)]
    arguments += ["--max-body-bytes", str(128 * 2**20)]
    arguments += ["--engine-option", 'faults=[{"kind":"fail","request_id":"to-fail"}]']
    with (
        deployment.frontend(root / "kv", root / "frontend.log", mode="round-robin", environment=LARGE) as theirs,
        deployment.worker(
            root / "kv",
            root / "slow.log",
            engine=engine,
            arguments=arguments,
            environment=LARGE | {"DYN_SYSTEM_PORT": str(system_port)},
        ) as worker,
    ):
        deployment.until(lambda: "roll" in deployment.models(theirs), theirs.log)
        yield theirs, worker, system_port


def running(worker: processes.Server) -> int:
    return int(deployment.get(f"{worker.http_url}/health")["running"])


def test_a_caller_who_hangs_up_ends_the_engines_work(slow: tuple[processes.Server, processes.Server, int]) -> None:
    theirs, worker, _ = slow
    body = json.dumps({"model": "roll", "token_ids": PROMPT, "sampling_params": {"max_tokens": 3000}}).encode()
    with socket.create_connection(("127.0.0.1", theirs.http_port)) as connection:
        head = "POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        deployment.until(lambda: running(worker) == 1, worker.log)
    deployment.until(lambda: running(worker) == 0, worker.log)


def test_an_aborted_rollout_comes_back_as_length_with_the_truth_beside_it(
    slow: tuple[processes.Server, processes.Server, int],
) -> None:
    theirs, worker, _ = slow
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(deployment.generate, theirs, body, **{"X-Request-Id": "to-abort"})
        deployment.until(lambda: running(worker) == 1, worker.log)
        aborted = deployment.post(f"{worker.http_url}/engine/abort_request", {"request_id": "to-abort"})
        assert aborted == (200, {"status": "ok", "aborted": 1})
        status, answer = asked.result(timeout=30)

    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    assert deployment.passed(answer)["choices"][0]["finish_reason"] == "abort"
    assert len(answer["choices"][0]["token_ids"]) < 3000


def test_a_busy_worker_is_a_503_and_serves_the_next_request_at_once(
    slow: tuple[processes.Server, processes.Server, int],
) -> None:
    theirs, worker, _ = slow
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    assert deployment.post(f"{worker.http_url}/engine/pause_generation", {})[0] == 200
    status, answer = deployment.generate(theirs, body)
    assert status == 503, answer

    assert deployment.post(f"{worker.http_url}/engine/resume_generation", {})[0] == 200
    status, answer = deployment.generate(theirs, body)
    assert status == 200, answer


def test_one_failed_request_is_a_500_and_leaves_the_worker_in(
    slow: tuple[processes.Server, processes.Server, int],
) -> None:
    theirs, worker, _ = slow
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    status, _ = deployment.generate(theirs, body, **{"X-Request-Id": "to-fail"})
    assert status == 500
    assert "engine_failed" in worker.log.read_text()

    status, answer = deployment.generate(theirs, body)
    assert status == 200, answer


LARGE = {"DYN_TCP_MAX_MESSAGE_SIZE": str(128 * 2**20), "DYN_HTTP_BODY_LIMIT_MB": "128"}


def large_body(megabytes: int) -> dict[str, Any]:
    """A request with an image of so many million bytes on the wire."""
    content = payload(pixels=b"\0" * (megabytes * 750_000))
    features = {**FEATURES, "kwargs_data": {"image": [base64.b64encode(content).decode()]}}
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "features": features}


@pytest.mark.parametrize("megabytes", [40, 60])
def test_a_request_above_dynamos_limits_is_served_where_they_are_raised_on_both_sides(
    slow: tuple[processes.Server, processes.Server, int], megabytes: int
) -> None:
    theirs, _, _ = slow
    status, answer = deployment.generate(theirs, large_body(megabytes))

    assert status == 200, answer
    assert len(answer["choices"][0]["token_ids"]) == 1


def test_a_request_above_the_default_limit_is_refused(rig: Rig) -> None:
    assert deployment.generate(rig.theirs, large_body(40))[0] == 400


def test_dynamos_own_server_in_the_worker_is_on_loopback(
    slow: tuple[processes.Server, processes.Server, int],
) -> None:
    _, _, port = slow
    table = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"]

    assert [where for where in table if where.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
