"""Long answers with one candidate per token, which `logprobs: 1` brings: read in place, without an object per row. Pure.

A row of candidates is a field `3a LEN ROW` of the output, and ROW is `0a LEN 08 ID 15 LOGPROB 18 RANK`, a zero field left
out. The rows are found by their look, all at once, and each must reach from its begin to that of the next one, laid out
in the one way that its length allows. What stands before and behind them is read by protobuf, and what protobuf accepts
ends where a field ends. An answer that looks otherwise is read by protobuf as a whole.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from rollplane.engines.grpc.candidates import Candidates
from rollplane.engines.grpc.proto import answers_pb2 as wire

LONG: Final = 4096
"""Answers of fewer bytes cost less when protobuf reads all of them."""
_TAG_ROW, _TAG_TOKEN, _TAG_ID, _TAG_LOGPROB, _TAG_RANK = 0x3A, 0x0A, 0x08, 0x15, 0x18
_MAX_ID_BYTES: Final = 3
"""A longer ID would leave two ways to lay out a row of some length."""
_WORD: Final = 8


class LongAnswer(NamedTuple):
    """One output whose `candidate_tokens` were taken out and read."""

    prompt_info: wire.PromptInfo | None
    output: wire.SequenceOutput
    candidates: Candidates


class _Rows(NamedTuple):
    """`candidates` stand in bytes from `begin` to `end`."""

    begin: int
    end: int
    candidates: Candidates


def parse_answer(data: bytes) -> wire.GenerateResponse | LongAnswer:
    """An answer of its bytes.

    Raises:
        DecodeError: they are no answer.
    """
    long = _parse_long(data) if len(data) >= LONG else None
    return wire.GenerateResponse.FromString(data) if long is None else long


def _parse_long(data: bytes) -> LongAnswer | None:
    """None where the rows of candidates are not of one each, or anything is out of the usual."""
    answer = wire.LongResponse.FromString(data)
    if len(answer.outputs) != 1:
        return None
    (raw,) = answer.outputs
    rows = _find_rows(raw)
    if rows is None:
        return None
    try:
        output = wire.SequenceOutput.FromString(raw[: rows.begin])
        output.MergeFromString(raw[rows.end :])
    except DecodeError:
        return None  # what looked like a row was none
    if output.candidate_tokens:
        return None
    return LongAnswer(answer.prompt_info if answer.HasField("prompt_info") else None, output, rows.candidates)


class _Layout(NamedTuple):
    """How a row's field looks, by its length, as little-endian words: bits that are given, and what they are.

    `head` is what follows the field's tag, `tail` its last bytes.
    """

    head: npt.NDArray[np.uint64]
    head_mask: npt.NDArray[np.uint64]
    tail: npt.NDArray[np.uint64]
    tail_mask: npt.NDArray[np.uint64]
    id_mask: npt.NDArray[np.uint64]
    logprob_mask: npt.NDArray[np.uint64]


def _lay_out() -> npt.NDArray[np.uint64]:
    """The layouts [length, 6]. No field has a length that is not set: all bits are given then, the token's tag too."""
    longest = 4 + 1 + _MAX_ID_BYTES + 7
    layouts = np.zeros((longest + 2, len(_Layout._fields)), dtype=np.uint64)
    layouts[:, 1] = np.iinfo(np.uint64).max
    for width in range(_MAX_ID_BYTES + 1):
        id_tag, id_end = ([_TAG_ID], [0x80]) if width else ([], [])
        more = [0x80] * (width - 1)
        for has_logprob in (0, 1):
            size = 4 + len(id_tag) + width + 5 * has_logprob + 2
            layouts[size] = [
                _word(size - 2, _TAG_TOKEN, size - 4, *id_tag, *more),
                _word(0xFF, 0xFF, 0xFF, *[0xFF for _ in id_tag], *more, *id_end),
                _word(0, _TAG_LOGPROB * has_logprob, 0, 0, 0, 0, _TAG_RANK, 0),
                _word(0, 0xFF * has_logprob, 0, 0, 0, 0, 0xFF, 0x80),
                _word(0, 0, 0, 0, *[0x7F] * width),
                _word(0, 0, *[0xFF * has_logprob] * 4, 0, 0),
            ]
    return layouts


def _word(*data: int) -> int:
    return int.from_bytes(bytes(data), "little")


_LAYOUTS: Final = _lay_out()


def _find_rows(data: bytes) -> _Rows | None:
    """None where there are none, or they are not one after the other."""
    buffer = np.frombuffer(data + bytes(_WORD), dtype=np.uint8)  # so that a word never ends past the end
    looks = buffer[:-3] == _TAG_ROW
    looks &= buffer[2:-1] == _TAG_TOKEN
    looks &= buffer[1:-2] - buffer[3:] == 2  # all of the row is one candidate
    (begins,) = looks.nonzero()
    count = begins.size
    if not count or begins[0] < _WORD:  # so that no word begins before the begin
        return None
    edges = np.empty(count + 1, dtype=np.intp)
    edges[:-1] = begins
    edges[-1] = begins[-1] + 2 + buffer[begins[-1] + 1]
    if edges[-1] > len(data):
        return None
    layout = _Layout(*_LAYOUTS.take(edges[1:] - begins, axis=0, mode="clip").T)
    words = np.ndarray((buffer.size - _WORD + 1,), "<u8", buffer, 0, (1,))
    head, tail = words[begins + 1], words[edges[1:] - _WORD]
    if np.bitwise_or.reduce((head ^ layout.head) & layout.head_mask | (tail ^ layout.tail) & layout.tail_mask):
        return None
    head &= layout.id_mask
    head >>= 32
    ids = head & 0x7F
    for i in range(1, _MAX_ID_BYTES):
        head >>= 1
        ids |= head & (0x7F << 7 * i)
    ranks = tail >> 56
    tail &= layout.logprob_mask
    candidates = Candidates(
        ids.astype(np.int32),
        np.ndarray((count,), "<f4", tail, 2, (_WORD,)).astype(np.float32),
        ranks.astype(np.int32),
        np.arange(count + 1, dtype=np.int32),
    )
    return _Rows(int(edges[0]), int(edges[-1]), candidates)
