"""Evaluation traffic: OpenAI's routes over the embedded engine, asked by the OpenAI SDK and by hand."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio
from tests.e2e.server_support import Served, data_of, serving, strict_json
from tests.models import tiny

from rollplane.engines.embedded.engine import EmbeddedEngine
from rollplane.engines.embedded.settings import EmbeddedSettings
from rollplane.engines.mock.engine import MockEngine
from rollplane.engines.mock.settings import MockSettings
from rollplane.protocol.openai import parse_completion
from rollplane.protocol.response import Choice
from rollplane.server.openai_answers import Style, text_of
from rollplane.server.text import TextModel
from rollplane.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for all

MODEL = "tiny"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "def main"}], "max_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny.shared_model("qwen3", layers=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(directory: Path) -> AsyncIterator[Served]:
    engine = EmbeddedEngine(
        EmbeddedSettings(model=str(directory), threads=1, max_model_len=512, served_model_name=[MODEL])
    )
    async with serving(Worker(engine), tokenizer=directory) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sdk(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def post(served: Served, path: str, body: dict[str, Any], *, status: int = 200) -> dict[str, Any]:
    async with served.post(path, body) as answer:
        content = await answer.read()
        assert answer.status == status, content
        found: dict[str, Any] = strict_json(content)
        return found


async def events(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    async with served.post(path, {**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.read()
        return data_of(await answer.read())


async def test_the_sdk_completes_token_prompts_and_gets_their_ids_back(sdk: openai.AsyncOpenAI) -> None:
    found = await sdk.completions.create(
        model=MODEL,
        prompt=[[11, 12, 13], [14, 15]],
        n=2,
        max_tokens=5,
        seed=3,
        logprobs=0,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": 0, "min_p": 0.0},
    )

    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.prompt_token_ids for choice in found.choices] == [[11, 12, 13]] * 2 + [[14, 15]] * 2
    for choice in found.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [f"token_id:{i}" for i in choice.token_ids]
        assert len(choice.logprobs.token_logprobs) == len(choice.token_ids)
        assert choice.policy_versions[0][1] == 0
    assert found.usage is not None
    assert found.usage.prompt_tokens == 3 + 2


async def test_tokens_and_logprobs_are_those_that_generate_gives(served: Served) -> None:
    sampling = {"max_tokens": 9, "seed": 4, "logprobs": 0}
    rollout = (await served.generate({"token_ids": [21, 22, 23], "sampling_params": sampling}))["choices"][0]

    found = await post(served, COMPLETIONS, {"prompt": [21, 22, 23], "return_token_ids": True, **sampling})

    choice = found["choices"][0]
    assert choice["token_ids"] == rollout["token_ids"]
    assert choice["logprobs"]["token_logprobs"] == [each["logprob"] for each in rollout["logprobs"]["content"]]


async def test_the_sdk_chats_through_the_models_template(served: Served, sdk: openai.AsyncOpenAI) -> None:
    found = await sdk.chat.completions.create(
        model=MODEL, messages=CHAT_BODY["messages"], max_tokens=6, seed=1, logprobs=True, top_logprobs=2
    )
    tokens = (await post(served, "/tokenize", {"messages": CHAT_BODY["messages"]}))["tokens"]
    prompt = (await post(served, "/detokenize", {"tokens": tokens}))["prompt"]

    choice = found.choices[0]
    assert prompt == "<|im_start|>user\ndef main<|im_end|>\n<|im_start|>assistant\n"
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(tokens)
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [len(each.top_logprobs) for each in choice.logprobs.content] == [2] * found.usage.completion_tokens


async def test_a_rendered_chat_is_the_request_that_generate_answers_as_the_chat_route_does(served: Served) -> None:
    body = {**CHAT_BODY, "model": MODEL, "cache_salt": "7", "max_tokens": 6}
    rendered = await post(served, f"{CHAT}/render", body)
    chat = await post(served, CHAT, {**body, "return_token_ids": True})
    made = await post(served, "/inference/v1/generate", rendered)

    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert rendered["features"] is None
    assert made["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]


async def test_an_engine_that_processes_no_media_renders_none(served: Served) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    refused = await post(served, f"{CHAT}/render", {"messages": [{"role": "user", "content": content}]}, status=400)

    assert "features" in refused["error"]["message"]


async def test_the_sdk_streams_a_chat_to_the_unary_text(served: Served, sdk: openai.AsyncOpenAI) -> None:
    whole = await post(served, CHAT, CHAT_BODY)
    text, usage, role = "", None, None
    stream = await sdk.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **CHAT_BODY
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            role = choice.delta.role or role
            text += choice.delta.content or ""

    assert (text, role) == (whole["choices"][0]["message"]["content"], "assistant")
    assert usage is not None
    assert usage.completion_tokens == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_string_cuts_the_text_alike_unary_and_streamed(served: Served, keep: bool) -> None:
    body = {"prompt": "import os", "max_tokens": 40, "seed": 2, "include_stop_str_in_output": keep}
    free = (await post(served, COMPLETIONS, body))["choices"][0]["text"]
    stop = free[len(free) // 2 : len(free) // 2 + 2]

    whole = (await post(served, COMPLETIONS, {**body, "stop": [stop]}))["choices"][0]
    chunks = await events(served, COMPLETIONS, {**body, "stop": [stop]})

    assert whole["text"] == free[: free.index(stop)] + (stop if keep else "")
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["text"]
    assert chunks[-1] == "[DONE]"


async def test_a_stop_string_that_its_last_token_holds_twice_cuts_at_the_first() -> None:
    texts, style = TextModel(tiny.shared_model("qwen3", layers=2)), style_of({"prompt": "x", "stop": ["  "]})
    ids = texts.encode("def" + " " * 12, special=False)
    tokens = next(i for i in range(1, len(ids) + 1) if "  " in texts.decode(ids[:i], skip_special=True))
    choice = Choice(index=0, token_ids=ids[:tokens], finish_reason="stop", stop_reason="  ")

    assert texts.decode(choice.token_ids, skip_special=True).count(" ") > 3  # several blanks are one token
    assert text_of(choice, style, texts) == "def"


def style_of(body: dict[str, Any]) -> Style:
    return Style.of(parse_completion(msgspec.json.encode(body)), model="m", request_id="r", routes="structured")


async def test_streams_of_several_prompts_keep_their_indices(served: Served) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 7, "seed": 8, "return_token_ids": True, "logprobs": 1}
    whole = await post(served, COMPLETIONS, body)

    chunks = await events(served, COMPLETIONS, {**body, "stream_options": {"include_usage": True}})

    parts = [choice for chunk in chunks[:-2] for choice in chunk["choices"]]
    for expected in whole["choices"]:
        own = [part for part in parts if part["index"] == expected["index"]]
        assert "".join(part["text"] for part in own) == expected["text"]
        assert [i for part in own for i in part["token_ids"]] == expected["token_ids"]
        assert [v for part in own for v in part["logprobs"]["text_offset"]] == expected["logprobs"]["text_offset"]
        assert own[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert own[-1]["finish_reason"] == expected["finish_reason"]
    assert chunks[-2]["usage"] == whole["usage"]


async def test_prompt_logprobs_come_with_each_choice(served: Served) -> None:
    body = {"prompt": [[31, 32, 33]], "max_tokens": 1, "prompt_logprobs": 1}

    found = (await post(served, COMPLETIONS, body))["choices"][0]["prompt_logprobs"]

    assert found[0] is None
    assert [next(iter(each)) for each in found[1:]] == ["32", "33"]


async def test_a_policy_version_nobody_has_is_refused_as_on_generate(served: Served) -> None:
    error = await post(served, CHAT, {**CHAT_BODY, "rollplane": {"policy_version": "v9"}}, status=409)

    assert "v9" in error["error"]["message"]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": [5_000]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"nonsense": 1}, "nonsense"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"response_format": {"type": "yaml"}}, "response_format"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format"),
        (COMPLETIONS, {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        (COMPLETIONS, {"stop_token_ids": [None]}, "stop_token_ids[0]"),
        (COMPLETIONS, {"stop_token_ids": [5_000]}, "stop_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        (COMPLETIONS, {"stream": True, "vllm_xargs": {"a": 1}}, "vllm_xargs"),
        (COMPLETIONS, {"stream": True, "stream_options": {"nope": 1}}, "stream_options.nope"),
        (COMPLETIONS, {"prompt": list(range(600))}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"max_completion_tokens": 3}, "max_completion_tokens"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "content_parts[0]",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_by_the_callers_own_name(
    served: Served, path: str, change: dict[str, Any], param: str
) -> None:
    base = CHAT_BODY if path == CHAT else {"prompt": [1, 2], "max_tokens": 2}

    error = (await post(served, path, {**base, **change}, status=400))["error"]

    assert error["param"] == param, error
    assert "sampling_params" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "nope": 1}, "nope"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [5_000]}, "tokens[0]"),  # the decoder would leave it out without a word
    ],
)
async def test_what_is_no_text_or_token_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    error = (await post(served, path, body, status=400))["error"]

    assert error["param"] == param, error


async def test_a_server_without_a_tokenizer_says_how_to_give_it_one() -> None:
    async with serving(Worker(MockEngine(MockSettings()))) as served:
        error = (await post(served, CHAT, CHAT_BODY, status=400))["error"]

    assert "--tokenizer" in error["message"]


async def test_an_unknown_model_is_a_404(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await sdk.completions.create(model="other", prompt="x")
