"""The bodies that the evaluation routes answer with, whole and in chunks: OpenAI's shapes, with what Rollplane knows beside.

Beyond OpenAI's fields, every choice has `policy_versions` and `stop_reason`, and the body a `rollplane` object; token ids,
prompt log-probabilities and side channels stand in them where they were asked for.
"""

import itertools
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from rollplane.protocol.answer import ids_raw, prompt_logprobs_raw, routes_tree, served_by_tree, usage_tree
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import LOGPROB_FLOOR, TokenLogprobs
from rollplane.protocol.openai import ChatBody, EvaluationBody, sampling_of
from rollplane.protocol.request import Encoding
from rollplane.protocol.response import Choice, GenerateResponse, Usage
from rollplane.protocol.sampling import SamplingParams
from rollplane.protocol.tool_calls import split_calls
from rollplane.server.text import TextModel


@dataclass(frozen=True)
class Style:
    """How one body is answered."""

    chat: bool
    model: str
    response_id: str
    created: int
    token_ids: bool
    tokens_as_ids: bool
    sampling: SamplingParams
    routes: Encoding
    reads_tools: bool = False
    """Tool calls are read from the text."""

    @classmethod
    def of(cls, body: EvaluationBody, *, model: str, request_id: str, routes: Encoding) -> "Style":
        """The style that a body asks for."""
        chat = isinstance(body, ChatBody)
        return cls(
            chat=chat,
            model=model,
            response_id=f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            created=int(time.time()),
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            sampling=sampling_of(body),
            routes=routes,
            reads_tools=isinstance(body, ChatBody) and bool(body.tools) and body.tool_choice != "none",
        )

    @property
    def skips_special(self) -> bool:
        """Whether special tokens are left out of texts. The marks of a tool call may be some."""
        return bool(self.sampling.get("skip_special_tokens", not self.reads_tools))

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """What every body and chunk begins with."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}


def text_of(choice: Choice, style: Style, texts: TextModel) -> str:
    """The text of a whole choice, cut where it was stopped.

    A stop string, and the token that ended the choice, are left out unless `include_stop_str_in_output`.
    """
    keep = bool(style.sampling.get("include_stop_str_in_output", False))
    ids, stop = choice.token_ids, choice.stop_reason
    if choice.finish_reason == "stop" and not isinstance(stop, str) and not keep:
        ids = ids[:-1]
    text = texts.decode(ids, skip_special=style.skips_special)
    if not isinstance(stop, str):
        return text
    # The last token completed it, so it is the first that ends there: that token may hold it more than once.
    before = texts.decode(ids[:-1], skip_special=style.skips_special)
    at = text.find(stop, max(0, len(before) - len(stop) + 1))
    if at < 0:
        return text
    return text[: at + len(stop)] if keep else text[:at]


def whole_answer(
    responses: list[GenerateResponse], style: Style, texts: TextModel, *, prompts: list[Int32Array]
) -> dict[str, Any]:
    """The body of a unary answer; choices of several prompts in the prompts' order."""
    choices: list[dict[str, Any]] = []
    for response, prompt in zip(responses, prompts, strict=True):
        final_prompt = response.prompt_token_ids if response.prompt_token_ids is not None else prompt
        for choice in response.choices:
            tree = whole_choice(choice, style, texts, index=len(choices))
            if style.token_ids and not style.chat:
                tree["prompt_token_ids"] = ids_raw(final_prompt)
            if response.prompt_logprobs is not None and not style.chat:
                tree["prompt_logprobs"] = prompt_logprobs_raw(response.prompt_logprobs)
            choices.append(tree)
    first = responses[0]
    body = style.head(chunk=False) | {
        "choices": choices,
        "usage": usage_tree(total_usage([r.usage for r in responses])),
    }
    body["rollplane"] = served_by_tree(first.served_by)
    if style.chat and style.token_ids:
        body["prompt_token_ids"] = ids_raw(first.prompt_token_ids if first.prompt_token_ids is not None else prompts[0])
    if style.chat and first.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs_raw(first.prompt_logprobs)
    return body


