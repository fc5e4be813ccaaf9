"""What a server answers, and every breach of what it promises."""

import numpy as np
import pytest

from rollplane.engines.grpc.answers import AnswerReader, packed_float32s, packed_int32s
from rollplane.engines.grpc.proto import answers_pb2
from rollplane.engines.grpc.proto import inference_pb2 as pb
from rollplane.errors import EngineProtocolError
from rollplane.protocol.artifacts import LOGPROB_FLOOR
from rollplane.protocol.features import MediaItem
from rollplane.protocol.invariants import check_prompt_logprobs
from rollplane.protocol.request import ContentPart
from rollplane.testing import make_request

INF = float("inf")


def prompt_info(count: int = 3, **fields) -> pb.PromptInfo:
    return pb.PromptInfo(num_prompt_tokens=count, **fields)


def candidates(*rows):
    return [pb.CandidateTokenInfo(tokens=[pb.TokenInfo(id=i, logprob=v, rank=r) for i, v, r in row]) for row in rows]


def output(ids=(8, 9), *, finish=pb.FinishInfo.LENGTH, total=None, **fields) -> pb.SequenceOutput:
    made = {"num_tokens": len(ids), "token_ids": ids, **fields}
    if finish is not None:
        made["finish_info"] = pb.FinishInfo(
            finish_reason=finish, num_output_tokens=len(ids) if total is None else total
        )
    return pb.SequenceOutput(**made)


def answer(*outputs, prompt=None) -> pb.GenerateResponse:
    return pb.GenerateResponse(prompt_info=prompt_info() if prompt is None else prompt, outputs=outputs)


def read(request, *answers):
    reader = AnswerReader(request)
    events = [reader.read(answers_pb2.GenerateResponse.FromString(each.SerializeToString())) for each in answers]
    reader.end()
    return reader, events


def test_a_whole_answer_is_a_prompt_and_a_terminal_choice():
    request = make_request(logprobs=0)
    _, [(prompt, choice)] = read(
        request, answer(output(logprobs=[-0.5, -1.5], ranks=[1, 4], candidate_tokens=candidates((), ())))
    )

    assert prompt.prompt_tokens == 3
    assert choice.finish_reason == "length"
    assert choice.token_ids.dtype == np.int32
    assert choice.token_ids.tolist() == [8, 9]
    assert choice.logprobs.values.dtype == np.float32
    assert choice.logprobs.values.tolist() == [-0.5, -1.5]
    assert choice.logprobs.ranks.tolist() == [1, 4]
    assert choice.logprobs.alternatives is None


def test_a_stream_is_the_prompt_then_deltas_then_the_end():
    reader, events = read(
        make_request(),
        pb.GenerateResponse(prompt_info=prompt_info()),
        pb.GenerateResponse(outputs=[output((8,), finish=None)]),
        pb.GenerateResponse(outputs=[output((9,), total=2)]),
    )

    assert [choice and choice.token_ids.tolist() for _, choice in events] == [None, [8], [9]]
    assert [choice and choice.finish_reason for _, choice in events] == [None, None, "length"]
    assert reader.tokens == 2


def test_logprobs_that_were_not_asked_for_are_left_out():
    _, [(_, choice)] = read(make_request(), answer(output(logprobs=[-1, -1], ranks=[1, 1])))

    assert choice.logprobs is None


def test_alternatives_are_rows_per_token_and_infinite_ones_are_floored_and_counted():
    request = make_request(logprobs=2)
    rows = candidates([(8, -0.5, 1), (7, -INF, 2)], [(1, -0.25, 1), (2, -9999.0, 2)])
    reader, [(_, choice)] = read(request, answer(output(logprobs=[-0.5, -2.0], ranks=[1, 3], candidate_tokens=rows)))
    top = choice.logprobs.alternatives

    assert top.ids.tolist() == [8, 7, 1, 2]
    assert top.values.tolist() == [-0.5, LOGPROB_FLOOR, -0.25, LOGPROB_FLOOR]
    assert top.offsets.tolist() == [0, 2, 4]
    assert reader.floored == 2


@pytest.mark.parametrize(
    ("fields", "reason", "stop_reason"),
    [
        ({"finish_reason": pb.FinishInfo.STOP, "stop_token_id": 0}, "stop", 0),
        ({"finish_reason": pb.FinishInfo.STOP, "stop_string": "x"}, "stop", "x"),
        ({"finish_reason": pb.FinishInfo.STOP, "eos_token_id": 2}, "stop", None),
        ({"finish_reason": pb.FinishInfo.ABORTED}, "abort", None),
    ],
)
def test_the_end_says_why(fields, reason, stop_reason):
    out = output(finish=None)
    out.finish_info.CopyFrom(pb.FinishInfo(num_output_tokens=2, **fields))
    _, [(_, choice)] = read(make_request(), answer(out))

    assert (choice.finish_reason, choice.stop_reason) == (reason, stop_reason)


def test_an_aborted_choice_may_have_no_tokens():
    _, [(_, choice)] = read(make_request(logprobs=1), answer(output((), finish=pb.FinishInfo.ABORTED)))

    assert choice.token_ids.size == 0
    assert choice.logprobs.values.size == 0
    assert choice.logprobs.alternatives.offsets.tolist() == [0]


