"""What is kept of a request that nobody reads before it ends: token ids in vLLM's own list, log-probabilities as sent.

vLLM spreads every token's log-probabilities over Python lists. Here the bytes in which the engine core sends them are kept
and read some positions at a time, in a few calls for all of them.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

JOINED_ROWS: Final = 64
"""Messages kept before their rows are joined: each row holds its whole message in memory, other requests' part too."""

_Array = tuple[str, tuple[int, ...], msgspec.msgpack.Ext]
_ROWS: Final = msgspec.msgpack.Decoder(list[tuple[_Array, _Array, _Array, Any]])
"""vLLM's `LogprobsLists` as they travel: ids and values [positions, width], ranks [positions]; each dtype, shape, bytes."""

Part = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


class FoldedRequest:
    """Stands for vLLM's `LogprobsProcessor` in one request that makes no text and does not score its prompt.

    Args:
        alternatives: how many tokens per position follow the sampled one, rows being wider where another request of the
            same step asked for more; None: no log-probabilities at all.
        take_ids: appends to the request's token ids.
    """

    tokenizer: Any = None
    prompt_logprobs: Any = None
    prompt_token_id_logprobs: Any = None
    cumulative_logprob: float | None = None

    def __init__(self, alternatives: int | None, *, take_ids: Callable[[list[int]], None]) -> None:
        self.take_ids = take_ids
        self._width = None if alternatives is None else 1 + alternatives
        self._kept: list[msgspec.Raw] = []
        self._parts: list[Part] = []

    def __repr__(self) -> str:
        return f"<FoldedRequest, {len(self._parts)} parts, {len(self._kept)} messages>"

    def take_row(self, row: msgspec.Raw) -> None:
        """Take the log-probabilities of one message as they came, without buffers of their own beside it."""
        kept = self._kept
        kept.append(row)
        if len(kept) == JOINED_ROWS:
            self._join()

    def update_from_output(self, output: Any) -> None:
        """Take one output of the engine core that vLLM has decoded."""
        new = output.new_logprobs
        if new is not None:
            self._join()
            self._parts.append((np.asarray(new[0]), np.asarray(new[1]), np.asarray(new[2])))

    @property
    def logprobs(self) -> "FlatRows | None":
        """All positions so far, as vLLM's `FlatLogprobs` says them."""
        width = self._width
        if width is None:
            return None
        self._join()
        ids = np.concatenate([np.empty((0, width), dtype=np.int32), *(p[0][:, :width] for p in self._parts)])
        values = np.concatenate([np.empty((0, width), dtype=np.float32), *(p[1][:, :width] for p in self._parts)])
        ranks = np.concatenate([np.empty(0, dtype=np.int32), *(p[2] for p in self._parts)])
        all_ranks = np.tile(np.arange(width, dtype=np.int32), (ranks.size, 1))
        all_ranks[:, 0] = ranks
        starts = np.arange(ranks.size, dtype=np.int64) * width
        return FlatRows(
            start_indices=starts,
            end_indices=starts + width,
            token_ids=ids.reshape(-1).astype(np.int32, copy=False),
            logprobs=values.reshape(-1).astype(np.float32, copy=False),
            ranks=all_ranks.reshape(-1),
        )

    def _join(self) -> None:
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        rows = _ROWS.decode(b"\xdd" + len(kept).to_bytes(4, "big") + b"".join(kept))  # a msgpack array of them all
        if self._width is None:
            return
        first = rows[0]
        alike = (first[0][:2], first[1][:2], first[2][:2])
        if all((row[0][:2], row[1][:2], row[2][:2]) == alike for row in rows):
            self._parts.append(_read_alike(rows))
        else:
            self._parts += [_read_alike([row]) for row in rows]


class FlatRows(msgspec.Struct, kw_only=True):
    """The fields of vLLM's `FlatLogprobs` that are read here, as arrays: rows [positions] and entries [positions x width]."""

    start_indices: np.ndarray[Any, Any]
    end_indices: np.ndarray[Any, Any]
    token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    ranks: np.ndarray[Any, Any]


def _read_alike(rows: list[Any]) -> Part:
    """The arrays of rows that have one dtype and one shape per array, one after the other."""
    ids, values, ranks = (
        np.frombuffer(b"".join([row[i][2].data for row in rows]), dtype=rows[0][i][0]).reshape(-1, *rows[0][i][1][1:])
        for i in range(3)
    )
    return ids, values, ranks


def fold(state: Any, params: Any) -> None:
    """Have one registered request of vLLM keep what it makes for its end, where nothing needs it before.

    Args:
        state: its `RequestState`; params: its `SamplingParams`.
    """
    apart = (
        (params.logprobs is not None and params.logprobs < 0)
        or params.logprob_token_ids
        or params.prompt_logprobs is not None
        or getattr(params, "prompt_logprob_token_ids", None)
        or params.detokenize
        or params.output_kind.name != "FINAL_ONLY"
        or state.detokenizer.num_output_tokens()  # it has begun
    )
    if not apart:
        state.logprobs_processor = FoldedRequest(params.logprobs, take_ids=state.detokenizer.output_token_ids.extend)