def whole_choice(choice: Choice, style: Style, texts: TextModel, *, index: int) -> dict[str, Any]:
    """One finished choice."""
    text = text_of(choice, style, texts)
    tree: dict[str, Any] = {"index": index}
    calls: list[dict[str, Any]] = []
    if style.chat:
        text, calls = content_of(text, style, index=index)
        tree["message"] = {"role": "assistant", "content": text}
        if calls:
            tree["message"] |= {"content": text or None, "tool_calls": calls}
    else:
        tree["text"] = text
    tree["logprobs"] = logprobs_tree(choice.token_ids, choice.logprobs, style, texts)
    return (
        tree
        | ending(choice, style, called=bool(calls))
        | ({"token_ids": ids_raw(choice.token_ids)} if style.token_ids else {})
    )


def content_of(text: str, style: Style, *, index: int) -> tuple[str, list[dict[str, Any]]]:
    """A chat's content and its tool calls, where they are read. A call's id is of the answer: a repeated request gets the same."""
    if not style.reads_tools:
        return text, []
    text, calls = split_calls(text)
    return text, [
        {
            "id": f"call-{style.response_id}-{index}-{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(calls)
    ]


def ending(choice: Choice, style: Style, *, called: bool = False) -> dict[str, Any]:
    """What a choice says at its end; `called`: it ended to have its tools called."""
    tree: dict[str, Any] = {
        "finish_reason": "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "policy_versions": choice.policy_versions,
    }
    if choice.routed_experts is not None:
        tree["routed_experts"] = routes_tree(choice.routed_experts, routes=style.routes)
    if choice.sampling_mask is not None:
        tree["sampling_mask"] = choice.sampling_mask.rows()
    return tree


def logprobs_tree(
    ids: Int32Array, logprobs: TokenLogprobs | None, style: Style, texts: TextModel, *, offset: int = 0
) -> dict[str, Any] | None:
    """The log-probabilities of some tokens, in the shape of the route; None where they were not asked for.

    Args:
        offset: characters of the choice before the first of these tokens, for `text_offset`.
    """
    if logprobs is None:
        return None
    names = [_name(i, style, texts) for i in ids.tolist()]
    values = logprobs.values.tolist()
    tops = _tops(logprobs, style, texts)
    if style.chat:
        return {
            "content": [
                {
                    "token": name,
                    "logprob": value,
                    "bytes": list(name.encode()),
                    "top_logprobs": [{"token": t, "logprob": v, "bytes": list(t.encode())} for t, v in top],
                }
                for name, value, top in zip(names, values, tops, strict=True)
            ]
        }
    lengths = [0, *itertools.accumulate(len(name) for name in names)]
    return {
        "tokens": names,
        "token_logprobs": values,
        "top_logprobs": [
            {name: value} | {t: v for t, v in top if t != name}
            for name, value, top in zip(names, values, tops, strict=True)
        ],
        "text_offset": [offset + at for at in lengths[: len(names)]],
    }


def _tops(logprobs: TokenLogprobs, style: Style, texts: TextModel) -> list[list[tuple[str, float]]]:
    top = logprobs.alternatives
    if top is None:
        return [[] for _ in range(int(logprobs.values.size))]
    names = [_name(i, style, texts) for i in top.ids.tolist()]
    values = [max(value, LOGPROB_FLOOR) for value in top.values.tolist()]
    pairs = list(zip(names, values, strict=True))
    return [pairs[a:b] for a, b in itertools.pairwise(top.offsets.tolist())]


def _name(token_id: int, style: Style, texts: TextModel) -> str:
    return f"token_id:{token_id}" if style.tokens_as_ids else texts.piece(token_id)


def total_usage(parts: list[Usage]) -> Usage:
    """The counts of several answers together."""
    cached = [part.cached_tokens for part in parts if part.cached_tokens is not None]
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        cached_tokens=sum(cached) if cached else None,
    )


_encoder = msgspec.json.Encoder()


def encode(tree: dict[str, Any]) -> bytes:
    """Compact JSON."""
    return _encoder.encode(tree)
