"""The fields of a preprocessed medium, held to each other and to the placeholder. Pure, without torch and without vLLM.

vLLM checks little of them: fields of another shape end its engine or read beside a tensor, and pixels that were normalised
already are normalised once more without a word.
"""

import math
from collections.abc import Mapping
from typing import Final, NoReturn

import msgspec
import numpy as np

from rollplane.errors import InvalidRequest
from rollplane.protocol.features import MediaItem

FLOATS: Final = frozenset({"float16", "bfloat16", "float32"})


class Field(msgspec.Struct, frozen=True):
    """One field: torch's name of its dtype, its sizes, and its numbers where it is a grid."""

    dtype: str
    shape: tuple[int, ...]
    numbers: tuple[int, ...] = ()


Fields = Mapping[str, Field]


def is_pixels(name: str) -> bool:
    """Whether a field holds pixels."""
    return name.startswith("pixel_values")


def is_grid(name: str) -> bool:
    """Whether a field is a grid of (time, height, width) patches."""
    return name.endswith("grid_thw")


def check_pixels(name: str, dtype: str, *, takes_uint8: bool, where: str, hint: str = "") -> None:
    """Raw pixels (uint8) for an engine that normalises them itself, normalised ones for one that does not.

    Args:
        hint: what else to do about it, a sentence after the refusal's own.

    Raises:
        InvalidRequest: the other kind; naming vLLM's argument.
    """
    if (dtype == "uint8") is takes_uint8:
        return
    has = "normalises pixels itself and takes uint8" if takes_uint8 else "takes normalised floats"
    flag = "--no-mm-device-do-normalize" if takes_uint8 else "--mm-device-do-normalize"
    refuse(
        where,
        f"{name} has dtype {dtype}, this engine {has}; the vLLM argument {flag} takes the other kind"
        f"{'; ' if hint else ''}{hint}",
    )


def check_shape(name: str, shape: tuple[int, ...], *, dims: int, tail: tuple[int, ...], where: str) -> None:
    """As many dimensions as the model takes, none of size 0; a matrix has the model's columns.

    Raises:
        InvalidRequest: with the shape.
    """
    if len(shape) != dims:
        refuse(where, f"{name} has shape {list(shape)}, the model takes {dims} dimensions")
    if 0 in shape:
        refuse(where, f"{name} has shape {list(shape)}, which holds nothing")
    if dims == 2 and shape[1:] != tail:
        refuse(where, f"{name} has shape {list(shape)}, the model takes [.., {tail[0]}]")


def check_grids(item: MediaItem, fields: Fields, *, merge: int | None, where: str) -> None:
    """Every grid of patches: as many as the pixels have rows, and `merge`^2 of them per embedding of the placeholder.

    Args:
        merge: patches per side that one embedding covers; None: not known, the placeholder is not compared.

    Raises:
        InvalidRequest: naming the grid and what it should be.
    """
    for name, field in fields.items():
        if is_grid(name):
            _check_grid(item, name, field.numbers, fields, merge=merge, where=where)


def _check_grid(
    item: MediaItem, name: str, sizes: tuple[int, ...], fields: Fields, *, merge: int | None, where: str
) -> None:
    if len(sizes) != 3 or min(sizes) < 1:
        refuse(where, f"{name} is {list(sizes[:8])}, must be three sizes above 0")
    patches = math.prod(sizes)
    for pixels, field in fields.items():
        if is_pixels(pixels) and (not field.shape or field.shape[0] != patches):
            rows = field.shape[0] if field.shape else 0
            refuse(where, f"{name} {list(sizes)} has {patches} patches, {pixels} has {rows} rows")
    if merge is None:
        return
    if sizes[1] % merge or sizes[2] % merge:
        refuse(where, f"{name} {list(sizes)} is not divisible by the model's merge size {merge}")
    embeds = item.length if item.is_embed is None else int(np.count_nonzero(item.is_embed))
    if embeds != patches // merge**2:
        raise InvalidRequest(
            f"{where}: the placeholder takes {embeds} embeddings, the grid {list(sizes)} makes {patches // merge**2}",
            param="features.mm_placeholders",
        )


def refuse(where: str, says: str) -> NoReturn:
    """Refuse a payload.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest(f"{where}: {says}", param="features.kwargs_data")
