"""Small makers of requests, and the way from a request to its folded answer."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rollplane import fold
from rollplane.admission import wants_mask, wants_routes
from rollplane.engines.base import Engine
from rollplane.fold import FoldPlan
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.request import GenerateRequest, RequestOptions
from rollplane.protocol.response import GenerateResponse
from rollplane.protocol.sampling import parse_sampling

_ids = itertools.count()


def make_request(
    token_ids: Sequence[int] = (5, 6, 7),
    *,
    options: dict[str, Any] | None = None,
    request_id: str | None = None,
    stream: bool = False,
    fields: dict[str, Any] | None = None,
    **sampling: Any,
) -> GenerateRequest:
    """A checked request, as the server would make it of a body.

    Args:
        token_ids: the prompt.
        options: the `rollplane` object.
        request_id: made up when None; unique in this process.
        stream: deltas wanted.
        fields: any other field of `GenerateRequest`, by name.
        sampling: `sampling_params`.
    """
    return GenerateRequest(
        request_id=request_id or f"test-{next(_ids)}",
        token_ids=np.array(token_ids, dtype=np.int32),
        sampling=parse_sampling(sampling),
        stream=stream,
        options=msgspec.convert(options or {}, RequestOptions),
        **(fields or {}),
    )


def plan_of(request: GenerateRequest, info: EngineInfo) -> FoldPlan:
    """What the answer of this engine to this request has to look like."""
    return FoldPlan(
        request_id=request.request_id,
        model=request.model or info.model,
        choices=request.sampling.choices,
        prompt_tokens=None if request.content_parts else request.prompt_tokens,
        logprobs=request.sampling.get("logprobs") is not None,
        routes=wants_routes(request, info),
        mask=wants_mask(request, info),
        prompt_logprobs=request.sampling.get("prompt_logprobs") is not None,
        routes_start=request.sampling.get("routed_experts_prompt_start"),
    )


async def collect(engine: Engine, request: GenerateRequest) -> list[Event]:
    """Every event of a request."""
    return [event async for event in engine.generate(request)]


def folded(events: list[Event], plan: FoldPlan) -> GenerateResponse:
    """The validated answer in a list of events.

    Raises:
        EngineProtocolError: they break the contract.
    """
    return fold.folded(events, plan, created=0)


async def answer(engine: Engine, request: GenerateRequest) -> GenerateResponse:
    """The validated answer of an engine to a request."""
    return folded(await collect(engine, request), plan_of(request, engine.info))