def test_transfer_params_come_back_whole():
    out = output()
    out.finish_info.kv_transfer_params.update({"port": 7, "half": 0.5})
    reader, _ = read(make_request(), answer(out))

    assert reader.kv_transfer_params == {"port": 7, "half": 0.5}
    assert type(reader.kv_transfer_params["port"]) is int
    assert reader.ec_transfer_params is None


def test_ranks_of_more_than_a_byte_are_read():
    scores = {"logprobs": [-1, -2, -3], "ranks": [1, 128, 2**31 - 1]}
    _, [(_, choice)] = read(make_request(logprobs=0), answer(output((7, 8, 9), **scores)))

    assert choice.logprobs.ranks.dtype == np.int32
    assert choice.logprobs.ranks.tolist() == [1, 128, 2**31 - 1]


def test_packed_numbers_may_come_in_parts():
    values = np.array([-0.5, -1.5, -2.5], dtype=np.float32)

    np.testing.assert_array_equal(packed_float32s([values[:1].tobytes(), values[1:].tobytes()]), values)
    assert packed_int32s([b"\x01\x02", b"\xac\x02"]).tolist() == [1, 2, 300]
    assert packed_float32s([]).dtype == np.float32
    assert packed_int32s([]).dtype == np.int32


def test_numbers_that_are_not_packed_are_refused_not_lost():
    packed = pb.SequenceOutput(num_tokens=1, token_ids=[7], ranks=[1]).SerializeToString()
    unpacked = b"\x2d" + np.float32(-0.5).tobytes()  # a `logprobs` of one number
    message = answers_pb2.GenerateResponse(outputs=[answers_pb2.SequenceOutput.FromString(packed + unpacked)])

    with pytest.raises(EngineProtocolError, match="0 logprobs for 1 tokens"):
        AnswerReader(make_request(logprobs=0)).read(message)


@pytest.mark.parametrize(
    ("unpacked", "says"),
    [
        (b"\x2d" + np.float32(-0.5).tobytes(), "logprobs that are not packed, beside 1 that are"),
        (b"\x30\x01", "ranks that are not packed, beside 1 that are"),
    ],
)
def test_numbers_that_are_not_packed_are_refused_beside_packed_ones(unpacked, says):
    packed = pb.SequenceOutput(num_tokens=1, token_ids=[7], logprobs=[-0.5], ranks=[1]).SerializeToString()
    message = answers_pb2.GenerateResponse(outputs=[answers_pb2.SequenceOutput.FromString(packed + unpacked)])

    with pytest.raises(EngineProtocolError, match=says):
        AnswerReader(make_request(logprobs=0)).read(message)


def test_a_field_that_nobody_knows_is_passed_over():
    packed = pb.SequenceOutput(num_tokens=1, token_ids=[7], text="x", logprobs=[-0.5], ranks=[1]).SerializeToString()
    output = answers_pb2.SequenceOutput.FromString(packed + b"\xa2\x06\x01x")  # field 100

    _, choice = AnswerReader(make_request(logprobs=0)).read(answers_pb2.GenerateResponse(outputs=[output]))

    assert choice is not None
    assert choice.logprobs.values.tolist() == [-0.5]


@pytest.mark.parametrize(
    ("read_packed", "parts", "says"),
    [
        (packed_float32s, [b"\x00\x00\x00"], "packed floats of 3 bytes"),
        (packed_float32s, [b"\x00\x00\x00", b"\x00"], r"packed floats of 3 \+ 1 bytes"),
        (packed_int32s, [b"\x01\xff"], "cannot be read"),
        (packed_int32s, [b"\x01\xff", b"\x01"], "cannot be read"),
        (packed_int32s, [b"\xff\xff\xff\xff\x0f"], "4294967295"),
    ],
)
def test_packed_numbers_that_are_none_are_a_breach(read_packed, parts, says):
    with pytest.raises(EngineProtocolError, match=says):
        read_packed(parts)


# -- the prompt ------------------------------------------------------------------------------------------------------


def test_prompt_ids_and_placeholders_are_given_back():
    item = MediaItem(modality="image", producer_hash="h", offset=1, length=2, is_embed=np.array([True, False]))
    request = make_request(fields={"return_token_ids": True, "features": [item]})
    _, [(prompt, _)] = read(request, answer(output(), prompt=prompt_info(token_ids=[5, 6, 7])))

    assert prompt.prompt_token_ids.tolist() == [5, 6, 7]
    assert prompt.mm_placeholders == {"image": [{"offset": 1, "length": 2, "is_embed": [True, False]}]}


def test_raw_media_may_lengthen_the_prompt():
    request = make_request(fields={"content_parts": [ContentPart(type="image_url", url="data:,")]})
    _, [(prompt, _)] = read(request, answer(output(), prompt=prompt_info(9)))

    assert prompt.prompt_tokens == 9


