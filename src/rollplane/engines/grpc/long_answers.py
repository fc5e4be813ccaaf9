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
from rollplane.engines.grpc.packed import as_field
from rollplane.engines.grpc.proto import answers_pb2 as wire

LONG: Final = 4096
"""Answers of fewer bytes cost less when protobuf reads all of them."""
_TAG_ROW, _TAG_TOKEN, _TAG_ID, _TAG_LOGPROB, _TAG_RANK = 0x3A, 0x0A, 0x08, 0x15, 0x18
_MAX_ID_BYTES: Final = 3
"""A longer ID would leave two ways to lay out a row of some length."""
_WORD: Final = 8
_OUTPUTS: Final = wire.GenerateResponse.OUTPUTS_FIELD_NUMBER


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
    behind = raw[rows.end :]
    parts = as_field(raw[: rows.begin], number=_OUTPUTS) + as_field(behind, number=_OUTPUTS)
    try:
        output, _ = wire.GenerateResponse.FromString(parts).outputs  # as deep as they stood: protobuf bounds the depth
    except DecodeError:
        return None  # what looked like a row was none
    output.MergeFromString(behind)  # `MergeFrom` would leave out a last zero
    if output.candidate_tokens:
        return None
    return LongAnswer(answer.prompt_info if answer.HasField("prompt_info") else None, output, rows.candidates)


def _lay_out() -> npt.NDArray[np.uint64]:
    """How a row's field looks, by its length, as little-endian words [length, 3].

    What is given of the word behind the field's tag, and which of its bits are given or those of ID; which of the field's
    last word are given or those of LOGPROB and RANK. Of a length that no field has, no such word is right.
    """
    longest = 4 + 1 + _MAX_ID_BYTES + 7
    layouts = np.zeros((longest + 2, 3), dtype=np.uint64)
    layouts[:, 1] = np.iinfo(np.uint64).max
    for width in range(_MAX_ID_BYTES + 1):
        id_tag = [_TAG_ID] if width else []
        for has_logprob in (False, True):
            size = 4 + len(id_tag) + width + 5 * has_logprob + 2
            layouts[size] = [
                _word(size - 2, _TAG_TOKEN, size - 4, *id_tag, *[0x80] * (width - 1)),
                _word(*[0xFF] * (3 + len(id_tag) + width)),
                _word(0, *[0xFF * has_logprob] * 5, 0xFF, 0xFF),
            ]
    return layouts


def _word(*data: int) -> int:
    return int.from_bytes(bytes(data), "little")


_LAYOUTS: Final = _lay_out()
_TAIL: Final = _word(0, _TAG_LOGPROB, 0, 0, 0, 0, _TAG_RANK, 0)
_HEAD_GIVEN: Final = _word(0xFF, 0xFF, 0xFF, 0xFF, *[0x80] * 4)
_TAIL_GIVEN: Final = _word(0xFF, 0xFF, 0, 0, 0, 0, 0xFF, 0x80)
"""What is not given is a number."""


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
    given, head_mask, tail_mask = _LAYOUTS.take(edges[1:] - begins, axis=0, mode="clip").T
    words = np.ndarray((buffer.size - _WORD + 1,), "<u8", buffer, 0, (1,))
    head, tail = words[begins + 1], words[edges[1:] - _WORD]
    head ^= given
    head &= head_mask
    tail ^= _TAIL
    tail &= tail_mask
    if np.bitwise_or.reduce(head) & _HEAD_GIVEN or np.bitwise_or.reduce(tail) & _TAIL_GIVEN:
        return None
    head >>= 32
    ids = head & 0x7F
    for i in range(1, _MAX_ID_BYTES):
        head >>= 1
        ids |= head & (0x7F << 7 * i)
    candidates = Candidates(
        ids.astype(np.int32),
        np.ndarray((count,), "<f4", tail, 2, (_WORD,)).astype(np.float32),
        tail.view(np.uint8)[7::_WORD].astype(np.int32),
        np.arange(count + 1, dtype=np.int32),
    )
    return _Rows(int(edges[0]), int(edges[-1]), candidates)
