import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from rollplane.engines.grpc import long_answers
from rollplane.engines.grpc.answers import AnswerReader
from rollplane.engines.grpc.long_answers import LONG, LongAnswer, parse_answer
from rollplane.engines.grpc.proto import answers_pb2
from rollplane.engines.grpc.proto import inference_pb2 as pb
from rollplane.errors import EngineProtocolError
from rollplane.testing import make_request

Token = tuple[int, float, int]
IDS = (0, 1, 58, 127, 128, 16_383, 16_384, 2**21 - 1)
REQUEST = make_request(logprobs=1)
LOGPROBS = (0.0, -0.25, -1e-3, -9999.0, float("-inf"), float("nan"))


def answer(rows: list[list[Token]], **fields: Any) -> pb.GenerateResponse:
    count = len(rows)
    output = pb.SequenceOutput(
        num_tokens=count,
        token_ids=[58] * count,
        logprobs=[-0.5] * count,
        ranks=[1] * count,
        candidate_tokens=[
            pb.CandidateTokenInfo(tokens=[pb.TokenInfo(id=i, logprob=v, rank=r) for i, v, r in row]) for row in rows
        ],
        **fields,
    )
    return pb.GenerateResponse(prompt_info=pb.PromptInfo(num_prompt_tokens=3), outputs=[output])


def finish(count: int) -> pb.FinishInfo:
    return pb.FinishInfo(finish_reason=pb.FinishInfo.LENGTH, num_output_tokens=count)


def outcome(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """What a reader makes of an answer, or why it refuses."""
    reader = AnswerReader(REQUEST)
    try:
        prompt, choice = reader.read(parse(data))
    except DecodeError:
        return "no answer"
    except EngineProtocolError as error:
        return str(error)
    if choice is None:
        return prompt
    assert choice.logprobs is not None
    assert choice.logprobs.alternatives is not None
    top = choice.logprobs.alternatives
    arrays = [choice.token_ids, choice.logprobs.values, choice.logprobs.ranks, top.ids, top.values, top.ranks]
    return prompt, choice.finish_reason, reader.floored, [(a.dtype.str, a.tobytes()) for a in [*arrays, top.offsets]]


def assert_alike(data: bytes) -> None:
    assert outcome(parse_answer, data) == outcome(answers_pb2.GenerateResponse.FromString, data)


@pytest.fixture
def every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "LONG", 0)


def test_rows_of_one_candidate_are_read_where_they_stand() -> None:
    draw = random.Random(3)
    rows = [[(draw.choice(IDS), draw.choice(LOGPROBS), draw.choice((1, 5, 127)))] for _ in range(400)]
    data = answer(rows, finish_info=finish(400)).SerializeToString()
    found = parse_answer(data)

    assert len(data) >= LONG
    assert isinstance(found, LongAnswer)
    assert found.candidates.ids.tolist() == [row[0][0] for row in rows]
    assert found.candidates.ranks.tolist() == [row[0][2] for row in rows]
    assert_alike(data)


@pytest.mark.usefixtures("every_length")
@pytest.mark.parametrize("token", [(i, v, r) for i in IDS for v in LOGPROBS for r in (1, 127)])
def test_every_width_is_read_where_it_stands(token: Token) -> None:
    for last in ({}, {"finish_info": finish(1)}):
        data = answer([[token]], **last).SerializeToString()
        assert isinstance(parse_answer(data), LongAnswer)
        assert_alike(data)


@pytest.mark.usefixtures("every_length")
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[]],
        [[], [(7, -0.5, 1)]],
        [[(7, -0.5, 1)], []],
        [[(7, -0.5, 1), (8, -1.5, 2)]],
        [[(7, -0.5, 128)]],
        [[(7, -0.5, 0)]],
        [[(2**21, -0.5, 1)]],
        [[(2**21, 0.0, 1)]],
        [[(2**32 - 1, -0.5, 1)]],
    ],
)
def test_other_rows_are_left_to_protobuf(rows: list[list[Token]]) -> None:
    data = answer(rows).SerializeToString()

    assert not isinstance(parse_answer(data), LongAnswer)
    assert_alike(data)


@pytest.mark.usefixtures("every_length")
def test_rows_that_do_not_stand_together_are_left_to_protobuf() -> None:
    row = bytes([0x3A, 11, 0x0A, 9, 0x08, 7, 0x15, 0, 0, 0, 0xBF, 0x18, 1])
    count, ids = bytes([0x18, 2]), bytes([0x22, 6, 58, 10, 58, 10, 58, 10])
    inside = b"\x22\x1a" + row + row  # token ids that look like rows
    for raw in (row + row + ids, ids + row + count + row, ids + row + row[:-1], ids + row + row + b"\x3a\x00", inside):
        data = b"\x12" + bytes([len(raw)]) + raw
        assert not isinstance(_parsed(data), LongAnswer)
        assert_alike(data)
    raw = ids + row + row + count
    assert isinstance(parse_answer(b"\x12" + bytes([len(raw)]) + raw), LongAnswer)


@pytest.mark.usefixtures("every_length")
def test_what_is_nested_too_deeply_is_refused_before_and_behind_the_rows() -> None:
    data = answer([[(7, -0.5, 1)]], finish_info=finish(1)).SerializeToString()
    begin = data.index(b"\x12") + 2
    raw, row = data[begin:], data.index(b"\x3a") - begin
    for depth in range(95, 103):
        group = b"\x4b" * depth + b"\x4c" * depth
        for changed in (raw[:row] + group + raw[row:], raw + group):
            size = len(changed)
            assert_alike(data[: begin - 1] + bytes([size & 0x7F | 0x80, size >> 7]) + changed)


@pytest.mark.usefixtures("every_length")
@pytest.mark.parametrize("zero", [b"\x08\x00", b"\x18\x00", b"\x42\x02\x08\x00", b"\x42\x02\x10\x00"])
def test_a_zero_behind_the_rows_is_the_last_word(zero: bytes) -> None:
    data = answer([[(7, -0.5, 1)]], index=1, finish_info=finish(1)).SerializeToString()
    begin = data.index(b"\x12") + 2
    changed = data[: begin - 1] + bytes([data[begin - 1] + len(zero)]) + data[begin:] + zero

    assert isinstance(parse_answer(changed), LongAnswer)
    assert_alike(changed)


def _parsed(data: bytes) -> Any:
    try:
        return parse_answer(data)
    except DecodeError:
        return None


@pytest.mark.usefixtures("every_length")
def test_answers_are_read_as_protobuf_reads_them_whatever_their_bytes() -> None:
    draw = random.Random(11)
    kept = 0
    for _ in range(3000):
        rows = [
            [(draw.choice(IDS), draw.choice(LOGPROBS), draw.choice((1, 5, 127)))] for _ in range(draw.randrange(1, 4))
        ]
        data = bytearray(answer(rows, finish_info=finish(len(rows))).SerializeToString())
        begin = data.index(b"\x12") + 2  # behind the output's length, which is made right again
        for _ in range(draw.randrange(3)):
            at = draw.randrange(begin, len(data))
            change = draw.randrange(3)
            if change == 0:
                data[at] = draw.choice((0x00, 0x08, 0x0A, 0x0C, 0x15, 0x18, 0x22, 0x3A, 0x7F, 0x80, 0xFF))
            elif change == 1:
                del data[at]
            else:
                data.insert(at, draw.choice((0x00, 0x08, 0x0A, 0x15, 0x18, 0x3A, 0x80)))
        data[begin - 1] = len(data) - begin
        kept += isinstance(_parsed(bytes(data)), LongAnswer)
        assert_alike(bytes(data))

    assert kept > 500
