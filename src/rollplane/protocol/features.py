"""Preprocessed multimodal features: what a renderer already did to images, video and audio.

On the wire an envelope of parallel maps (`mm_hashes`, `mm_placeholders`, `kwargs_data`, `mm_metadata?`); in here a list
of items in prompt order. The producer's hashes are kept for the record and never trusted as identity: identity comes
from the decoded content (`rollplane.identity.media_identity`).
"""

import itertools
from typing import Any, Final

import msgspec
import numpy as np
import pybase64

from rollplane.errors import InvalidRequest, PayloadTooLarge
from rollplane.protocol.arrays import BoolArray
from rollplane.protocol.sampling import invalid_from_msgspec

MODALITIES: Final = ("image", "video", "audio")
DEFAULT_MAX_FEATURE_BYTES: Final = 16 * 2**20


class MediaItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One processed image, video or audio clip.

    `offset` and `length` are prompt positions; `is_embed` bool [length] marks the positions that take an embedding
    (None: all of them); `kwargs` the msgpack bytes of vLLM's `MultiModalKwargsItem` (None: the engine's cache has it);
    `mm_hash` the content identity, 64 hex digits, None until computed.
    """

    modality: str
    producer_hash: str
    offset: int
    length: int
    is_embed: BoolArray | None = None
    kwargs: bytes | None = None
    metadata: bytes | None = None
    mm_hash: str | None = None


class _Placeholder(msgspec.Struct, forbid_unknown_fields=True):
    offset: int
    length: int
    is_embed: list[bool] | None = None


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Placeholder]]
    kwargs_data: dict[str, list[str | None]] | None = None
    mm_metadata: dict[str, list[str | None]] | None = None


_payload_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


def parse_features(
    obj: Any, *, prompt_tokens: int, max_bytes: int = DEFAULT_MAX_FEATURE_BYTES, root: str = "features"
) -> list[MediaItem]:
    """The envelope's items in prompt order, every payload decoded.

    Args:
        obj: the decoded JSON or msgpack object.
        prompt_tokens: length of the prompt the ranges point into.
        max_bytes: limit on the decoded payloads together.

    Raises:
        InvalidRequest: an incomplete or contradictory envelope; never treated as "no media".
        PayloadTooLarge: the decoded payloads are over `max_bytes`.
    """
    try:
        envelope = msgspec.convert(obj, _Envelope, strict=True)
    except msgspec.ValidationError as error:
        raise invalid_from_msgspec(error, root=root) from None
    except RecursionError:
        raise InvalidRequest(f"{root} is nested too deeply", param=root) from None
    _check_shape(envelope, root=root)
    items: list[MediaItem] = []
    total = 0
    for modality, hashes in envelope.mm_hashes.items():
        kwargs_list = (envelope.kwargs_data or {}).get(modality) or [None] * len(hashes)
        metadata_list = (envelope.mm_metadata or {}).get(modality) or [None] * len(hashes)
        for i, producer_hash in enumerate(hashes):
            where = f"{root}.mm_placeholders.{modality}[{i}]"
            place = envelope.mm_placeholders[modality][i]
            kwargs = _decode(kwargs_list[i], param=f"{root}.kwargs_data.{modality}[{i}]")
            metadata = _decode(metadata_list[i], param=f"{root}.mm_metadata.{modality}[{i}]")
            total += len(kwargs or b"") + len(metadata or b"")
            if kwargs is not None:
                _check_payload(kwargs, param=f"{root}.kwargs_data.{modality}[{i}]")
            if total > max_bytes:
                raise PayloadTooLarge(
                    f"{root}: the decoded payloads are over the limit of {max_bytes} bytes", param=root
                )
            if not producer_hash:
                raise InvalidRequest(
                    f"{root}.mm_hashes.{modality}[{i}] is empty", param=f"{root}.mm_hashes.{modality}[{i}]"
                )
            _check_range(place, prompt_tokens=prompt_tokens, where=where)
            items.append(
                MediaItem(
                    modality=modality,
                    producer_hash=producer_hash,
                    offset=place.offset,
                    length=place.length,
                    is_embed=None if place.is_embed is None else np.array(place.is_embed, dtype=np.bool_),
                    kwargs=kwargs,
                    metadata=metadata,
                )
            )
    items.sort(key=lambda item: item.offset)
    _check_overlap(items, root=root)
    return items


def check_items(items: list[MediaItem], *, prompt_tokens: int, root: str = "features") -> None:
    """Hold items that came over the internal hop to what `parse_features` promises of them.

    Raises:
        InvalidRequest: an unknown modality, a range outside the prompt, a mask of another length, or an overlap.
    """
    if not items:
        raise InvalidRequest(f"{root} has no items; leave {root} out for text", param=root)
    for i, item in enumerate(items):
        if item.modality not in MODALITIES:
            raise InvalidRequest(f"{root}[{i}].modality is {item.modality!r}", param=f"{root}[{i}].modality")
        if item.is_embed is not None and item.is_embed.ndim != 1:
            raise InvalidRequest(f"{root}[{i}].is_embed has {item.is_embed.ndim} dimensions", param=f"{root}[{i}]")
        _check_range(item, prompt_tokens=prompt_tokens, where=f"{root}[{i}]")
    _check_overlap(items, root=root)


def _check_overlap(items: list[MediaItem], *, root: str) -> None:
    for before, after in itertools.pairwise(items):
        if before.offset + before.length > after.offset:
            raise InvalidRequest(
                f"{root}.mm_placeholders overlap: [{before.offset}, {before.offset + before.length}) and "
                f"[{after.offset}, {after.offset + after.length})",
                param=f"{root}.mm_placeholders",
            )


def _check_shape(envelope: _Envelope, *, root: str) -> None:
    names = set(envelope.mm_hashes)
    if not names:
        raise InvalidRequest(
            f"{root}.mm_hashes names no modality; leave {root} out for text", param=f"{root}.mm_hashes"
        )
    unknown = sorted(names - set(MODALITIES))
    if unknown:
        raise InvalidRequest(
            f"{root}.mm_hashes.{unknown[0]} is not a modality; known: {', '.join(MODALITIES)}",
            param=f"{root}.mm_hashes.{unknown[0]}",
        )
    maps: list[tuple[str, dict[str, list[Any]] | None]] = [
        ("mm_placeholders", dict(envelope.mm_placeholders)),
        ("kwargs_data", dict(envelope.kwargs_data) if envelope.kwargs_data is not None else None),
        ("mm_metadata", dict(envelope.mm_metadata) if envelope.mm_metadata is not None else None),
    ]
    for name, values in maps:
        if values is None:
            continue
        if set(values) != names:
            raise InvalidRequest(
                f"{root}.{name} has the modalities {sorted(values)}, mm_hashes has {sorted(names)}",
                param=f"{root}.{name}",
            )
        for modality, entries in values.items():
            if len(entries) != len(envelope.mm_hashes[modality]):
                raise InvalidRequest(
                    f"{root}.{name}.{modality} has {len(entries)} items, mm_hashes has "
                    f"{len(envelope.mm_hashes[modality])}",
                    param=f"{root}.{name}.{modality}",
                )
    for modality, hashes in envelope.mm_hashes.items():
        if not hashes:
            raise InvalidRequest(f"{root}.mm_hashes.{modality} is empty", param=f"{root}.mm_hashes.{modality}")


def _check_range(place: _Placeholder | MediaItem, *, prompt_tokens: int, where: str) -> None:
    if place.offset < 0:
        raise InvalidRequest(f"{where}.offset must be >= 0, got {place.offset}", param=f"{where}.offset")
    if place.length <= 0:
        raise InvalidRequest(f"{where}.length must be > 0, got {place.length}", param=f"{where}.length")
    if place.offset + place.length > prompt_tokens:
        raise InvalidRequest(
            f"{where}: [{place.offset}, {place.offset + place.length}) ends past the prompt of {prompt_tokens} tokens",
            param=where,
        )
    if place.is_embed is not None:
        if len(place.is_embed) != place.length:
            raise InvalidRequest(
                f"{where}.is_embed has {len(place.is_embed)} entries for a placeholder of {place.length}",
                param=f"{where}.is_embed",
            )
        if not np.any(place.is_embed):
            raise InvalidRequest(f"{where}.is_embed marks no position", param=f"{where}.is_embed")


def _check_payload(kwargs: bytes, *, param: str) -> None:
    """A payload is one msgpack map, field name to field; what the fields hold is the engine's to read."""
    try:
        _payload_decoder.decode(kwargs)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param} does not decode as a msgpack map: {error}", param=param) from None


def _decode(text: str | None, *, param: str) -> bytes | None:
    if text is None:
        return None
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{param} is not base64: {error}", param=param) from None
    if not data:
        raise InvalidRequest(f"{param} is empty", param=param)
    return data


def features_envelope(items: list[MediaItem]) -> dict[str, Any]:
    """The wire envelope of items: the inverse of `parse_features` for complete items."""
    out: dict[str, Any] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    metadata: dict[str, list[str | None]] = {}
    for item in items:
        place: dict[str, Any] = {"offset": item.offset, "length": item.length}
        if item.is_embed is not None:
            place["is_embed"] = item.is_embed.tolist()
        out["mm_hashes"].setdefault(item.modality, []).append(item.producer_hash)
        out["mm_placeholders"].setdefault(item.modality, []).append(place)
        out["kwargs_data"].setdefault(item.modality, []).append(_encode(item.kwargs))
        metadata.setdefault(item.modality, []).append(_encode(item.metadata))
    if any(entry is not None for entries in metadata.values() for entry in entries):
        out["mm_metadata"] = metadata
    return out


def _encode(data: bytes | None) -> str | None:
    return None if data is None else pybase64.b64encode_as_string(data)
