"""What a preprocessed medium holds, read from the bytes that go to vLLM, and held to the model before anything is sent.

The bytes are vLLM's msgpack of a `MultiModalKwargsItem`: field -> `{"data": [dtype, shape, extension 3], "field": [kind,
settings]}`. vLLM's server passes them on to its engine unread.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from rollplane.engines.grpc.model_facts import ModelFacts
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.media_fields import (
    FLOATS,
    Field,
    check_grids,
    check_pixels,
    check_shape,
    is_grid,
    is_pixels,
    refuse,
)
from rollplane.protocol.features import MediaItem

RAW_VIEW: Final = 3
"""vLLM's extension code for the bytes of a tensor; its other two are pickles."""

MAX_NESTED: Final = 8
"""Levels of lists of tensors; far below Python's recursion limit, wherever it is reached."""

KINDS: Final = frozenset({"batched", "flat", "shared"})
_NUMPY: Final = {
    "bool": "?",
    "uint8": "u1",
    "int8": "i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float32": "<f4",
    "float64": "<f8",
}
_BFLOAT16_EXPONENT: Final = 0x7F80

DEVICE_NORMALISED: Final = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "OpenCUAForConditionalGeneration",
        "Exaone4_5_ForConditionalGeneration",
    }
)
"""Architectures whose pixels vLLM 0.31 normalises on the device unless told otherwise."""
DEFAULTS_KNOWN_FOR: Final = "0.31."


class _Element(msgspec.Struct):
    data: Any
    field: tuple[str, dict[str, Any]]


class MediaModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the server's model takes, as far as it is known here; see `ModelFacts`.

    `normalises`: the server normalises pixels itself; None: not known. `stated`: the settings say so.
    """

    merge: int | None = None
    patch_numbers: int | None = None
    normalises: bool | None = None
    stated: bool = False


def media_model(facts: ModelFacts | None, settings: GrpcSettings, *, engine_version: str) -> MediaModel:
    """From the model's directory, how the server was stated to be started, and vLLM's own defaults."""
    normalises = settings.mm_device_do_normalize
    if normalises is None and facts is not None and engine_version.startswith(DEFAULTS_KNOWN_FOR):
        normalises = not DEVICE_NORMALISED.isdisjoint(facts.architectures)
    return MediaModel(
        merge=facts.merge if facts is not None else None,
        patch_numbers=facts.patch_numbers if facts is not None else None,
        normalises=normalises,
        stated=settings.mm_device_do_normalize is not None,
    )


def check_features(items: Sequence[MediaItem], model: MediaModel) -> None:
    """Read every item that carries its payload, and hold it to the model and to its placeholder. Some milliseconds.

    Raises:
        InvalidRequest: a payload that is none, or is not what this model takes; naming the item and the field.
    """
    for i, item in enumerate(items):
        if item.kwargs is not None:
            where = f"features item {i} ({item.modality})"
            check_fields(item, read_fields(item.kwargs, where=where), model, where=where)


def check_fields(item: MediaItem, fields: dict[str, Field], model: MediaModel, *, where: str) -> None:
    """Pixels of the kind the server takes, patches of the model's size, and a placeholder as long as the grid says.

    Raises:
        InvalidRequest: naming the field, what it is and what it must be.
    """
    patched = any(is_grid(name) for name in fields)
    for name, field in fields.items():
        if not is_pixels(name):
            continue
        if model.normalises is None:
            refuse(
                where,
                f"{name} has dtype {field.dtype}, and whether this server normalises pixels itself is not known: state it "
                "(mm_device_do_normalize), as the server was started",
            )
        hint = "" if model.stated else "if this server was started so, state it (mm_device_do_normalize)"
        check_pixels(name, field.dtype, takes_uint8=model.normalises, where=where, hint=hint)
        if field.dtype not in FLOATS and field.dtype != "uint8":
            refuse(where, f"{name} has dtype {field.dtype}, pixels are floats or uint8")
        if patched and model.patch_numbers is not None:
            check_shape(name, field.shape, dims=2, tail=(model.patch_numbers,), where=where)
    check_grids(item, fields, merge=model.merge, where=where)


def read_fields(kwargs: bytes, *, where: str) -> dict[str, Field]:
    """The fields of a payload.

    Raises:
        InvalidRequest: it is none of vLLM's, a tensor's bytes are not what its shape says, or a number is not finite.
    """
    try:
        elements = _decoder.decode(kwargs)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, _Foreign) as error:
        refuse(where, f"kwargs_data is not a MultiModalKwargsItem: {error}")
    if not elements:
        refuse(where, "kwargs_data holds no fields")
    found = {}
    for name, element in elements.items():
        if element.field[0] not in KINDS:
            refuse(where, f"{name} is a field of the kind {element.field[0][:32]!r}; known: {', '.join(sorted(KINDS))}")
        found[name] = _read(name, element.data, where=where)
    return found


def _read(name: str, data: Any, *, where: str, depth: int = 0) -> Field:
    if depth > MAX_NESTED:
        refuse(where, f"{name} is nested more than {MAX_NESTED} levels deep")
    if isinstance(data, (int, float)):
        if not math.isfinite(data):
            refuse(where, f"{name} is {data}")
        return Field(dtype=type(data).__name__, shape=())
    if isinstance(data, list) and data and not isinstance(data[0], str):
        for inner in data:  # tensors of several sizes
            _read(name, inner, where=where, depth=depth + 1)
        return Field(dtype="list", shape=(len(data),))
    if not (isinstance(data, list) and len(data) == 3 and _is_shape(data[1]) and isinstance(data[2], memoryview)):
        refuse(where, f"{name} is no tensor [dtype, shape, bytes]")
    dtype, shape, raw = data[0], tuple(data[1]), data[2]
    if dtype not in _NUMPY:
        refuse(where, f"{name} has dtype {dtype[:32]!r}; known: {', '.join(_NUMPY)}")
    size = math.prod(shape) * np.dtype(_NUMPY[dtype]).itemsize
    if size != raw.nbytes:
        refuse(where, f"{name} is {dtype} of shape {list(shape)}, {size} bytes, and has {raw.nbytes}")
    values = np.frombuffer(raw, dtype=_NUMPY[dtype])
    if not _all_finite(values, dtype):
        refuse(where, f"{name} holds values that are not finite")
    if is_grid(name) and values.dtype.kind != "i":
        refuse(where, f"{name} has dtype {dtype}, a grid has whole numbers")
    return Field(dtype=dtype, shape=shape, numbers=tuple(values[:64].tolist()) if is_grid(name) else ())


def _all_finite(values: np.ndarray[Any, Any], dtype: str) -> bool:
    if dtype == "bfloat16":
        return not bool(((values & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any())
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)


class _Foreign(Exception):
    """An extension that is not a tensor's bytes."""


def _extension(code: int, data: memoryview) -> memoryview:
    if code != RAW_VIEW:
        raise _Foreign(f"extension {code}, only {RAW_VIEW} (a tensor's bytes) is read")
    return data


_decoder: Final = msgspec.msgpack.Decoder(dict[str, _Element], ext_hook=_extension)
