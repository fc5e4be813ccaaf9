"""Rows of serialized `vllm.CandidateTokenInfo` as arrays, without an object per candidate. Pure.

A candidate is `0a LEN 08 ID 15 LOGPROB 18 RANK`, a zero field left out; ID and RANK are varints, LOGPROB four bytes.
Rows of one candidate each, which `logprobs: 1` brings, are cut before LOGPROB: what ends there was read before in nearly
every row, and what follows has one width. Else candidates are found and read for all rows at once: many by arrays, few by
protobuf, as the one message that rows make when they are joined. Rows that look otherwise are read by protobuf one by one.
"""

import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from rollplane.engines.grpc.proto import inference_pb2 as pb
from rollplane.errors import EngineProtocolError
from rollplane.protocol.arrays import INT32_MAX, Float32Array, Int32Array

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_FAST_ROW_BYTES: Final = 64 * 19  # beyond, walking along the rows costs more than reading them one by one
FEW_ROWS: Final = 192
FEW_BYTES: Final = FEW_ROWS * 13
"""Rows of so few bytes in all are read by protobuf: arrays have a price of their own."""
MAX_KNOWN: Final = 32_768
"""Beginnings of rows whose ids are remembered; then all are forgotten."""
_PADDING: Final = bytes(8)  # so that looking at a field never looks past the end
_VARINT_BYTES: Final = 5
_FLOAT_BYTES: Final = np.arange(1, 5)
_TAG_TOKEN, _TAG_ID, _TAG_LOGPROB, _TAG_RANK = 0x0A, 0x08, 0x15, 0x18
_REST: Final = 7
"""Bytes from LOGPROB's tag to the end of a row of one candidate with a rank below 128."""
_CUT_REST: Final = operator.itemgetter(slice(None, -_REST))
_TAKE_REST: Final = operator.itemgetter(slice(-_REST, None))
_LEAST, _MOST = 4 + _REST, 8 + _REST
"""Bytes of such a row with all of its fields."""
_NO_LOGPROB: Final = bytes([_TAG_LOGPROB, 0, 0, 0, 0])


class Candidates(NamedTuple):
    """CSR over rows: `ids` int32 [M], `values` float32 [M], `ranks` int32 [M], `offsets` int32 [rows + 1]."""

    ids: Int32Array
    values: Float32Array
    ranks: Int32Array
    offsets: Int32Array


def read_candidates(rows: Sequence[bytes]) -> Candidates:
    """The candidates of every row, in order.

    Raises:
        EngineProtocolError: a row that is none, or an id that does not fit int32.
    """
    rows = list(rows)  # every walk along protobuf's own list makes all of its bytes again
    if 0 < len(rows) <= FEW_ROWS and len(rows[0]) <= _MOST and (found := _read_ones(rows)) is not None:
        return found
    if len(rows) <= FEW_ROWS and sum(sizes := list(map(len, rows))) <= FEW_BYTES:
        return _read_joined(rows, sizes) or _read_one_by_one(rows)
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    if int(lengths.max()) > MAX_FAST_ROW_BYTES:
        return _read_joined(rows, lengths.tolist()) or _read_one_by_one(rows)
    return _read_at_once(rows, lengths) or _read_one_by_one(rows)


class _Beginnings(dict[bytes, int]):
    """The id in `0a LEN 08 ID`, each read once; LEN speaks of `_REST` bytes more."""

    def __missing__(self, begin: bytes) -> int:
        token_id = _id_of(begin)
        if len(self) >= MAX_KNOWN:
            self.clear()
        self[begin] = token_id
        return token_id


_BEGINNINGS: Final = _Beginnings()


def _id_of(begin: bytes) -> int:
    """The id of a row that begins so.

    Raises:
        ValueError: it is no beginning of one candidate, or the id does not fit int32.
    """
    varint = begin[3:]
    if begin[:3] != bytes([_TAG_TOKEN, len(begin) + _REST - 2 & 0xFF, _TAG_ID]) or not varint or len(begin) > 8:
        raise ValueError("not the beginning of one candidate")
    if varint[-1] >= 0x80 or min(varint[:-1], default=0x80) < 0x80:
        raise ValueError("not one varint")
    value = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(varint))
    if value > INT32_MAX:
        raise ValueError("not an int32")
    return value


def _read_ones(rows: Sequence[bytes]) -> Candidates | None:
    """None where not every row is one candidate with an id, and a rank in one byte."""
    if min(map(len, rows)) < _LEAST:
        rows = [row if len(row) >= _LEAST else _with_logprob(row) for row in rows]
    try:
        ids = list(map(_BEGINNINGS.__getitem__, map(_CUT_REST, rows)))
    except ValueError:
        return None
    count = len(ids)
    rests = b"".join(map(_TAKE_REST, rows))
    ranks = rests[6::_REST]
    if rests[::_REST].strip(b"\x15") or rests[5::_REST].strip(b"\x18") or not ranks.isascii():
        return None
    return Candidates(
        np.array(ids, dtype=np.int32),
        np.ndarray((count,), "<f4", rests, 1, (_REST,)).astype(np.float32),
        np.frombuffer(ranks, dtype=np.uint8).astype(np.int32),
        np.arange(count + 1, dtype=np.int32),
    )


