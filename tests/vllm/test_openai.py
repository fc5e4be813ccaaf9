"""Evaluation routes over vLLM in process, and vLLM's own response models reading every answer of ours."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.models.tiny import shared_model
from tests.vllm.support import LastingEngine
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, ChatCompletionStreamResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse

from rollplane.config import ServerSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.server.app import create_app
from rollplane.server.auth import KeyRing
from rollplane.server.metrics import Metrics
from rollplane.server.service import Service
from rollplane.server.text import Texts
from rollplane.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = {"prompt": [[301, 302, 303], [304, 305]], "n": 2, "max_tokens": 6, "seed": 3, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "def main"}], "max_tokens": 8, "seed": 4}


@contextlib.asynccontextmanager
async def client_of(worker: Worker) -> AsyncIterator[httpx.AsyncClient]:
    await worker.start()
    service = Service(
        role="worker",
        engine=worker,
        admin=worker,
        worker=worker,
        settings=ServerSettings(),
        keys=KeyRing(),
        metrics=Metrics(),
        texts=Texts(shared_model("qwen3")),
    )
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=120) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(lora_engine: LastingEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(Worker(lora_engine)) as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bytes:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.content


def chunks(content: bytes) -> list[bytes]:
    found = [line.removeprefix(b"data: ") for line in content.split(b"\n") if line.startswith(b"data: ")]
    assert found[-1] == b"[DONE]"
    return found[:-1]


async def test_vllms_models_read_completions(http: httpx.AsyncClient) -> None:
    found = CompletionResponse.model_validate_json(await post(http, "/v1/completions", {**TOKENS, "logprobs": 0}))

    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.prompt_token_ids for choice in found.choices] == [[301, 302, 303]] * 2 + [[304, 305]] * 2
    assert [len(choice.logprobs.token_logprobs) for choice in found.choices] == [
        len(choice.token_ids) for choice in found.choices
    ]


async def test_vllms_models_read_scored_prompts() -> None:
    """Of the mock: an engine with adapters scores no prompts."""
    worker = Worker(MockEngine(MockSettings(vocab_tokens=1024)))
    body = {"prompt": [[301, 302, 303]], "max_tokens": 1, "prompt_logprobs": 2}
    async with client_of(worker) as http:
        found = CompletionResponse.model_validate_json(await post(http, "/v1/completions", body))

    rows = found.choices[0].prompt_logprobs
    assert rows[0] is None
    assert [next(iter(row)) for row in rows[1:]] == [302, 303]


async def test_vllms_models_read_a_streamed_completion_that_folds_to_the_unary_one(http: httpx.AsyncClient) -> None:
    whole = CompletionResponse.model_validate_json(await post(http, "/v1/completions", TOKENS))
    streamed = chunks(await post(http, "/v1/completions", {**TOKENS, "stream": True}))

    parts = [choice for each in streamed for choice in CompletionStreamResponse.model_validate_json(each).choices]
    for choice in whole.choices:
        assert "".join(part.text for part in parts if part.index == choice.index) == choice.text


async def test_vllms_models_read_chats_unary_and_streamed_alike(http: httpx.AsyncClient) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    whole = ChatCompletionResponse.model_validate_json(await post(http, "/v1/chat/completions", body))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks(await post(http, "/v1/chat/completions", {**body, **options}))

    parts = [ChatCompletionStreamResponse.model_validate_json(each) for each in streamed]
    text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert text == whole.choices[0].message.content
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert parts[-1].usage == whole.usage


async def test_vllms_models_read_generate(http: httpx.AsyncClient) -> None:
    body = {"token_ids": [301, 302, 303], "sampling_params": {"max_tokens": 5, "logprobs": 1, "top_p": 0.9}}
    found = GenerateResponse.model_validate_json(await post(http, "/inference/v1/generate", body))

    assert len(found.choices[0].token_ids) == len(found.choices[0].logprobs.content)


async def test_a_stop_string_ends_text_where_vllm_finds_it(http: httpx.AsyncClient) -> None:
    body = {"prompt": "import os", "max_tokens": 40, "seed": 2}
    free = CompletionResponse.model_validate_json(await post(http, "/v1/completions", body)).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 2]

    found = CompletionResponse.model_validate_json(await post(http, "/v1/completions", {**body, "stop": stop}))

    assert found.choices[0].text == free[: free.index(stop)]
    assert (found.choices[0].finish_reason, found.choices[0].stop_reason) == ("stop", stop)
