"""Features held to a model's sample, without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollplane.engines.vllm.features import FieldSample, MediaModel, check_item
from rollplane.errors import InvalidRequest
from rollplane.protocol.features import MediaItem

SAMPLE = {
    "pixel_values": FieldSample(dtype="float32", dims=2, tail=(1176,)),
    "image_grid_thw": FieldSample(dtype="int64", dims=1, tail=()),
}
MODEL = MediaModel(samples={"image": SAMPLE}, merge=2)
ITEM = MediaItem(modality="image", producer_hash="h", offset=0, length=4)


def check(grid: Any) -> None:
    fields = {"pixel_values": torch.ones(16, 1176), "image_grid_thw": grid}
    check_item(ITEM, {name: SimpleNamespace(data=data) for name, data in fields.items()}, model=MODEL, where="w")


def test_the_models_own_fields_are_taken() -> None:
    check(torch.tensor([1, 4, 4]))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 4.0])
def test_a_grid_of_floats_is_refused_whatever_they_are(number: float) -> None:
    with pytest.raises(InvalidRequest, match="image_grid_thw has dtype float32, the model takes int64"):
        check(torch.tensor([1.0, 4.0, number]))


@pytest.mark.parametrize("grid", [[1, 4, 4], [[1], [4, 4]], 4])
def test_a_grid_that_is_no_tensor_is_refused(grid: Any) -> None:
    with pytest.raises(InvalidRequest, match="image_grid_thw has dtype"):
        check(grid)