def _with_logprob(row: bytes) -> bytes:
    """A short row with the LOGPROB that it left out; another row as it is."""
    if len(row) < 2 or row[-2] != _TAG_RANK or row[1] != len(row) - 2:
        return row
    return bytes([row[0], row[1] + len(_NO_LOGPROB)]) + row[2:-2] + _NO_LOGPROB + row[-2:]


def _read_joined(rows: Sequence[bytes], sizes: list[int]) -> Candidates | None:
    """None where a row is not laid out as expected: only of rows that end with a candidate the join is their sum."""
    counts: list[int] | None = None
    if min(sizes, default=2) < 2 or [row[1] + 2 if row[0] == _TAG_TOKEN else 0 for row in rows] != sizes:
        counts = [_count(row) for row in rows]
        if -1 in counts:
            return None
    try:
        tokens: list[Any] = list(pb.CandidateTokenInfo.FromString(b"".join(rows)).tokens)
    except DecodeError as error:
        raise EngineProtocolError(f"a row of candidates cannot be read: {error}") from None
    offsets = np.arange(len(rows) + 1, dtype=np.int32)
    if counts is not None:
        np.cumsum(counts, out=offsets[1:])
    return Candidates(
        _int32(np.array([token.id for token in tokens], dtype=np.int64)),
        np.array([token.logprob for token in tokens], dtype=np.float32),
        _int32(np.array([token.rank for token in tokens], dtype=np.int64)),
        offsets,
    )


def _count(row: bytes) -> int:
    """The candidates of a row, -1 where it holds anything else."""
    at = count = 0
    while at + 1 < len(row) and row[at] == _TAG_TOKEN and row[at + 1] < 128:
        at += row[at + 1] + 2
        count += 1
    return count if at == len(row) else -1


def _read_at_once(rows: Sequence[bytes], lengths: Positions) -> Candidates | None:
    """None where a row is not laid out as expected."""
    data = np.frombuffer(b"".join(rows) + _PADDING, dtype=np.uint8)
    ends = np.cumsum(lengths)
    found = _find(data, ends - lengths, ends)
    if found is None:
        return None
    row, at, end = found
    ids, at, fits = _varint(data, at, end, tag=_TAG_ID)
    has = (at < end) & (data[at] == _TAG_LOGPROB)
    values = data[at[:, np.newaxis] + _FLOAT_BYTES].view("<f4")[:, 0].astype(np.float32, copy=False)
    values[~has] = 0.0
    at = np.where(has, at + 5, at)
    ranks, at, fits_too = _varint(data, at, end, tag=_TAG_RANK)
    if not (fits.all() and fits_too.all() and np.array_equal(at, end)):
        return None
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(np.bincount(row, minlength=len(rows)), out=offsets[1:])
    return Candidates(_int32(ids), values, _int32(ranks), offsets)


def _find(data: Bytes, at: Positions, ends: Positions) -> tuple[Positions, Positions, Positions] | None:
    """Row, begin and end of every candidate's fields, in order; one step per candidate of the longest row."""
    row = np.flatnonzero(at < ends)
    at, ends = at[row], ends[row]
    parts: list[tuple[Positions, Positions, Positions]] = []
    while row.size:
        size = data[at + 1].astype(np.int64)
        begin = at + 2
        after = begin + size
        if not ((data[at] == _TAG_TOKEN) & (size < 128) & (after <= ends)).all():
            return None
        parts.append((row, begin, after))
        more = after < ends
        row, at, ends = row[more], after[more], ends[more]
    if not parts:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty
    if len(parts) == 1:
        return parts[0]
    rows, begins, afters = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(rows, kind="stable")
    return rows[order], begins[order], afters[order]


def _varint(data: Bytes, at: Positions, end: Positions, *, tag: int) -> tuple[Positions, Positions, Flags]:
    """The varint field with `tag` at each position (0 where it is not there), the positions after it, and whether it ends."""
    has = (at < end) & (data[at] == tag)
    value = np.zeros(at.size, dtype=np.int64)
    more = has.copy()
    after = at + has
    for i in range(_VARINT_BYTES):
        if not more.any():
            break
        byte = data[np.where(more, after, 0)].astype(np.int64)
        value |= np.where(more, (byte & 0x7F) << (7 * i), 0)
        after = after + more
        more &= byte >= 0x80
    return value, after, ~more


def _read_one_by_one(rows: Sequence[bytes]) -> Candidates:
    try:
        parsed: list[Any] = [pb.CandidateTokenInfo.FromString(row).tokens for row in rows]
    except DecodeError as error:
        raise EngineProtocolError(f"a row of candidates cannot be read: {error}") from None
    flat = [token for tokens in parsed for token in tokens]
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(tokens) for tokens in parsed], out=offsets[1:])
    return Candidates(
        _int32(np.fromiter((token.id for token in flat), dtype=np.int64, count=len(flat))),
        np.fromiter((token.logprob for token in flat), dtype=np.float32, count=len(flat)),
        _int32(np.fromiter((token.rank for token in flat), dtype=np.int64, count=len(flat))),
        offsets,
    )


def _int32(values: Positions) -> Int32Array:
    if values.size and np.maximum.reduce(values) > INT32_MAX:
        raise EngineProtocolError(f"the engine sent {int(values.max())}, which does not fit int32")
    return values.astype(np.int32)
