import msgspec
import numpy as np
import pytest

from rollplane.client.sse import StreamReader
from rollplane.errors import EngineProtocolError, InvalidRequest, TransportError
from rollplane.protocol.answer import choice_tree, logprobs_raw
from rollplane.protocol.artifacts import Alternatives, RoutedExperts, SamplingMask, TokenLogprobs
from rollplane.protocol.events import ChoiceEvent, EndEvent, PromptEvent
from rollplane.protocol.request import Encoding
from rollplane.protocol.response import Choice

IDS = np.array([7, 8], dtype=np.int32)
LOGPROBS = TokenLogprobs(
    values=np.array([-0.1, -1.7], dtype=np.float32),
    alternatives=Alternatives(
        ids=np.array([7, 9, 8], dtype=np.int32),
        values=np.array([-0.1, -2.5, -1.7], dtype=np.float32),
        ranks=np.array([1, 2, 1], dtype=np.int32),
        offsets=np.array([0, 2, 3], dtype=np.int32),
    ),
)
CHOICE = Choice(
    index=0,
    token_ids=IDS,
    finish_reason="stop",
    stop_reason=8,
    logprobs=LOGPROBS,
    routed_experts=RoutedExperts(array=np.arange(16, dtype=np.uint8).reshape(4, 2, 2), start=1),
    sampling_mask=SamplingMask(ids=np.array([7, 9, 8], dtype=np.int32), offsets=np.array([0, 2, 3], dtype=np.int32)),
    policy_versions=[("v1", 0)],
)


def chunk(**tree: object) -> bytes:
    return b"data: " + msgspec.json.encode({"request_id": "r", "choices": [], **tree}) + b"\n\n"


@pytest.mark.parametrize("encoding", ["structured", "npy"])
def test_a_terminal_chunk_reads_back_as_it_was_written(encoding: Encoding) -> None:
    (event,) = StreamReader(routes_start=1).feed(chunk(choices=[choice_tree(CHOICE, routes=encoding)]))
    assert isinstance(event, ChoiceEvent)
    assert event.token_ids.tolist() == [7, 8]
    assert event.logprobs is not None
    assert event.logprobs.values.tolist() == LOGPROBS.values.tolist()
    alternatives, written = event.logprobs.alternatives, LOGPROBS.alternatives
    assert alternatives is not None
    assert written is not None
    for name in ("ids", "values", "ranks", "offsets"):
        assert getattr(alternatives, name).tolist() == getattr(written, name).tolist(), name
    assert event.routed_experts is not None
    assert event.routed_experts.array.tolist() == np.arange(16).reshape(4, 2, 2).tolist()
    assert event.routed_experts.start == 1
    assert event.sampling_mask is not None
    assert event.sampling_mask.rows() == [[7, 9], [8]]
    assert (event.finish_reason, event.stop_reason, event.policy_versions) == ("stop", 8, [("v1", 0)])


def test_a_stream_cut_anywhere_gives_the_same_events() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    delta = {"index": 0, "token_ids": [7], "logprobs": logprobs_raw(IDS[:1], None), "finish_reason": None}
    served = {"worker": "w", "attempt": 2, "logprobs_mode": "raw"}
    data = (
        chunk(choices=[delta], usage=usage, prompt_token_ids=[1, 2, 3])
        + b": a comment\r\n\r\n"
        + chunk(choices=[choice_tree(CHOICE)], usage=usage)
        + chunk(rollplane=served, metrics={"a": 1})
        + b"data: [DONE]\n\n"
    )
    whole = [type(event) for event in StreamReader().feed(data)]
    assert whole == [PromptEvent, ChoiceEvent, ChoiceEvent, EndEvent]
    for size in (1, 7, 64):
        reader = StreamReader()
        events = [event for at in range(0, len(data), size) for event in reader.feed(data[at : at + size])]
        assert [type(event) for event in events] == whole
        assert reader.done
        prompt, *_, end = events
        assert isinstance(prompt, PromptEvent)
        assert prompt.prompt_token_ids is not None
        assert prompt.prompt_token_ids.tolist() == [1, 2, 3]
        assert isinstance(end, EndEvent)
        assert (end.served_by.worker, end.served_by.attempt, end.metrics) == ("w", 2, {"a": 1})


def test_an_error_in_the_stream_is_the_typed_error() -> None:
    body = {"message": "no", "type": "invalid_request_error", "param": "model", "code": "invalid_request"}
    with pytest.raises(InvalidRequest, match="no") as error:
        list(StreamReader().feed(b"data: " + msgspec.json.encode({"error": body}) + b"\n\n"))
    assert error.value.param == "model"


@pytest.mark.parametrize("line", [b"data: {", b"data: 7", b'data: {"choices": [{"index": "0"}]}', b"data: \xff"])
def test_what_is_no_chunk_is_a_transport_error(line: bytes) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        list(StreamReader().feed(line + b"\n\n"))


def test_routes_whose_bytes_do_not_fit_their_shape_break_the_contract() -> None:
    tree = choice_tree(CHOICE)
    tree["routed_experts"] = {**tree["routed_experts"], "shape": [5, 2, 2]}
    with pytest.raises(EngineProtocolError, match="choice 0"):
        list(StreamReader().feed(chunk(choices=[tree])))


def test_a_top_logprob_that_names_text_breaks_the_contract() -> None:
    tops = [{"token": "hello", "logprob": -1.0}]
    tree = {"index": 0, "token_ids": [7], "logprobs": {"content": [{"logprob": -1.0, "top_logprobs": tops}]}}
    with pytest.raises(EngineProtocolError, match="'hello'"):
        list(StreamReader().feed(chunk(choices=[tree])))
