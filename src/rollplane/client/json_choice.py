"""A choice of a JSON answer read back into arrays; of streams, and of whole answers through another server."""

from typing import Any, Final

import msgspec
import numpy as np

from rollplane.errors import EngineProtocolError
from rollplane.protocol.arrays import Int32Array
from rollplane.protocol.artifacts import (
    Alternatives,
    RoutedExperts,
    SamplingMask,
    TokenLogprobs,
    decode_routes_npy,
    decode_routes_structured,
)
from rollplane.protocol.events import FinishReason
from rollplane.protocol.versions import PolicySpan

TOKEN_PREFIX: Final = "token_id:"


class JsonTop(msgspec.Struct):
    """An alternative; `token` is `token_id:<id>`."""

    token: str
    logprob: float


class JsonPosition(msgspec.Struct):
    """The log-probability of one token, with alternatives in order of rank."""

    logprob: float
    token: str = ""
    top_logprobs: list[JsonTop] = msgspec.field(default_factory=list)


class JsonLogprobs(msgspec.Struct):
    """One position per token."""

    content: list[JsonPosition]


class JsonChoice(msgspec.Struct):
    """A choice, or a delta of one; absent members were not sent."""

    index: int
    token_ids: Int32Array
    logprobs: JsonLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    routed_experts: dict[str, Any] | str | None = None
    sampling_mask: list[list[int]] | None = None
    policy_versions: list[PolicySpan] | None = None


def routes_of(choice: JsonChoice, *, start: int) -> RoutedExperts | None:
    """The routes of a choice; `start` is what the `npy` encoding cannot state.

    Raises:
        EngineProtocolError: they cannot be read.
    """
    routes = choice.routed_experts
    try:
        if isinstance(routes, dict):
            return decode_routes_structured(routes)
        return None if routes is None else decode_routes_npy(routes, start=start)
    except ValueError as error:
        raise EngineProtocolError(f"choice {choice.index}: {error}") from None


def token_logprobs(content: list[JsonPosition]) -> TokenLogprobs:
    """The arrays of a choice's positions.

    Raises:
        EngineProtocolError: an alternative names no token id.
    """
    values = np.array([position.logprob for position in content], dtype=np.float32)
    tops = [top for position in content for top in position.top_logprobs]
    if not tops:
        return TokenLogprobs(values=values)
    counts = np.array([len(position.top_logprobs) for position in content], dtype=np.int32)
    offsets = np.concatenate([np.zeros(1, dtype=np.int32), counts.cumsum(dtype=np.int32)])
    # JSON carries alternatives in order of rank and not the rank itself.
    ranks = np.arange(1, len(tops) + 1, dtype=np.int32) - np.repeat(offsets[:-1], counts)
    return TokenLogprobs(
        values=values,
        alternatives=Alternatives(
            ids=np.array([token_id_of(top.token) for top in tops], dtype=np.int32),
            values=np.array([top.logprob for top in tops], dtype=np.float32),
            ranks=ranks.astype(np.int32),
            offsets=offsets,
        ),
    )


def token_id_of(text: str) -> int:
    """The id in `token_id:<id>`.

    Raises:
        EngineProtocolError: it is something else.
    """
    digits = text.removeprefix(TOKEN_PREFIX)
    if digits == text or not digits.isascii() or not digits.isdigit():
        raise EngineProtocolError(f"a log-probability names its token {text[:64]!r}, not {TOKEN_PREFIX}<id>")
    return int(digits)


def mask_of(rows: list[list[int]]) -> SamplingMask:
    """The arrays of a mask: one row of ids per token."""
    counts = np.array([len(row) for row in rows], dtype=np.int32)
    offsets = np.concatenate([np.zeros(1, dtype=np.int32), counts.cumsum(dtype=np.int32)])
    return SamplingMask(ids=np.array([i for row in rows for i in row], dtype=np.int32), offsets=offsets)
