"""What the model's own directory says, where the sidecar can read it: the server's services do not say it."""

import math
from pathlib import Path
from typing import Any, Final

import msgspec

from rollplane.errors import InvalidRequest

_UNSENDABLE_DEFAULTS: Final = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""On the wire 0 means the server's default, so a default from the generation config cannot be overridden by 0."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`vocab_size`: rows of the input embedding. `modalities`: media the architecture takes.

    `stubborn_defaults`: sampling defaults of the generation config that the wire cannot override. `architectures`: classes
    of the model. `merge`: image patches per side that one embedding covers. `patch_numbers`: numbers in one patch of pixels.
    """

    vocab_size: int | None = None
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    modalities: list[str] = msgspec.field(default_factory=list)
    stubborn_defaults: dict[str, float] = msgspec.field(default_factory=dict)
    architectures: list[str] = msgspec.field(default_factory=list)
    merge: int | None = None
    patch_numbers: int | None = None


def read_model_facts(model: str) -> ModelFacts | None:
    """The facts in a model directory; None where `model` is none that can be read here. Blocking.

    Raises:
        InvalidRequest: a file of it is not what it should be.
    """
    root = Path(model)
    if not (root / "config.json").is_file():
        return None
    config = _read(root / "config.json")
    generation = _read(root / "generation_config.json") if (root / "generation_config.json").is_file() else {}
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    vision = config.get("vision_config")
    merge, patch = _patches(vision if isinstance(vision, dict) else {})
    architectures = config.get("architectures")
    return ModelFacts(
        vocab_size=size if type(size) is int and size > 0 else None,
        eos_token_ids=[each for each in (eos if isinstance(eos, list) else [eos]) if type(each) is int],
        modalities=_modalities(config),
        stubborn_defaults={
            name: float(generation[name])
            for name, neutral in _UNSENDABLE_DEFAULTS.items()
            if isinstance(generation.get(name), (int, float)) and generation[name] != neutral
        },
        architectures=[each for each in architectures if isinstance(each, str)]
        if isinstance(architectures, list)
        else [],
        merge=merge,
        patch_numbers=patch,
    )


def _patches(vision: dict[str, Any]) -> tuple[int | None, int | None]:
    """Merge size and numbers per patch of a vision tower that says all of what they follow from."""
    merge = vision.get("spatial_merge_size")
    channels = vision.get("in_channels", vision.get("in_chans"))
    sizes = [channels, vision.get("temporal_patch_size"), vision.get("patch_size"), vision.get("patch_size")]
    known = [size for size in sizes if type(size) is int and size > 0]
    return (
        merge if type(merge) is int and merge > 0 else None,
        math.prod(known) if len(known) == len(sizes) else None,
    )


def _modalities(config: dict[str, Any]) -> list[str]:
    found = []
    if "vision_config" in config or "image_token_id" in config:
        found.append("image")
    if "video_token_id" in config:
        found.append("video")
    if "audio_config" in config or "audio_token_id" in config:
        found.append("audio")
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}") from None
