import pytest
from google.protobuf import struct_pb2

from rollplane.engines.grpc.struct_json import MAX_DEPTH, read_struct, write_struct
from rollplane.errors import EngineProtocolError, InvalidRequest


def test_an_object_survives_the_wire():
    value = {
        "whole": 7,
        "half": 0.5,
        "big": 2**53,
        "power": 2**60,
        "negative": -3,
        "text": "x",
        "yes": True,
        "none": None,
        "list": [1, [], {}, "a", False],
        "object": {"inner": {"deep": 1}},
        "empty": {},
    }

    found = read_struct(struct_pb2.Struct.FromString(write_struct(value, param="p").SerializeToString()))

    assert found == value
    assert {name: type(each) for name, each in found.items()} == {name: type(each) for name, each in value.items()}


@pytest.mark.parametrize("number", [2**53 + 1, 2**64 - 1, -(2**63) + 1, 10**400])
def test_a_number_that_a_double_cannot_hold_is_refused_by_path(number):
    with pytest.raises(InvalidRequest, match="cannot carry exactly") as refused:
        write_struct({"a": [0, {"b": number}]}, param="kv_transfer_params")

    assert refused.value.param == "kv_transfer_params.a[1].b"


def test_nesting_is_bounded():
    value: dict = {}
    for _ in range(MAX_DEPTH + 1):
        value = {"a": value}

    with pytest.raises(InvalidRequest, match="nested deeper"):
        write_struct(value, param="p")


def test_a_number_that_is_none_is_the_engines_breach():
    struct = struct_pb2.Struct(fields={"a": struct_pb2.Value(number_value=float("nan"))})

    with pytest.raises(EngineProtocolError):
        read_struct(struct)
