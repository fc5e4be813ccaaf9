"""What vLLM's API side does for every token, for less where nobody reads it before the request ends.

Log-probabilities of a unary request stay the arrays in which the engine core sends them, joined some positions at a time;
vLLM spreads them over Python lists. Messages' arrays are made in one call each, and of a token between the first and the
last one only its time is kept.
"""

from typing import Any, Final

import msgspec
import numpy as np

JOINED_ROWS: Final = 64
"""Arrays kept before they are joined: each holds the whole message of its step in memory, other requests' part too."""


class CollectedLogprobs:
    """Stands for vLLM's `LogprobsProcessor` in one request that makes no text and does not score its prompt.

    Args:
        alternatives: how many tokens per position follow the sampled one; rows are wider where another request of the
            same step asked for more.
    """

    tokenizer: Any = None
    prompt_logprobs: Any = None
    prompt_token_id_logprobs: Any = None
    cumulative_logprob: float | None = None

    def __init__(self, alternatives: int) -> None:
        self._width = 1 + alternatives
        self._kept: list[Any] = []
        self._ids: list[np.ndarray[Any, Any]] = []
        self._values: list[np.ndarray[Any, Any]] = []
        self._ranks: list[np.ndarray[Any, Any]] = []

    def __repr__(self) -> str:
        return f"<CollectedLogprobs {len(self._ids)} parts, {len(self._kept)} rows apart>"

    def update_from_output(self, output: Any) -> None:
        """Take one output of the engine core."""
        new = output.new_logprobs
        if new is None:
            return
        self._kept.append(new)
        if len(self._kept) == JOINED_ROWS:
            self._join()

    @property
    def logprobs(self) -> "FlatRows":
        """All positions so far, as vLLM's `FlatLogprobs` says them."""
        self._join()
        ids, values, ranks = (
            np.concatenate([start, *parts])
            for start, parts in (
                (np.empty((0, self._width), dtype=np.int32), self._ids),
                (np.empty((0, self._width), dtype=np.float32), self._values),
                (np.empty(0, dtype=np.int32), self._ranks),
            )
        )
        all_ranks = np.tile(np.arange(self._width, dtype=np.int32), (ranks.size, 1))
        all_ranks[:, 0] = ranks
        starts = np.arange(ranks.size, dtype=np.int64) * self._width
        return FlatRows(
            start_indices=starts,
            end_indices=starts + self._width,
            token_ids=ids.reshape(-1),
            logprobs=values.reshape(-1),
            ranks=all_ranks.reshape(-1),
        )

    def _join(self) -> None:
        if self._kept:
            width = self._width
            self._ids.append(np.concatenate([part[0][:, :width] for part in self._kept], dtype=np.int32))
            self._values.append(np.concatenate([part[1][:, :width] for part in self._kept], dtype=np.float32))
            self._ranks.append(np.concatenate([part[2] for part in self._kept], dtype=np.int32))
            self._kept = []


class FlatRows(msgspec.Struct, kw_only=True):
    """The fields of vLLM's `FlatLogprobs` that are read here, as arrays: rows [positions] and entries [positions x width]."""

    start_indices: np.ndarray[Any, Any]
    end_indices: np.ndarray[Any, Any]
    token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    ranks: np.ndarray[Any, Any]


def collect_logprobs(state: Any, params: Any) -> None:
    """Have one registered request of vLLM keep its log-probabilities as arrays, where nothing needs them before its end.

    Args:
        state: its `RequestState`; params: its `SamplingParams`.
    """
    present = state.logprobs_processor
    apart = (
        params.logprobs is None
        or params.logprobs < 0
        or params.logprob_token_ids
        or params.prompt_logprobs is not None
        or getattr(params, "prompt_logprob_token_ids", None)
        or params.detokenize
        or params.output_kind.name != "FINAL_ONLY"
        or len(present.logprobs)  # it has begun
    )
    if not apart:
        state.logprobs_processor = CollectedLogprobs(params.logprobs)


def read_arrays_plainly(decoder: Any) -> None:
    """Have vLLM's decoder of messages make arrays in one call each instead of five; the rest is left to its own hook."""
    if not decoder.share_mem:
        return
    array, others = np.ndarray, decoder.dec_hook

    def make(kind: type, value: Any) -> Any:
        if kind is not array:
            return others(kind, value)
        dtype, shape, data = value
        return array(shape, dtype, decoder.aux_buffers[data] if isinstance(data, int) else data)

    plain = decoder.decoder
    decoder.decoder = msgspec.msgpack.Decoder(plain.type, ext_hook=plain.ext_hook, dec_hook=make)


def time_tokens_plainly(processor: Any) -> None:
    """Have vLLM's output processor keep only the time of a token between the first and the last one of its request.

    The rest of its statistics feeds loggers of vLLM's own, which are off. First and last tokens, and those that come with
    an event (queued, scheduled, preempted), are counted as ever, so a request's times and preemptions stay true.
    """
    whole = processor._update_stats_from_output

    def update(state: Any, output: Any, timestamp: float | None, iteration: Any) -> None:
        if state.is_prefilling or output.finish_reason is not None or output.events is not None or iteration is None:
            whole(state, output, timestamp, iteration)
        else:
            state.stats.last_token_ts = timestamp

    processor._update_stats_from_output = update
