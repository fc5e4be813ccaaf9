"""Chats with tools, as evaluations of agents send them: calls read from the model's text, asked for by the OpenAI SDK."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from tests.e2e.server_support import serving
from tests.models import tiny

from rollplane.protocol.events import EndEvent, Event, ServedBy
from rollplane.protocol.request import GenerateRequest
from rollplane.server.text import TextModel
from rollplane.testing import ScriptedEngine, script_choice
from rollplane.worker import Worker

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ASKED: Any = {"model": "scripted", "messages": [{"role": "user", "content": "def main"}], "tools": [TOOL]}
END = 0


@contextlib.asynccontextmanager
async def saying(text: str, **settings: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedEngine]]:
    """A server whose model always says this, token by token where it streams."""
    directory = tiny.shared_model("qwen3", layers=2)
    ids = [*TextModel(directory).encode(text, special=False).tolist(), END]

    def script(request: GenerateRequest) -> list[Event]:
        events: list[Event] = []
        if request.stream:
            events += [script_choice([each], finish_reason=None) for each in ids[:-1]]
            ids_left = ids[-1:]
        else:
            ids_left = ids
        return [
            *events,
            script_choice(ids_left, finish_reason="stop"),
            EndEvent(served_by=ServedBy(logprobs_mode="sampling")),
        ]

    engine = ScriptedEngine(script)
    options = {"tool_call_parser": "hermes", **settings}
    async with (
        serving(Worker(engine), tokenizer=directory, **options) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        yield sdk, engine


async def streamed(sdk: openai.AsyncOpenAI, **fields: Any) -> tuple[str, list[Any], str | None]:
    content, calls, reason = "", [], None
    async for chunk in await sdk.chat.completions.create(stream=True, **{**ASKED, **fields}):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reason = choice.finish_reason or reason
    return content, calls, reason


async def test_a_call_comes_whole_unary_and_streamed_alike() -> None:
    async with saying(f"I add.{CALL}") as (sdk, _):
        whole = (await sdk.chat.completions.create(**ASKED)).choices[0]
        content, calls, reason = await streamed(sdk)

    assert whole.message.tool_calls is not None
    (unary,), (chunked,) = whole.message.tool_calls, calls
    assert (whole.finish_reason, reason) == ("tool_calls", "tool_calls")
    assert (whole.message.content, content) == ("I add.", "I add.")
    assert unary.type == "function"
    assert (unary.function.name, unary.function.arguments) == ("add", '{"a":1}')
    assert (chunked.index, chunked.function.name, chunked.function.arguments) == (0, "add", '{"a":1}')


@pytest.mark.parametrize("text", ["a < b and <tool", "<tool_call>add(1)</tool_call>", CALL[:-2]])
async def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    async with saying(text) as (sdk, _):
        whole = (await sdk.chat.completions.create(**ASKED)).choices[0]
        content, calls, reason = await streamed(sdk)

    assert (whole.message.content, content) == (text, text)
    assert (whole.message.tool_calls, calls) == (None, [])
    assert (whole.finish_reason, reason) == ("stop", "stop")


async def test_without_tools_or_with_tool_choice_none_a_call_is_text() -> None:
    async with saying(CALL) as (sdk, _):
        plain = await sdk.chat.completions.create(model="scripted", messages=ASKED["messages"])
        none = await sdk.chat.completions.create(**ASKED, tool_choice="none")

    assert [each.choices[0].message.content for each in (plain, none)] == [CALL, CALL]


async def test_an_earlier_calls_arguments_reach_the_template_as_an_object() -> None:
    turn = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    earlier: Any = [
        {"role": "assistant", "content": None, "tool_calls": [turn]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    bad = {**turn, "function": {"name": "add", "arguments": "{"}}
    async with saying("It is 2.") as (sdk, engine):
        await sdk.chat.completions.create(**{**ASKED, "messages": [*ASKED["messages"], *earlier]})
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].tool_calls\[0\].function.arguments"):
            await sdk.chat.completions.create(**{**ASKED, "messages": [{"role": "assistant", "tool_calls": [bad]}]})

    assert len(engine.requests) == 1


async def test_a_server_that_reads_no_calls_refuses_tools_by_the_setting() -> None:
    async with saying(CALL, tool_call_parser=None) as (sdk, _):
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await sdk.chat.completions.create(**ASKED)
