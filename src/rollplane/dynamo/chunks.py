"""Answers as the chunks that Dynamo's frontend folds. Pure.

A Generate answer is one terminal chunk per choice. What the frontend's answer has no field for travels in
`engine_data.kv_transfer_params`, the one object that it passes through, under `rollplane`: policy versions, the true finish
reasons, stop reasons, usage, who served it. The frontend turns a finish reason `abort` into a 499 without tokens; by setting
such an answer ends as `length` instead, and `rollplane.choices[i].finish_reason` says the truth.
"""

import itertools
from typing import Any, Final, Literal

import msgspec
import numpy as np

from rollplane.errors import EngineProtocolError
from rollplane.protocol.answer import prompt_logprobs_raw, served_by_tree, usage_tree
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import Alternatives, TokenLogprobs, encode_routes_structured
from rollplane.protocol.events import ChoiceEvent
from rollplane.protocol.response import Choice, GenerateResponse

PartialRollouts = Literal["refuse", "length"]
PASSTHROUGH: Final = "rollplane"
FINISH: Final = {"stop": "stop", "length": "length", "abort": "cancelled", "repetition": "stop"}
"""Ours -> what the frontend folds; any other word is a 500 there."""


def generate_chunks(response: GenerateResponse, *, partial: PartialRollouts = "refuse") -> list[dict[str, Any]]:
    """The chunks of one folded Generate answer, one per choice; the last carries what belongs to all.

    Raises:
        EngineProtocolError: the engine's own `kv_transfer_params` have a member `rollplane`.
    """
    chunks = [choice_chunk(choice, partial=partial) for choice in response.choices]
    last = chunks[-1].setdefault("engine_data", {})
    if response.prompt_logprobs is not None:
        last["prompt_logprobs"] = msgspec.json.decode(prompt_logprobs_raw(response.prompt_logprobs))
    theirs = response.kv_transfer_params or {}
    if PASSTHROUGH in theirs:
        raise EngineProtocolError(f"the engine's kv_transfer_params have a member {PASSTHROUGH!r}, which is ours")
    last["kv_transfer_params"] = {**theirs, PASSTHROUGH: passthrough(response)}
    return chunks


def choice_chunk(choice: Choice, *, partial: PartialRollouts) -> dict[str, Any]:
    """The terminal chunk of one choice."""
    finish = FINISH[choice.finish_reason]
    if choice.finish_reason == "abort" and partial == "length":
        finish = "length"
    chunk: dict[str, Any] = {"index": choice.index, "token_ids": choice.token_ids.tolist(), "finish_reason": finish}
    _add_logprobs(chunk, choice.token_ids, choice.logprobs)
    data: dict[str, Any] = {}
    if choice.routed_experts is not None:
        data["routed_experts"] = encode_routes_structured(choice.routed_experts)
    if choice.sampling_mask is not None:
        data["sampling_mask"] = choice.sampling_mask.rows()
    if data:
        chunk["engine_data"] = data
    return chunk


def passthrough(response: GenerateResponse) -> dict[str, Any]:
    """What has no field of its own in Dynamo's answer."""
    tree = served_by_tree(response.served_by)
    tree["choices"] = [
        {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "policy_versions": [list(span) for span in choice.policy_versions],
        }
        for choice in response.choices
    ]
    tree["usage"] = usage_tree(response.usage)
    tree["model"], tree["created"] = response.model, response.created
    if response.prompt_token_ids is not None:
        tree["prompt_token_ids"] = response.prompt_token_ids.tolist()
    if response.mm_placeholders is not None:
        tree["mm_placeholders"] = response.mm_placeholders
    for name in ("ec_transfer_params", "metrics", "prompt_token_id_logprobs"):
        value = getattr(response, name)
        if value is not None:
            tree[name] = value
    return tree


def delta_chunk(event: ChoiceEvent) -> dict[str, Any]:
    """One chunk of a completion: a delta, or the end of a choice."""
    chunk: dict[str, Any] = {"index": event.index, "token_ids": event.token_ids.tolist()}
    _add_logprobs(chunk, event.token_ids, event.logprobs)
    if event.finish_reason is not None:
        chunk["finish_reason"] = FINISH[event.finish_reason]
        spans = [list(span) for span in event.policy_versions]
        chunk["engine_data"] = {PASSTHROUGH: {"policy_versions": spans, "finish_reason": event.finish_reason}}
    return chunk


def _add_logprobs(chunk: dict[str, Any], ids: Int32Array, logprobs: TokenLogprobs | None) -> None:
    if logprobs is None:
        return
    chunk["log_probs"] = logprobs.values.tolist()
    top = logprobs.alternatives
    # The frontend lists the sampled tokens itself where nothing else is given.
    if top is not None and not (np.array_equal(top.ids, ids) and np.array_equal(top.values, logprobs.values)):
        chunk["top_logprobs"] = top_rows(top)


def top_rows(top: Alternatives) -> list[list[dict[str, Any]]]:
    """Per position its most likely tokens, with the ranks that the frontend insists on."""
    cells = [
        {"rank": rank, "token_id": token, "token": f"token_id:{token}", "logprob": value}
        for rank, token, value in zip(top.ranks.tolist(), top.ids.tolist(), top.values.tolist(), strict=True)
    ]
    offsets = top.offsets.tolist()
    return [cells[a:b] for a, b in itertools.pairwise(offsets)]
