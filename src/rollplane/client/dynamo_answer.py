"""A Generate answer of NVIDIA Dynamo's frontend, made by a worker of ours, as the answer that the worker gave. Pure.

What Dynamo has no field for is in `kv_transfer_params.rollplane` (see `docs/dynamo.md`): true finish reasons, policy versions,
usage, who served it. An answer without it was made by some other worker, of which nobody can say which policy made it.
"""

from typing import Any, Final

import msgspec
import numpy as np

from rollplane.client.json_choice import JsonLogprobs, JsonPosition, mask_of, token_id_of, token_logprobs
from rollplane.errors import EngineProtocolError
from rollplane.protocol.arrays import Int32Array, dec_hook
from rollplane.protocol.artifacts import PromptLogprobs, TokenLogprobs, decode_routes_structured
from rollplane.protocol.events import FinishReason, ServedBy
from rollplane.protocol.response import Choice, GenerateResponse, Usage
from rollplane.protocol.versions import PolicySpan

PASSTHROUGH: Final = "rollplane"


class _Cell(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    index: int
    token_ids: Int32Array
    logprobs: JsonLogprobs | None = None
    routed_experts: dict[str, Any] | None = None
    sampling_mask: list[list[int]] | None = None


class _Answer(msgspec.Struct):
    request_id: str
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Cell] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Truth(msgspec.Struct):
    index: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    policy_versions: list[PolicySpan]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Passed(msgspec.Struct):
    choices: list[_Truth]
    usage: _Usage
    model: str
    created: int
    prompt_token_ids: Int32Array | None = None
    mm_placeholders: dict[str, list[dict[str, Any]]] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    prompt_token_id_logprobs: Any = None


_decoder = msgspec.json.Decoder(_Answer, dec_hook=dec_hook)


def read_answer(content: bytes, *, prompt: Int32Array, alternatives: int | None) -> GenerateResponse:
    """The worker's answer.

    Args:
        prompt: the token ids that were sent, int32 [prompt].
        alternatives: how many per position were asked for (`sampling_params.logprobs`), None for no log-probabilities; Dynamo
            adds the sampled token where it is not among them.

    Raises:
        EngineProtocolError: it cannot be read, was not made by a worker of ours, or contradicts itself.
    """
    try:
        answer = _decoder.decode(content)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineProtocolError(f"the answer cannot be read: {error}") from None
    theirs = dict(answer.kv_transfer_params or {})
    tree = theirs.pop(PASSTHROUGH, None)
    if not isinstance(tree, dict):
        raise EngineProtocolError(
            "the answer has no kv_transfer_params.rollplane: a worker that is not Rollplane's made it, and no policy version is known"
        )
    try:
        passed = msgspec.convert(tree, _Passed, strict=True, dec_hook=dec_hook)
        served_by = msgspec.convert(tree, ServedBy, strict=True)
    except msgspec.ValidationError as error:
        raise EngineProtocolError(f"kv_transfer_params.rollplane cannot be read: {error}") from None
    truths = {truth.index: truth for truth in passed.choices}
    if sorted(truths) != sorted(choice.index for choice in answer.choices):
        raise EngineProtocolError(
            f"the answer has the choices {[c.index for c in answer.choices]}, kv_transfer_params.rollplane has {list(truths)}"
        )
    details = passed.usage.prompt_tokens_details
    return GenerateResponse(
        request_id=answer.request_id,
        model=passed.model,
        created=passed.created,
        choices=sorted(
            (_choice(choice, truths[choice.index], alternatives=alternatives) for choice in answer.choices),
            key=lambda choice: choice.index,
        ),
        usage=Usage(
            prompt_tokens=passed.usage.prompt_tokens,
            completion_tokens=passed.usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
        ),
        prompt_logprobs=_prompt_logprobs(
            answer.prompt_logprobs, prompt if passed.prompt_token_ids is None else passed.prompt_token_ids
        ),
        prompt_token_id_logprobs=passed.prompt_token_id_logprobs,
        prompt_token_ids=passed.prompt_token_ids,
        mm_placeholders=passed.mm_placeholders,
        kv_transfer_params=theirs or None,
        ec_transfer_params=passed.ec_transfer_params,
        metrics=passed.metrics,
        served_by=served_by,
    )


def _choice(choice: _Choice, truth: _Truth, *, alternatives: int | None) -> Choice:
    try:
        routes = None if choice.routed_experts is None else decode_routes_structured(choice.routed_experts)
    except ValueError as error:
        raise EngineProtocolError(f"choice {choice.index}: {error}") from None
    return Choice(
        index=choice.index,
        token_ids=choice.token_ids,
        finish_reason=truth.finish_reason,
        stop_reason=truth.stop_reason,
        logprobs=None
        if choice.logprobs is None
        else _logprobs(choice, choice.logprobs.content, count=alternatives or 0),
        routed_experts=routes,
        sampling_mask=None if choice.sampling_mask is None else mask_of(choice.sampling_mask),
        policy_versions=truth.policy_versions,
    )


def _logprobs(choice: _Choice, content: list[JsonPosition], *, count: int) -> TokenLogprobs:
    """As the worker gave them: each position is held to its token, and what Dynamo added is left out."""
    named = [token_id_of(position.token) for position in content]
    if named != choice.token_ids.tolist():
        raise EngineProtocolError(f"choice {choice.index}: the log-probabilities are of other tokens than token_ids")
    if count >= 0:
        for position in content:
            del position.top_logprobs[count:]
    return token_logprobs(content)


def _prompt_logprobs(rows: list[dict[str, _Cell] | None] | None, prompt: Int32Array) -> PromptLogprobs | None:
    """CSR over the prompt; its own token first in each row, whichever order the rows have."""
    if rows is None:
        return None
    if len(rows) != prompt.size or (rows and rows[0] is not None):
        raise EngineProtocolError(f"prompt_logprobs has {len(rows)} rows for a prompt of {prompt.size} tokens")
    ids: list[int] = []
    cells: list[_Cell] = []
    counts = [0] * len(rows)
    for at, (row, own) in enumerate(zip(rows, prompt.tolist(), strict=True)):
        if row is None:
            if at:
                raise EngineProtocolError(f"prompt_logprobs[{at}] is null")
            continue
        first = row.pop(str(own), None)
        if first is None:
            raise EngineProtocolError(f"prompt_logprobs[{at}] lacks the prompt's own token {own}")
        others = sorted(row.items(), key=lambda item: item[1].rank or 0)
        ids += [own, *(_number(token) for token, _ in others)]
        cells += [first, *(cell for _, cell in others)]
        counts[at] = 1 + len(others)
    return PromptLogprobs(
        ids=np.array(ids, dtype=np.int32),
        values=np.array([cell.logprob for cell in cells], dtype=np.float32),
        ranks=np.array([cell.rank or 0 for cell in cells], dtype=np.int32),
        offsets=np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)]),
    )


def _number(token: str) -> int:
    if not token.isascii() or not token.isdigit():
        raise EngineProtocolError(f"prompt_logprobs names a token {token[:64]!r}, not an id")
    return int(token)
