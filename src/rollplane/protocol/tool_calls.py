"""Tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write them.

A call that cannot be read whole (cut off, not JSON, without a name) leaves the text as it is: the caller then sees what the model
said, and no call is made up.
"""

import re
from typing import Any, Final

import msgspec

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_BLOCK: Final = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `arguments`: a JSON object as text, as OpenAI's answers carry it."""

    name: str
    arguments: str


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


def split_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text outside of calls, and the calls in order; all of the text and none where one of them cannot be read."""
    calls = []
    try:
        for block in _BLOCK.findall(text):
            written = msgspec.json.decode(block.strip().encode(), type=_Written)
            calls.append(ToolCall(name=written.name, arguments=msgspec.json.encode(written.arguments).decode()))
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return text, []
    rest = _BLOCK.sub("", text)
    if OPEN in rest or CLOSE in rest:
        return text, []
    return (rest, calls) if calls else (text, [])
