"""vLLM's own output records, made as its engine makes them where a CPU cannot: routes and masks become ours."""

from typing import Any

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask

from rollplane.engines.vllm import convert
from rollplane.engines.vllm.convert import ChoicePlan
from rollplane.errors import EngineProtocolError
from rollplane.protocol.info import MoeShape
from rollplane.protocol.invariants import check_routes

PROMPT, LAYERS, TOP_K = 5, 3, 2
TOKENS = [7, 8, 9]


def plan(experts: int, **changes: Any) -> ChoicePlan:
    given: dict[str, Any] = {
        "prompt_tokens": PROMPT,
        "logprobs": True,
        "alternatives": 0,
        "fixed_ids": False,
        "routes": True,
        "routes_start": 0,
        "mask": True,
        "moe": MoeShape(layers=LAYERS, top_k=TOP_K, num_experts=experts),
    }
    return ChoicePlan(**{**given, **changes})


def made(routes: np.ndarray | None, *, mask: list[list[int]] | None = None) -> RequestOutput:
    """What vLLM returns for a finished request."""
    logprobs = FlatLogprobs()
    for token in TOKENS:
        logprobs.append({token: Logprob(logprob=-0.5, rank=1)})
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=TOKENS,
        cumulative_logprob=-1.5,
        logprobs=logprobs,
        routed_experts=routes,
        sampling_mask=SamplingMask(mask or [[7, 1], [2, 8], [9]]),
        finish_reason="length",
    )
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=list(range(PROMPT)),
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
    )


def routes(highest: int, dtype: Any, rows: int = PROMPT + len(TOKENS) - 1) -> np.ndarray:
    """[rows, layers, top_k]; the ids of a row differ."""
    found = np.zeros((rows, LAYERS, TOP_K), dtype=dtype)
    found[..., 0], found[..., 1] = highest, np.arange(rows)[:, None] % highest
    return found


def read(output: RequestOutput, experts: int) -> Any:
    event, _ = convert.read_ending(output.outputs[0], plan(experts), index=0, sent=0, spans=[("v", 0)])
    return event


@pytest.mark.parametrize(
    ("highest", "given", "narrow"),
    [(7, np.uint8, np.uint8), (255, np.int32, np.uint8), (256, np.int32, np.uint16), (511, np.uint16, np.uint16)],
)
def test_routes_keep_their_ids_in_the_narrowest_type(highest: int, given: Any, narrow: Any) -> None:
    event = read(made(routes(highest, given)), 512)

    assert event.routed_experts.array.dtype == narrow
    assert event.routed_experts.array.tolist() == routes(highest, given).tolist()
    assert event.routed_experts.start == 0


def test_masks_and_logprobs_are_vllms() -> None:
    event = read(made(routes(7, np.uint8)), 8)

    assert event.sampling_mask.ids.tolist() == [7, 1, 2, 8, 9]
    assert event.sampling_mask.offsets.tolist() == [0, 2, 4, 5]
    assert event.logprobs.values.tolist() == [-0.5] * 3


def test_an_expert_that_the_model_has_not_is_an_error() -> None:
    with pytest.raises(EngineProtocolError, match="expert 9 of a model of 8"):
        read(made(routes(9, np.uint8)), 8)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (np.zeros((PROMPT + 2, LAYERS, TOP_K), dtype=np.uint8), "the capture did not run"),
        (routes(7, np.uint8, rows=PROMPT + 1), "routed rows"),
    ],
)
def test_routes_that_cannot_be_true_fail_the_answer(given: np.ndarray, word: str) -> None:
    event = read(made(given), 8)
    with pytest.raises(EngineProtocolError, match=word):
        check_routes(event.routed_experts, prompt_tokens=PROMPT, tokens=len(TOKENS))


def test_an_abort_before_the_first_token_has_typed_empty_arrays() -> None:
    output = made(None)
    done = output.outputs[0]
    done.token_ids, done.finish_reason = [], "abort"
    done.logprobs, done.sampling_mask = FlatLogprobs(), SamplingMask([])

    event = read(output, 8)

    assert event.finish_reason == "abort"
    assert event.routed_experts.array.shape == (0, LAYERS, TOP_K)
    assert event.sampling_mask.offsets.tolist() == [0]
    assert event.logprobs.values.size == 0
