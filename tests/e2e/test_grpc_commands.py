"""`rollplane mock-vllm` and a worker in front of it, as processes."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.commands import ready_line, running


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_worker_serves_a_vllm_grpc_server(tmp_path: Path) -> None:
    mock_log, worker_log = tmp_path / "mock", tmp_path / "worker"
    options = ("--engine-option", "model=roll", "--engine-option", "vocab_tokens=1024", "--port", "0")
    with running("mock-vllm", *options, log=mock_log) as mock:
        endpoint = ready_line(mock, mock_log)["url"].removeprefix("grpc://")
        flags = ("--engine", "vllm-grpc", "--grpc-endpoint", endpoint, "--port", "0")
        with running("worker", *flags, log=worker_log) as worker:
            ready = ready_line(worker, worker_log)
            sampling = {"top_k": -1, "min_p": 0.0, "return_token_ids": True, "logprobs": 1, "max_tokens": 6, "n": 2}
            url = f"{ready['url']}/inference/v1/generate"
            status, answer = post(url, {"token_ids": [5, 6, 7], "sampling_params": {**sampling, "ignore_eos": True}})

            assert ready["model"] == "roll"
            assert status == 200, answer
            assert [len(choice["token_ids"]) for choice in answer["choices"]] == [6, 6]
            assert [choice["policy_versions"] for choice in answer["choices"]] == [[["initial", 0]]] * 2

            status, answer = post(url, {"token_ids": [5], "sampling_params": {"bad_words": ["x"]}})
            assert (status, answer["error"]["param"]) == (400, "sampling_params.bad_words")
