"""What is a tool call in a text, and what stays text."""

import pytest

from rollplane.protocol.tool_calls import ToolCall, split_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def test_calls_are_read_in_order_and_the_rest_is_content() -> None:
    text = f'Let me see.{CALL}\n<tool_call>{{"name": "now"}}</tool_call>'

    assert split_calls(text) == (
        "Let me see.\n",
        [ToolCall(name="add", arguments='{"a":1,"b":[2]}'), ToolCall(name="now", arguments="{}")],
    )


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "",
        CALL[:-3],
        CALL + "<tool_call>",
        CALL + "</tool_call>",
        "<tool_call>add(1, 2)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        CALL + '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>" + "[" * 10_000 + "</tool_call>",
        '<tool_call>{"name": "\ud800"}</tool_call>',
    ],
)
def test_what_cannot_be_read_whole_stays_text(text: str) -> None:
    assert split_calls(text) == (text, [])
