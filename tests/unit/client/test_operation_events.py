"""An operation's event stream, read back from whatever pieces it arrives in."""

import pytest

from rollplane.client.operation_events import MAX_LINE_BYTES, EventLines
from rollplane.errors import TransportError
from rollplane.protocol.admin import OperationEvent
from rollplane.server.operations import DONE, encode_event

EVENTS = [
    OperationEvent(number=1, at_s=1.5, event="began", what="policy update"),
    OperationEvent(number=2, at_s=1.6, event="worker", phase="apply", worker="http://w", seconds=0.5, error="ünlucky"),
    OperationEvent(
        number=3, at_s=1.7, event="failed", error="no", code="engine_failed", details={"workers": {"a": "b"}}
    ),
]
STREAM = b"".join(map(encode_event, EVENTS)) + b": running\n\n" + DONE


@pytest.mark.parametrize("size", [1, 7, 64, len(STREAM)])
def test_events_survive_any_cut(size: int) -> None:
    lines = EventLines()
    found = [event for at in range(0, len(STREAM), size) for event in lines.feed(STREAM[at : at + size])]
    assert found == EVENTS
    assert lines.done


def test_a_stream_without_its_end_is_not_done() -> None:
    lines = EventLines()
    assert lines.feed(STREAM.removesuffix(DONE)) == EVENTS
    assert not lines.done


@pytest.mark.parametrize("data", [b"data: {\n", b'data: {"number": 1}\n', b"data: []\n", b"x" * (MAX_LINE_BYTES + 1)])
def test_what_is_no_event_is_an_error(data: bytes) -> None:
    with pytest.raises(TransportError, match="an event of an operation"):
        EventLines().feed(data)
