"""JSON objects as `google.protobuf.Struct`, whose only number is a double.

A whole number comes back whole; one that a double cannot hold is refused instead of rounded.
"""

from typing import Any, Final

from google.protobuf import struct_pb2

from rollplane.errors import EngineProtocolError, InvalidRequest

MAX_DEPTH: Final = 64


def write_struct(value: dict[str, Any], *, param: str) -> struct_pb2.Struct:
    """The Struct of a JSON object.

    Raises:
        InvalidRequest: a number that a double cannot hold, a kind JSON does not have, or nesting past `MAX_DEPTH`.
    """
    out = struct_pb2.Struct()
    for key, inner in value.items():
        _write(out.fields[key], inner, param=f"{param}.{key}", depth=1)
    return out


def read_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """The JSON object of a Struct; whole numbers are integers."""
    return {key: _read(value) for key, value in struct.fields.items()}


def _write(out: struct_pb2.Value, value: Any, *, param: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{param} is nested deeper than {MAX_DEPTH}", param=param)
    if value is None:
        out.null_value = struct_pb2.NULL_VALUE
    elif isinstance(value, bool):
        out.bool_value = value
    elif isinstance(value, (int, float)):
        out.number_value = _double(value, param=param)
    elif isinstance(value, str):
        out.string_value = value
    elif isinstance(value, list):
        out.list_value.SetInParent()
        for i, inner in enumerate(value):
            _write(out.list_value.values.add(), inner, param=f"{param}[{i}]", depth=depth + 1)
    elif isinstance(value, dict):
        out.struct_value.SetInParent()
        for key, inner in value.items():
            _write(out.struct_value.fields[key], inner, param=f"{param}.{key}", depth=depth + 1)
    else:
        raise InvalidRequest(f"{param} must be a JSON value, got {type(value).__name__}", param=param)


def _double(value: int | float, *, param: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = None
    if number is None or number != value:
        raise InvalidRequest(
            f"{param} is {value}, which the engine's wire (a 64-bit floating-point number) cannot carry exactly; "
            "send it as a string",
            param=param,
        )
    return number


def _read(value: struct_pb2.Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        if number != number or number in (float("inf"), float("-inf")):
            raise EngineProtocolError(f"transfer parameters hold the number {number}")
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return read_struct(value.struct_value)
    if kind == "list_value":
        return [_read(inner) for inner in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)
