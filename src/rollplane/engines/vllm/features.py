"""Preprocessed features as vLLM's multimodal input, held to what the model's own processor makes.

vLLM checks little of them: kwargs of another shape end its engine or read beside a tensor, and its encoder cache goes by
the hash alone. So each item is compared with a sample that the engine's own processor made at start (field names, dtypes,
ranks), its grid with its pixels and its placeholder, and its identity is the hash of its content.
"""

import math
from typing import Any

import msgspec
import numpy as np

from rollplane.errors import InvalidRequest
from rollplane.identity import media_identity
from rollplane.protocol.features import MODALITIES, MediaItem


class FieldSample(msgspec.Struct, frozen=True):
    """One field as the model's processor makes it: torch dtype name, number of dimensions, sizes after the first."""

    dtype: str
    dims: int
    tail: tuple[int, ...]


Samples = dict[str, dict[str, FieldSample]]
"""Modality -> field -> sample."""


class MediaModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a multimodal model takes. `merge`: patches per side that one embedding covers, None where it does not say."""

    samples: Samples
    merge: int | None = None
    normalises_on_device: bool = False


def sample_model(engine: Any, media: Any) -> MediaModel:
    """Let the model's own processor make one item per modality and note its fields. Blocking.

    A modality whose sample cannot be made is left out: its features are refused.
    """
    config = engine.vllm_config.model_config
    processor = media.registry.create_processor(config, tokenizer=engine.tokenizer)
    limits = processor.info.get_supported_mm_limits()
    samples: Samples = {}
    for modality in MODALITIES:
        allowed = config.get_multimodal_config().get_limit_per_prompt(modality) if modality in limits else 0
        if not allowed:
            continue
        made = processor.get_dummy_mm_inputs({modality: 1})
        items = made["mm_kwargs"].get(modality) or []
        if items and items[0] is not None:
            samples[modality] = {name: _sample(elem.data) for name, elem in items[0].items()}
    vision = getattr(config.hf_config, "vision_config", None)
    return MediaModel(
        samples=samples,
        merge=getattr(vision, "spatial_merge_size", None),
        normalises_on_device=bool(getattr(config.get_multimodal_config(), "mm_device_do_normalize", False)),
    )


def _sample(data: Any) -> FieldSample:
    shape = tuple(int(n) for n in getattr(data, "shape", ()))
    return FieldSample(dtype=_dtype(data), dims=len(shape), tail=shape[1:])


def _dtype(data: Any) -> str:
    return str(getattr(data, "dtype", type(data).__name__)).removeprefix("torch.")


def engine_input(
    token_ids: list[int], items: list[MediaItem], *, salt: str | None, model: MediaModel, media: Any, mm_input: Any
) -> Any:
    """vLLM's multimodal input for items that carry their payloads. Decodes them: some milliseconds, call it in a thread.

    Raises:
        InvalidRequest: a payload that does not decode, or is not what this model takes.
    """
    kwargs: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[Any]] = {}
    for i, item in enumerate(items):
        where = f"features item {i} ({item.modality})"
        elem = decode_item(item, media=media, where=where)
        check_item(item, elem, model=model, where=where)
        kwargs.setdefault(item.modality, []).append(elem)
        hashes.setdefault(item.modality, []).append(item.mm_hash or media_identity(item.modality, item.kwargs or b""))
        places.setdefault(item.modality, []).append(
            media.PlaceholderRange(offset=item.offset, length=item.length, is_embed=_embed_mask(item))
        )
    return mm_input(
        prompt_token_ids=token_ids,
        mm_kwargs=media.KwargsItems(kwargs),
        mm_hashes=hashes,
        mm_placeholders=places,
        cache_salt=salt,
    )


def decode_item(item: MediaItem, *, media: Any, where: str) -> Any:
    """vLLM's `MultiModalKwargsItem` in a payload.

    Raises:
        InvalidRequest: it does not decode.
    """
    try:
        decoded = media.decode_item(item.kwargs)
        if not decoded or not all(hasattr(elem, "data") for elem in decoded.values()):
            raise ValueError("no fields")
    except Exception as error:  # a decoder of foreign bytes: whatever it raises, the bytes are refused
        raise InvalidRequest(
            f"{where}: kwargs_data is not a MultiModalKwargsItem: {type(error).__name__}", param="features.kwargs_data"
        ) from error
    return decoded


def check_item(item: MediaItem, fields: Any, *, model: MediaModel, where: str) -> None:
    """Hold one item's fields to the model's sample, its grid to its pixels, its placeholder to its grid.

    Raises:
        InvalidRequest: naming the field, what it is and what it must be.
    """
    if item.modality not in model.samples:
        _refuse(where, f"the model takes no {item.modality} features")
    sample = model.samples[item.modality]
    if set(fields) != set(sample):
        _refuse(where, f"the fields are {sorted(fields)}, the model's are {sorted(sample)}")
    for name, wanted in sample.items():
        _check_field(name, fields[name].data, wanted, model=model, where=where)
    for name, elem in fields.items():
        if name.endswith("grid_thw"):
            _check_grid(item, elem.data, fields, name=name, merge=model.merge, where=where)


def _check_field(name: str, data: Any, wanted: FieldSample, *, model: MediaModel, where: str) -> None:
    found = _dtype(data)
    if found != wanted.dtype:
        if name.startswith("pixel_values") and "uint8" in (found, wanted.dtype):
            has = (
                "normalises pixels itself and takes uint8" if model.normalises_on_device else "takes normalised floats"
            )
            flag = "--no-mm-device-do-normalize" if model.normalises_on_device else "--mm-device-do-normalize"
            _refuse(
                where, f"{name} has dtype {found}, this engine {has}; the vLLM argument {flag} takes the other kind"
            )
        if not (_is_float(found) and _is_float(wanted.dtype)):
            _refuse(where, f"{name} has dtype {found}, the model takes {wanted.dtype}")
    shape = tuple(int(n) for n in getattr(data, "shape", ()))
    if len(shape) != wanted.dims:
        _refuse(where, f"{name} has shape {list(shape)}, the model takes {wanted.dims} dimensions")
    if 0 in shape:
        _refuse(where, f"{name} has shape {list(shape)}, which holds nothing")
    if wanted.dims == 2 and shape[1:] != wanted.tail:
        _refuse(where, f"{name} has shape {list(shape)}, the model takes [.., {wanted.tail[0]}]")
    if _is_float(found) and not bool(data.isfinite().all()):
        _refuse(where, f"{name} holds values that are not finite")


def _is_float(dtype: str) -> bool:
    return dtype in ("float32", "float16", "bfloat16")


def _check_grid(item: MediaItem, grid: Any, fields: Any, *, name: str, merge: int | None, where: str) -> None:
    """A grid of (time, height, width) patches: as many as the pixels have rows, and `merge`^2 of them per placeholder."""
    sizes = [int(n) for n in grid.reshape(-1).tolist()]
    if len(sizes) != 3 or min(sizes) < 1:
        _refuse(where, f"{name} is {sizes[:8]}, must be three sizes above 0")
    patches = math.prod(sizes)
    pixels = next((k for k in fields if k.startswith("pixel_values")), None)
    if pixels is not None and int(fields[pixels].data.shape[0]) != patches:
        _refuse(where, f"{name} {sizes} has {patches} patches, {pixels} has {int(fields[pixels].data.shape[0])} rows")
    if merge is None:
        return
    if sizes[1] % merge or sizes[2] % merge:
        _refuse(where, f"{name} {sizes} is not divisible by the model's merge size {merge}")
    embeds = item.length if item.is_embed is None else int(np.count_nonzero(item.is_embed))
    if embeds != patches // merge**2:
        raise InvalidRequest(
            f"{where}: the placeholder takes {embeds} embeddings, the grid {sizes} makes {patches // merge**2}",
            param="features.mm_placeholders",
        )


def _embed_mask(item: MediaItem) -> Any:
    if item.is_embed is None:
        return None
    import torch

    return torch.from_numpy(np.array(item.is_embed, dtype=np.bool_))


def _refuse(where: str, says: str) -> None:
    raise InvalidRequest(f"{where}: {says}", param="features.kwargs_data")
