"""The answer to a request that was aborted before any worker had it: whole by the contract, without a token."""

import numpy as np

from rollplane.admission import wants_mask, wants_routes
from rollplane.protocol.arrays import empty_int32
from rollplane.protocol.artifacts import RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent, Event, ServedBy
from rollplane.protocol.info import EngineInfo
from rollplane.protocol.request import GenerateRequest


def abort_events(request: GenerateRequest, info: EngineInfo, *, version: str | None) -> list[Event]:
    """One terminal event per choice with finish reason `abort` and no tokens, and the end."""
    logprobs = request.sampling.get("logprobs") is not None
    routes, mask = wants_routes(request, info), wants_mask(request, info)
    layers, top_k = (0, 0) if info.moe is None else (info.moe.layers, info.moe.top_k)
    out: list[Event] = [
        ChoiceEvent(
            index=index,
            token_ids=empty_int32(),
            logprobs=TokenLogprobs(values=np.empty(0, dtype=np.float32)) if logprobs else None,
            finish_reason="abort",
            routed_experts=(
                RoutedExperts(
                    array=np.empty((0, layers, top_k), dtype=np.uint8),
                    start=request.sampling.get("routed_experts_prompt_start", 0),
                )
                if routes
                else None
            ),
            sampling_mask=SamplingMask(ids=empty_int32(), offsets=np.zeros(1, dtype=np.int32)) if mask else None,
            policy_versions=[] if version is None else [(version, 0)],
        )
        for index in range(request.sampling.choices)
    ]
    out.append(
        EndEvent(
            served_by=ServedBy(worker="router", attempt=request.attempt, warnings=["aborted before it was placed"])
        )
    )
    return out
