"""What is kept of a folded request is what vLLM would have kept."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.engines.vllm.folded import JOINED_ROWS, FoldedRequest, fold

RAW_VIEW = 3
"""vLLM's msgpack extension of array bytes."""


def arrays(number: int, width: int, positions: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of one message about a request whose batch has `width` entries per position."""
    ids = np.arange(width, dtype=np.int32)[None] + 100 * (number + np.arange(positions, dtype=np.int32)[:, None])
    return ids, -ids.astype(np.float32), np.arange(positions, dtype=np.int64) + number + 7


def row(number: int, width: int, positions: int = 1) -> msgspec.Raw:
    """The same as it travels."""
    wire: list[Any] = [
        [array.dtype.str, list(array.shape), msgspec.msgpack.Ext(RAW_VIEW, array.tobytes())]
        for array in arrays(number, width, positions)
    ]
    return msgspec.Raw(msgspec.msgpack.encode([*wire, None]))


def folded(alternatives: int | None = 1) -> FoldedRequest:
    return FoldedRequest(alternatives, take_ids=[].extend)


def test_rows_keep_their_order_and_ranks_over_many_joins() -> None:
    kept = folded()
    for i in range(2 * JOINED_ROWS + 5):
        kept.take_row(row(i, width=2 + i % 3))  # others in the batch ask for more

    flat = kept.logprobs

    assert flat is not None
    assert flat.start_indices.size == 2 * JOINED_ROWS + 5
    assert flat.token_ids[:4].tolist() == [0, 1, 100, 101]
    assert flat.logprobs[-2:].tolist() == [-13200.0, -13201.0]
    assert flat.ranks[:4].tolist() == [7, 1, 8, 1]
    assert (flat.end_indices - flat.start_indices == 2).all()
    assert (flat.token_ids.dtype, flat.logprobs.dtype, flat.ranks.dtype) == (np.int32, np.float32, np.int32)


def test_what_vllm_decoded_takes_its_place_among_the_rows() -> None:
    kept = folded()
    kept.update_from_output(SimpleNamespace(new_logprobs=(*arrays(0, 2), None)))
    kept.take_row(row(1, 2))
    kept.take_row(row(2, 2, positions=2))  # two tokens in one step
    kept.update_from_output(SimpleNamespace(new_logprobs=None))
    kept.update_from_output(SimpleNamespace(new_logprobs=(*arrays(4, 2), None)))

    flat = kept.logprobs

    assert flat is not None
    assert flat.token_ids[::2].tolist() == [0, 100, 200, 300, 400]
    assert flat.ranks[::2].tolist() == [7, 8, 9, 10, 11]


def test_no_position_is_no_row_and_no_question_no_answer() -> None:
    flat = folded(0).logprobs
    assert flat is not None
    assert flat.start_indices.size == flat.token_ids.size == 0
    assert folded(None).logprobs is None


def params(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "logprobs": 1,
        "logprob_token_ids": None,
        "prompt_logprobs": None,
        "detokenize": False,
        "output_kind": SimpleNamespace(name="FINAL_ONLY"),
    }
    return SimpleNamespace(**{**given, **changes})


def state(tokens: list[int]) -> Any:
    detokenizer = SimpleNamespace(output_token_ids=tokens, num_output_tokens=lambda: len(tokens))
    return SimpleNamespace(logprobs_processor="vLLM's", detokenizer=detokenizer)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": -1},
        {"logprob_token_ids": [5]},
        {"prompt_logprobs": 0},
        {"prompt_logprob_token_ids": [5]},
        {"detokenize": True},
        {"output_kind": SimpleNamespace(name="CUMULATIVE")},
    ],
)
def test_whoever_needs_more_keeps_vllms_own(changes: dict[str, Any]) -> None:
    found = state([])
    fold(found, params(**changes))
    assert found.logprobs_processor == "vLLM's"


def test_a_request_that_has_begun_keeps_what_it_has() -> None:
    found = state([7])
    fold(found, params())
    assert found.logprobs_processor == "vLLM's"


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_ids_go_into_vllms_own_list(logprobs: int | None) -> None:
    found = state([])
    fold(found, params(logprobs=logprobs))
    found.logprobs_processor.take_ids([5, 6])
    assert found.detokenizer.output_token_ids == [5, 6]
