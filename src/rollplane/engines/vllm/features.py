"""Preprocessed features as vLLM's multimodal input, held to what the model's own processor makes.

vLLM checks little of them: kwargs of another shape end its engine or read beside a tensor, and its encoder cache goes by
the hash alone. So each item is compared with a sample that the engine's own processor made at start (field names, dtypes,
ranks), its grid with its pixels and its placeholder, and its identity is the hash of its content.
"""

from typing import Any

import msgspec
import numpy as np

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
    return MediaModel(samples=samples, merge=getattr(vision, "spatial_merge_size", None))


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
        refuse(where, f"the model takes no {item.modality} features")
    sample = model.samples[item.modality]
    if set(fields) != set(sample):
        refuse(where, f"the fields are {sorted(fields)}, the model's are {sorted(sample)}")
    found = {name: _field(name, elem.data) for name, elem in fields.items()}
    for name, wanted in sample.items():
        _check_field(name, found[name], wanted, where=where)
        if found[name].dtype in FLOATS and not bool(fields[name].data.isfinite().all()):
            refuse(where, f"{name} holds values that are not finite")
    check_grids(item, found, merge=model.merge, where=where)


def _field(name: str, data: Any) -> Field:
    dtype = _dtype(data)
    whole = dtype.startswith(("int", "uint"))  # a grid of floats may hold what is no number; its dtype is refused below
    numbers = tuple(data.reshape(-1).tolist()) if is_grid(name) and whole and hasattr(data, "reshape") else ()
    return Field(dtype=dtype, shape=tuple(int(n) for n in getattr(data, "shape", ())), numbers=numbers)


def _check_field(name: str, found: Field, wanted: FieldSample, *, where: str) -> None:
    if found.dtype != wanted.dtype:
        if is_pixels(name):
            check_pixels(name, found.dtype, takes_uint8=wanted.dtype == "uint8", where=where)
        if not (found.dtype in FLOATS and wanted.dtype in FLOATS):
            refuse(where, f"{name} has dtype {found.dtype}, the model takes {wanted.dtype}")
    check_shape(name, found.shape, dims=wanted.dims, tail=wanted.tail, where=where)


def _embed_mask(item: MediaItem) -> Any:
    if item.is_embed is None:
        return None
    import torch

    return torch.from_numpy(np.array(item.is_embed, dtype=np.bool_))