def test_prompt_logprobs_without_alternatives():
    request = make_request(prompt_logprobs=0, max_tokens=2)
    info = prompt_info(token_ids=[5, 6, 7], logprobs=[0, -1, -2], ranks=[0, 3, 4])
    _, [(prompt, _)] = read(request, answer(output(), prompt=info))
    found = prompt.prompt_logprobs

    check_prompt_logprobs(found, prompt_tokens=3)
    assert found.ids.tolist() == [6, 7]
    assert found.values.tolist() == [-1, -2]
    assert found.ranks.tolist() == [3, 4]
    assert found.offsets.tolist() == [0, 0, 1, 2]


def test_prompt_rows_begin_with_the_prompts_own_token_and_name_it_once():
    request = make_request(prompt_logprobs=2, max_tokens=2)
    rows = candidates((), [(9, -0.5, 1), (6, -1, 2)], [(1, -INF, 1), (2, -0.75, 2)])
    info = prompt_info(token_ids=[5, 6, 7], logprobs=[0, -1, -2], ranks=[0, 2, 4], candidate_tokens=rows)
    reader, [(prompt, _)] = read(request, answer(output(), prompt=info))
    found = prompt.prompt_logprobs

    check_prompt_logprobs(found, prompt_tokens=3)
    assert found.ids.tolist() == [6, 9, 7, 1, 2]
    assert found.values.tolist() == [-1, -0.5, -2, LOGPROB_FLOOR, -0.75]
    assert found.ranks.tolist() == [2, 1, 4, 1, 2]
    assert found.offsets.tolist() == [0, 0, 2, 5]
    assert reader.floored == 1


def test_a_prompt_of_one_token_has_an_empty_row():
    request = make_request([5], prompt_logprobs=1, max_tokens=2)
    info = prompt_info(1, token_ids=[5], logprobs=[0], ranks=[0], candidate_tokens=candidates(()))
    _, [(prompt, _)] = read(request, answer(output(), prompt=info))

    check_prompt_logprobs(prompt.prompt_logprobs, prompt_tokens=1)
    assert prompt.prompt_logprobs.ids.size == 0


# -- breaches --------------------------------------------------------------------------------------------------------

SCORES = {"logprobs": [-1, -1], "ranks": [1, 1]}


@pytest.mark.parametrize(
    ("asked", "answers", "says"),
    [
        ({}, [answer(output(num_tokens=3))], "num_tokens is 3, token_ids has 2"),
        ({}, [answer(output(finish=pb.FinishInfo.NOT_FINISHED))], "finish reason 0"),
        ({}, [answer(output(total=5))], "says 5 output tokens, 2 came"),
        ({}, [answer(output(finish=None))], "ended after 2 tokens without finish_info"),
        ({}, [answer()], "ended after 0 tokens without finish_info"),
        ({}, [answer(output(), output())], "2 outputs for one sequence"),
        ({}, [answer(output(index=1))], "index 1 for one sequence"),
        ({}, [answer(output()), pb.GenerateResponse(outputs=[output()])], "an output after finish_info"),
        ({}, [pb.GenerateResponse(outputs=[output()])], "no prompt_info"),
        ({}, [answer(prompt=prompt_info()), answer(output())], "prompt_info came twice"),
        ({}, [answer(output(), prompt=prompt_info(4))], "the prompt has 3 tokens, the engine says 4"),
        ({}, [answer(output((8, 2**31)))], "2147483648, which does not fit int32"),
        ({"logprobs": 0}, [answer(output(logprobs=[-1], ranks=[1, 1]))], "1 logprobs for 2 tokens"),
        ({"logprobs": 0}, [answer(output())], "0 logprobs for 2 tokens"),
        ({"logprobs": 0}, [answer(output(logprobs=[-1, -1], ranks=[1]))], "1 ranks for 2 tokens"),
        (
            {"logprobs": 1},
            [answer(output(**SCORES, candidate_tokens=candidates([(1, -1, 1)])))],
            "1 candidate_tokens for 2 tokens",
        ),
        (
            {"logprobs": 1},
            [answer(output(**SCORES, candidate_tokens=candidates([(1, -1, 1)], ())))],
            "token 1 has no candidate",
        ),
        (
            {"fields": {"return_token_ids": True}},
            [answer(output(), prompt=prompt_info(token_ids=[5, 6]))],
            "2 token ids for 3 prompt tokens",
        ),
        (
            {"fields": {"return_token_ids": True}},
            [answer(output(), prompt=prompt_info(token_ids=[5, 6, 8]))],
            "not those that were sent",
        ),
        (
            {"prompt_logprobs": 0},
            [answer(output(), prompt=prompt_info(token_ids=[5, 6, 7], logprobs=[0, -1], ranks=[0, 1, 1]))],
            "2 prompt logprobs for 3 prompt tokens",
        ),
        (
            {"prompt_logprobs": 1},
            [answer(output(), prompt=prompt_info(token_ids=[5, 6, 7], logprobs=[0, -1, -1], ranks=[0, 1, 1]))],
            "0 prompt candidate_tokens for 3 prompt tokens",
        ),
    ],
)
def test_a_breach_is_named_with_its_numbers(asked, answers, says):
    with pytest.raises(EngineProtocolError, match=says):
        read(make_request(**asked), *answers)
