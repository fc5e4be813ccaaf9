"""Payloads of features, read without vLLM and held to the model."""

import msgspec
import numpy as np
import pytest
from tests.models.qwen_features import element, image_fields, payload, tensor

from rollplane.engines.grpc.media import MediaModel, check_features, media_model, read_fields
from rollplane.engines.grpc.model_facts import ModelFacts
from rollplane.engines.grpc.settings import GrpcSettings
from rollplane.engines.media_fields import Field
from rollplane.errors import InvalidRequest
from rollplane.protocol.features import MediaItem

QWEN = ModelFacts(architectures=["Qwen2_5_VLForConditionalGeneration"], merge=2, patch_numbers=1176)
TAKES_FLOATS = MediaModel(merge=2, patch_numbers=1176, normalises=False)


def item(kwargs: bytes | None, *, length: int = 4) -> MediaItem:
    return MediaItem(modality="image", producer_hash="h", offset=0, length=length, kwargs=kwargs)


def test_fields_are_read() -> None:
    assert read_fields(payload(**image_fields()), where="w") == {
        "pixel_values": Field(dtype="float32", shape=(16, 1176)),
        "image_grid_thw": Field(dtype="int64", shape=(3,), numbers=(1, 4, 4)),
    }
    several = element([tensor(np.zeros(2, np.float32)), tensor(np.zeros(3, np.float32))])
    assert read_fields(payload(pieces=several, rate=element(1.5)), where="w") == {
        "pieces": Field(dtype="list", shape=(2,)),
        "rate": Field(dtype="float", shape=()),
    }


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        (b"\x80", "holds no fields"),
        (b"\x93\x01\x02\x03", "not a MultiModalKwargsItem"),
        (msgspec.msgpack.encode({"pixel_values": 7}), "not a MultiModalKwargsItem"),
        (payload(x={"data": msgspec.msgpack.Ext(1, b"pickle"), "field": ["batched", {}]}), "extension 1, only 3"),
        (payload(x=element(None)), "x is no tensor"),
        (payload(x=element(["float32", [2], "text"])), "x is no tensor"),
        (payload(x=element(["float32", [-2], msgspec.msgpack.Ext(3, b"")])), "x is no tensor"),
        (payload(x=element(tensor(np.zeros(2, np.complex64)))), "has dtype 'complex64'"),
        (payload(x=element(["float32", [3], msgspec.msgpack.Ext(3, bytes(8))])), "12 bytes, and has 8"),
        (payload(x=element(tensor(np.array([1.0, np.nan], np.float16)))), "not finite"),
        (payload(x=element(tensor(np.array([0x7F80], np.uint16), dtype="bfloat16"))), "not finite"),
        (payload(x=element(float("inf"))), "x is inf"),
        (payload(x=element(tensor(np.zeros(1, np.float32)), kind="__init__")), "kind '__init__'"),
        (payload(image_grid_thw=element(tensor(np.ones(3, np.float32)))), "a grid has whole numbers"),
    ],
)
def test_what_is_no_payload_is_refused(kwargs: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        read_fields(kwargs, where="w")

    assert refused.value.param == "features.kwargs_data"


def test_a_whole_image_passes_and_a_wrong_one_names_its_item() -> None:
    good = item(payload(**image_fields()))
    check_features([good, item(None)], TAKES_FLOATS)
    with pytest.raises(InvalidRequest, match=r"features item 1 \(image\): the placeholder takes 2 embeddings"):
        check_features([good, item(good.kwargs, length=2)], TAKES_FLOATS)
    with pytest.raises(InvalidRequest, match="16 patches, pixel_values has 12 rows"):
        check_features([item(payload(**image_fields(rows=12)))], TAKES_FLOATS)
    with pytest.raises(InvalidRequest, match=r"the model takes \[\.\., 588\]"):
        check_features([good], msgspec.structs.replace(TAKES_FLOATS, patch_numbers=588))
    with pytest.raises(InvalidRequest, match="dtype int32, pixels are"):
        check_features([item(payload(**image_fields(dtype="int32")))], TAKES_FLOATS)


def test_the_servers_default_is_known_by_version_and_architecture() -> None:
    def normalises(facts: ModelFacts | None = QWEN, version: str = "0.31.0", stated: bool | None = None) -> bool | None:
        settings = GrpcSettings(mm_device_do_normalize=stated)
        return media_model(facts, settings, engine_version=version).normalises

    assert normalises() is True
    assert normalises(ModelFacts(architectures=["Qwen3VLForConditionalGeneration"])) is False
    assert normalises(None) is None
    assert normalises(version="0.40.0") is None
    assert normalises(stated=False) is False
    assert normalises(None, stated=True) is True


def test_normalised_pixels_for_a_server_that_normalises_are_refused_until_it_is_stated_otherwise() -> None:
    floats, raw = (item(payload(**image_fields(dtype=dtype))) for dtype in ("float32", "uint8"))
    by_default = media_model(QWEN, GrpcSettings(), engine_version="0.31.0")

    check_features([raw], by_default)
    with pytest.raises(InvalidRequest, match=r"--no-mm-device-do-normalize .*state it \(mm_device_do_normalize\)"):
        check_features([floats], by_default)
    stated = media_model(QWEN, GrpcSettings(mm_device_do_normalize=False), engine_version="0.31.0")
    check_features([floats], stated)
    with pytest.raises(InvalidRequest, match="takes normalised floats"):
        check_features([raw], stated)
    unknown = media_model(None, GrpcSettings(), engine_version="0.31.0")
    for each in (floats, raw):
        with pytest.raises(InvalidRequest, match="is not known: state it"):
            check_features([each], unknown)
