"""What is kept per token for less is what vLLM would have kept."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rollplane.engines.vllm.per_token import (
    JOINED_ROWS,
    CollectedLogprobs,
    collect_logprobs,
    read_arrays_plainly,
    time_tokens_plainly,
)


def step(number: int, width: int) -> Any:
    """One output of the engine core: a position whose batch has `width` entries per row."""
    ids = np.arange(width, dtype=np.int32)[None] + 100 * number
    return SimpleNamespace(new_logprobs=(ids, -ids.astype(np.float32), np.array([number + 7], dtype=np.int32), None))


def test_rows_keep_their_order_and_ranks_over_many_joins() -> None:
    kept = CollectedLogprobs(alternatives=1)
    for i in range(2 * JOINED_ROWS + 5):
        kept.update_from_output(step(i, width=2 + i % 3))  # others in the batch ask for more

    flat = kept.logprobs

    assert flat.start_indices.size == 2 * JOINED_ROWS + 5
    assert flat.token_ids[:4].tolist() == [0, 1, 100, 101]
    assert flat.logprobs[-2:].tolist() == [-13200.0, -13201.0]
    assert flat.ranks[:4].tolist() == [7, 1, 8, 1]
    assert (flat.end_indices - flat.start_indices == 2).all()


def test_no_position_is_no_row() -> None:
    kept = CollectedLogprobs(alternatives=0)
    kept.update_from_output(SimpleNamespace(new_logprobs=None))

    assert kept.logprobs.start_indices.size == kept.logprobs.token_ids.size == 0


def params(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "logprobs": 1,
        "logprob_token_ids": None,
        "prompt_logprobs": None,
        "detokenize": False,
        "output_kind": SimpleNamespace(name="FINAL_ONLY"),
    }
    return SimpleNamespace(**{**given, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": None},
        {"logprobs": -1},
        {"logprob_token_ids": [5]},
        {"prompt_logprobs": 0},
        {"prompt_logprob_token_ids": [5]},
        {"detokenize": True},
        {"output_kind": SimpleNamespace(name="CUMULATIVE")},
    ],
)
def test_whoever_needs_more_keeps_vllms_own(changes: dict[str, Any]) -> None:
    state = SimpleNamespace(logprobs_processor=SimpleNamespace(logprobs=[]))
    collect_logprobs(state, params(**changes))
    assert not isinstance(state.logprobs_processor, CollectedLogprobs)


def test_a_request_that_has_begun_keeps_what_it_has() -> None:
    own = SimpleNamespace(logprobs=["a row"])
    state = SimpleNamespace(logprobs_processor=own)
    collect_logprobs(state, params())
    assert state.logprobs_processor is own

    own.logprobs.clear()
    collect_logprobs(state, params())
    assert isinstance(state.logprobs_processor, CollectedLogprobs)


class Message(msgspec.Struct):
    near: np.ndarray
    far: np.ndarray
    piece: slice


class Decoder:
    """As much of vLLM's as is read."""

    def __init__(self, *, share_mem: bool = True) -> None:
        self.share_mem = share_mem
        self.aux_buffers: list[bytes] = [b"", np.arange(4, dtype=np.int32).tobytes()]
        self.asked: list[type] = []
        self.decoder = msgspec.msgpack.Decoder(Message, ext_hook=lambda _, data: data, dec_hook=self.dec_hook)

    def dec_hook(self, kind: type, value: Any) -> Any:
        self.asked.append(kind)
        return slice(*value) if kind is slice else np.zeros(1)


def message() -> bytes:
    near = ["<f4", [1, 2], msgspec.msgpack.Ext(3, np.array([1.5, 2.5], dtype=np.float32).tobytes())]
    return msgspec.msgpack.encode({"near": near, "far": ["<i4", [2, 2], 1], "piece": [0, 3]})


def test_arrays_come_from_the_message_or_beside_it() -> None:
    decoder = Decoder()
    read_arrays_plainly(decoder)

    found = decoder.decoder.decode(message())

    assert found.near.tolist() == [[1.5, 2.5]]
    assert found.far.tolist() == [[0, 1], [2, 3]]
    assert found.piece == slice(0, 3)
    assert decoder.asked == [slice]


def test_a_decoder_that_copies_is_left_alone() -> None:
    decoder = Decoder(share_mem=False)
    before = decoder.decoder
    read_arrays_plainly(decoder)
    assert decoder.decoder is before


class Processor:
    """As much of vLLM's as is changed."""

    def __init__(self) -> None:
        self.whole: list[float | None] = []

    def _update_stats_from_output(self, state: Any, output: Any, timestamp: float | None, iteration: Any) -> None:
        self.whole.append(timestamp)


def test_first_and_last_tokens_and_events_are_counted_whole_and_the_others_timed() -> None:
    processor = Processor()
    time_tokens_plainly(processor)
    state = SimpleNamespace(is_prefilling=True, stats=SimpleNamespace(last_token_ts=0.0))
    plain = SimpleNamespace(finish_reason=None, events=None)

    processor._update_stats_from_output(state, plain, 1.0, object())
    state.is_prefilling = False
    processor._update_stats_from_output(state, plain, 2.0, object())
    assert state.stats.last_token_ts == 2.0
    processor._update_stats_from_output(state, SimpleNamespace(finish_reason=None, events=["preempted"]), 3.0, object())
    processor._update_stats_from_output(state, plain, 4.0, object())
    processor._update_stats_from_output(state, SimpleNamespace(finish_reason="stop", events=None), 5.0, object())

    assert processor.whole == [1.0, 3.0, 5.0]
    assert state.stats.last_token_ts == 4.0
