"""`rollplane mock-vllm` and a worker in front of it, as processes."""

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
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


async def test_a_stopped_engine_process_turns_readiness_and_a_paused_one_looks_alive(tmp_path: Path) -> None:
    mock_log, worker_log = tmp_path / "mock", tmp_path / "worker"
    options = (
        "--engine-option",
        "model=roll",
        "--engine-option",
        "vocab_tokens=1024",
        "--engine-option",
        "step_s=0.01",
    )
    with running("mock-vllm", *options, "--port", "0", log=mock_log) as mock:
        endpoint = ready_line(mock, mock_log)["url"].removeprefix("grpc://")
        flags = ("--engine", "vllm-grpc", "--grpc-endpoint", endpoint, "--port", "0", "--stall-s", "1.5")
        with running("worker", *flags, log=worker_log) as worker:
            url = ready_line(worker, worker_log)["url"]
            body = {"token_ids": [5], "stream": True, "sampling_params": {"max_tokens": 300, "ignore_eos": True}}
            async with aiohttp.ClientSession() as session, asyncio.timeout(60):

                async def status_of(probe: str) -> int:
                    async with session.get(f"{url}/{probe}") as answer:
                        return answer.status

                async def until(probe: str, status: int) -> None:
                    while await status_of(probe) != status:  # noqa: ASYNC110 - nothing tells but the probe
                        await asyncio.sleep(0.05)

                async with session.post(f"{url}/inference/v1/generate", json=body) as stream:
                    await stream.content.readline()
                    assert await status_of("ready") == 200
                    mock.send_signal(signal.SIGSTOP)
                    try:
                        began = time.monotonic()
                        await until("ready", 503)
                        assert time.monotonic() - began < 5.0, "a probe that goes unanswered told it, not the tokens"
                        assert await status_of("liveness") == 200
                    finally:
                        mock.send_signal(signal.SIGCONT)
                    await until("ready", 200)
                    assert b"[DONE]" in await stream.read()

                async with session.post(f"{url}/engine/pause_generation", json={"mode": "keep"}) as answer:
                    assert answer.status == 200

                async def held() -> bytes:
                    async with session.post(f"{url}/inference/v1/generate", json=body) as stream:
                        return await stream.read()

                waiting = asyncio.create_task(held())
                for _ in range(20):
                    await asyncio.sleep(0.1)  # all together longer than the limit of a stall
                    assert [await status_of(probe) for probe in ("health", "liveness", "ready")] == [200] * 3
                async with session.post(f"{url}/engine/resume_generation", json={}) as answer:
                    assert answer.status == 200
                assert b"[DONE]" in await waiting
