import random

import numpy as np
import pytest

from rollplane.engines.grpc import candidates
from rollplane.engines.grpc.candidates import MAX_FAST_ROW_BYTES, read_candidates
from rollplane.engines.grpc.proto import inference_pb2 as pb
from rollplane.errors import EngineProtocolError


def rows_of(tokens: list[list[tuple[int, float, int]]]) -> list[bytes]:
    return [
        pb.CandidateTokenInfo(tokens=[pb.TokenInfo(id=i, logprob=v, rank=r) for i, v, r in row]).SerializeToString()
        for row in tokens
    ]


def assert_read(tokens: list[list[tuple[int, float, int]]]) -> None:
    found = read_candidates(rows_of(tokens))
    flat = [token for row in tokens for token in row]

    assert [array.dtype.name for array in found] == ["int32", "float32", "int32", "int32"]
    assert found.ids.tolist() == [i for i, _, _ in flat]
    np.testing.assert_array_equal(found.values, np.array([v for _, v, _ in flat], dtype=np.float32))
    assert found.ranks.tolist() == [r for _, _, r in flat]
    assert np.diff(found.offsets).tolist() == [len(row) for row in tokens]


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [[]],
        [[], []],
        [[(1, -0.5, 1)]],
        [[(0, 0.0, 0)]],
        [[(0, -1.5, 1), (128, 0.0, 2)], [], [(2**31 - 1, float("-inf"), 2**31 - 1)]],
        [[(16_383, -1, 127), (16_384, -2, 128), (2_097_152, -3, 300)]],
        [[(5, float("nan"), 1)]],
    ],
)
def test_rows_are_read_as_they_were_written(tokens: list[list[tuple[int, float, int]]]) -> None:
    assert_read(tokens)


def test_any_rows_are_read_alike_at_once_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    sizes = (0, 1, 127, 128, 16_384, 2**21, 2**28, 2**31 - 1)
    tokens = [
        [(draw.choice(sizes), draw.choice((0.0, -0.25, -99.5)), draw.choice(sizes)) for _ in range(draw.randrange(21))]
        for _ in range(300)
    ]
    one_by_one = candidates._read_one_by_one(rows_of(tokens))

    def unused(rows: object) -> None:
        raise AssertionError("rows of the usual layout are read at once")

    monkeypatch.setattr(candidates, "_read_one_by_one", unused)
    at_once = read_candidates(rows_of(tokens))

    for first, second in zip(at_once, one_by_one, strict=True):
        np.testing.assert_array_equal(first, second)


def test_rows_of_one_candidate_are_read_as_protobuf_reads_them_whatever_their_bytes() -> None:
    draw = random.Random(11)
    ids, ranks = (0, 1, 127, 128, 16_384, 2**21, 2**28, 2**31 - 1), (0, 1, 5, 127, 128)
    accepted = 0
    for _ in range(4000):
        tokens = [
            [(draw.choice(ids), draw.choice((0.0, -0.25)), draw.choice(ranks))] for _ in range(draw.randrange(1, 4))
        ]
        rows = [bytearray(row) for row in rows_of(tokens)]
        for _ in range(draw.randrange(3)):
            row = draw.choice(rows)
            change = draw.randrange(3)
            at = draw.randrange(len(row) or 1)
            if change == 0 and row:
                row[at] = draw.choice((0x00, 0x08, 0x0A, 0x0C, 0x15, 0x18, 0x7F, 0x80, 0xFF))
            elif change == 1 and row:
                del row[at]
            else:
                row.insert(at, draw.choice((0x00, 0x08, 0x15, 0x18, 0x80)))
        ones = candidates._read_ones([bytes(row) for row in rows])
        if ones is None:
            continue
        accepted += 1
        for first, second in zip(ones, candidates._read_one_by_one([bytes(row) for row in rows]), strict=True):
            assert first.dtype == second.dtype
            np.testing.assert_array_equal(first, second)

    assert accepted > 200


def test_rows_of_one_candidate_are_not_read_by_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_read_joined", None)
    assert_read([[(7, -0.5, 1)], [(300, 0.0, 2)], [(2**31 - 1, float("-inf"), 127)]])


def test_the_beginnings_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "MAX_KNOWN", 4)
    assert_read([[(i, -0.5, 1)] for i in range(1, 60)])

    assert len(candidates._BEGINNINGS) <= 4


MANY = 100
"""Rows that are too many to be read one by one from the start."""


def test_few_rows_are_read_like_many() -> None:
    tokens = [[(7, -0.5, 1), (9, -1.5, 2)], [], [(2**31 - 1, 0.0, 0)]]
    few, many = read_candidates(rows_of(tokens)), read_candidates(rows_of(tokens * MANY))

    assert few.ids.tolist() * MANY == many.ids.tolist()
    assert few.values.tolist() * MANY == many.values.tolist()
    assert few.ranks.tolist() * MANY == many.ranks.tolist()
    assert np.diff(few.offsets).tolist() * MANY == np.diff(many.offsets).tolist()


def test_a_row_of_a_whole_vocabulary_is_read() -> None:
    tokens = [[(i, -i / 7, i + 1) for i in range(3000)], [(4, -1.0, 1)]]

    assert len(rows_of(tokens)[0]) > MAX_FAST_ROW_BYTES
    assert_read(tokens)


@pytest.mark.parametrize("others", [1, MANY])
def test_another_order_of_fields_and_unknown_ones_are_read_too(others: int) -> None:
    token = bytes([0x18, 3, 0x08, 7, 0x20, 1])  # the rank first, and a field 4 that nobody knows
    found = read_candidates([bytes([0x0A, len(token)]) + token, *rows_of([[(9, -1.0, 2)]] * others)])

    assert (found.ids.tolist(), found.ranks.tolist()) == ([7] + [9] * others, [3] + [2] * others)
    assert found.offsets.tolist() == list(range(others + 2))


@pytest.mark.parametrize("row", [b"\x0a", b"\x0a\x05\x08\x01", b"\x0a\x02\x08\xff", b"\xff", b"\x0a\x03\x15\x00\x00"])
@pytest.mark.parametrize("others", [1, MANY])
def test_a_row_that_is_none_is_a_breach(row: bytes, others: int) -> None:
    with pytest.raises(EngineProtocolError, match="cannot be read"):
        read_candidates([*rows_of([[(1, -1.0, 1)]] * others), row])


def test_an_id_that_does_not_fit_is_a_breach() -> None:
    with pytest.raises(EngineProtocolError, match="4294967295"):
        read_candidates(rows_of([[(2**32 - 1, -1.0, 1)]]))
    with pytest.raises(EngineProtocolError, match="4294967295"):
        read_candidates(rows_of([[(2**32 - 1, -1.0, 1)]] * MANY))
