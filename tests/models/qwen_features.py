"""Payloads of preprocessed images as vLLM's renderer encodes them, made without vLLM."""

from typing import Any

import msgspec
import numpy as np

PATCH_NUMBERS = 3 * 2 * 14 * 14
"""Numbers in one patch of a Qwen-VL model's pixels."""


def tensor(array: np.ndarray[Any, Any], *, dtype: str | None = None) -> list[Any]:
    """A tensor on vLLM's wire; `dtype` where numpy has no name for it."""
    data = msgspec.msgpack.Ext(3, np.ascontiguousarray(array).tobytes())
    return [dtype or str(array.dtype), list(array.shape), data]


def element(data: Any, *, kind: str = "batched") -> dict[str, Any]:
    """A field with its batching, which the reader of one item does not need."""
    return {"data": data, "field": [kind, {"keep_on_cpu": False}]}


def image_fields(
    *, grid: tuple[int, ...] = (1, 4, 4), dtype: str = "float32", rows: int | None = None, fill: float = 0.5
) -> dict[str, Any]:
    """The fields of one image of `grid` patches."""
    patches = int(np.prod(grid)) if rows is None else rows
    pixels = np.full((patches, PATCH_NUMBERS), fill, dtype=dtype)
    return {
        "pixel_values": element(tensor(pixels), kind="flat"),
        "image_grid_thw": element(tensor(np.array(grid, dtype=np.int64))),
    }


def payload(**fields: Any) -> bytes:
    """The bytes of `kwargs_data` for one item."""
    return msgspec.msgpack.encode(fields)
