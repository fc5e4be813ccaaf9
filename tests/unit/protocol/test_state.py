import msgspec
import pytest

from rollplane.errors import TransportError
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.state import StateReader, WorkerState, decode_state, encode_state, encode_state_frame

STATE = WorkerState(
    worker="w",
    instance="i",
    info=EngineInfo(engine="mock", model="m", max_model_len=64, vocab_bound=100, max_num_seqs=8),
    health=EngineHealth(alive=True, state="ready"),
    policy_version="v1",
)


def test_a_state_reads_back_whole_and_in_pieces() -> None:
    assert decode_state(encode_state(STATE)) == STATE
    data = encode_state_frame(STATE) * 2
    reader = StateReader()
    assert [state for i in range(len(data)) for state in reader.feed(data[i : i + 1])] == [STATE, STATE]
    assert repr(reader) == "<StateReader 0 bytes waiting>"


def test_a_heartbeat_that_says_what_the_one_before_said_is_the_same_state() -> None:
    reader, other = StateReader(), msgspec.structs.replace(STATE, policy_version="v2")
    first, again, news, back = reader.feed(b"".join(map(encode_state_frame, (STATE, STATE, other, STATE))))
    assert again is first
    assert (news, back) == (other, STATE)


@pytest.mark.parametrize("wire", [None, 2])
def test_another_wire_version_is_named_before_anything_else_is_read(wire: int | None) -> None:
    tree = msgspec.msgpack.decode(encode_state(STATE)) | {"wire": wire, "health": "of a later form"}
    if wire is None:
        del tree["wire"]
    with pytest.raises(TransportError, match=f"wire version {wire}"):
        decode_state(msgspec.msgpack.encode(tree))


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"wire": 1})])
def test_what_is_no_state_is_a_transport_error(body: bytes) -> None:
    with pytest.raises(TransportError):
        decode_state(body)


def test_a_state_over_the_limit_is_refused_by_its_length() -> None:
    with pytest.raises(TransportError, match="over the limit"):
        list(StateReader().feed(b"\xff\xff\xff\xff"))
