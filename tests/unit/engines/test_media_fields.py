"""Fields of media against each other and against the placeholder."""

from typing import Any

import numpy as np
import pytest

from rollplane.engines.media_fields import Field, check_grids, check_pixels, check_shape
from rollplane.errors import InvalidRequest
from rollplane.protocol.features import MediaItem


def item(length: int, is_embed: list[bool] | None = None) -> MediaItem:
    mask = None if is_embed is None else np.array(is_embed)
    return MediaItem(modality="image", producer_hash="h", offset=0, length=length, is_embed=mask)


def fields(grid: tuple[int, ...], rows: int) -> dict[str, Field]:
    return {
        "image_grid_thw": Field(dtype="int64", shape=(len(grid),), numbers=grid),
        "pixel_values": Field(dtype="float32", shape=(rows, 1176)),
    }


def test_a_grid_that_fits_passes() -> None:
    check_grids(item(4), fields((1, 4, 4), 16), merge=2, where="w")
    check_grids(item(6, [True, True, False, True, True, False]), fields((1, 4, 4), 16), merge=2, where="w")
    check_grids(item(99), fields((1, 4, 4), 16), merge=None, where="w")


@pytest.mark.parametrize(
    ("length", "grid", "rows", "says"),
    [
        (2, (1, 4, 4), 16, r"takes 2 embeddings, the grid \[1, 4, 4\] makes 4"),
        (4, (1, 4, 4), 15, r"has 16 patches, pixel_values has 15 rows"),
        (4, (1, 3, 4), 12, "not divisible by the model's merge size 2"),
        (4, (1, 0, 4), 16, "three sizes above 0"),
        (4, (4, 4), 16, "three sizes above 0"),
    ],
)
def test_a_grid_that_does_not_is_refused(length: int, grid: tuple[int, ...], rows: int, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_grids(item(length), fields(grid, rows), merge=2, where="w")


@pytest.mark.parametrize(
    ("dtype", "takes_uint8", "flag"),
    [("float32", True, "--no-mm-device-do-normalize"), ("uint8", False, "--mm-device-do-normalize")],
)
def test_pixels_of_the_other_kind_are_refused_naming_the_flag(dtype: str, takes_uint8: bool, flag: str) -> None:
    with pytest.raises(InvalidRequest, match=f"dtype {dtype}.* {flag} takes the other kind; see there"):
        check_pixels("pixel_values", dtype, takes_uint8=takes_uint8, where="w", hint="see there")
    check_pixels("pixel_values", dtype, takes_uint8=not takes_uint8, where="w")


@pytest.mark.parametrize("shape", [(16,), (16, 1175), (0, 1176), (1, 16, 1176)])
def test_shapes_are_the_models(shape: Any) -> None:
    check_shape("pixel_values", (16, 1176), dims=2, tail=(1176,), where="w")
    with pytest.raises(InvalidRequest, match="pixel_values has shape"):
        check_shape("pixel_values", shape, dims=2, tail=(1176,), where="w")
