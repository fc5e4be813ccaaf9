"""Adapter files before an engine sees them: what kills or confuses an engine is refused here, by name."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Final

import msgspec

from rollplane.errors import InvalidRequest, NotFound
from rollplane.identity import ADAPTER_DOMAIN

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
_CHUNK_BYTES: Final = 1 << 20
_MAX_HEADER_BYTES: Final = 100 * 2**20


class AdapterFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter directory holds. `digest`: sha256 over names and contents, 64 hex digits. `shapes` by tensor."""

    path: str
    digest: str
    rank: int
    target_modules: list[str]
    shapes: dict[str, list[int]]


def inspect_adapter(path: str, *, max_rank: int) -> AdapterFiles:
    """Read and check an adapter directory (PEFT's layout, safetensors only). Blocking; call it in a thread.

    Raises:
        NotFound: no such directory, or a file of it is not there (yet).
        InvalidRequest: not LoRA, a rank over `max_rank`, tensors whose shapes contradict the rank.
    """
    root = Path(path)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (root / name).is_file():
            raise NotFound(f"adapter file {name} is not at {path}", param="lora_path")
    config = _config(root / CONFIG_NAME)
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        raise InvalidRequest(f"{CONFIG_NAME}: r must be an integer >= 1, got {rank!r}", param="lora_path")
    highest = max([rank, *(v for v in (config.get("rank_pattern") or {}).values() if type(v) is int)])
    if highest > max_rank:
        raise InvalidRequest(f"the adapter has rank {highest}, the limit is {max_rank}", param="lora_path")
    shapes = _shapes(root / WEIGHTS_NAME)
    _check_shapes(shapes, rank=rank, has_pattern=bool(config.get("rank_pattern")))
    modules = config.get("target_modules") or []
    return AdapterFiles(
        path=path,
        digest=_digest(root),
        rank=highest,
        target_modules=[modules] if isinstance(modules, str) else sorted(modules),
        shapes=shapes,
    )


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise InvalidRequest(f"{CONFIG_NAME} cannot be read: {error}", param="lora_path") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise InvalidRequest(f"{CONFIG_NAME}: peft_type must be LORA, got {kind!r}", param="lora_path")
    return config


def _shapes(file: Path) -> dict[str, list[int]]:
    """Names and shapes from a safetensors header: 8 bytes of little-endian length, then JSON."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        lead = stream.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else -1
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise InvalidRequest(f"{WEIGHTS_NAME} is not a safetensors file", param="lora_path")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise InvalidRequest(f"{WEIGHTS_NAME}: the header is not JSON", param="lora_path") from None
    shapes = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets", [0, size]) if isinstance(entry, dict) else [0, size]
        if not isinstance(entry, dict) or offsets[1] > size - 8 - length:
            raise InvalidRequest(
                f"{WEIGHTS_NAME}: {name} ends past the file (is it still being written?)", param="lora_path"
            )
        shapes[name] = list(entry["shape"])
    if not shapes:
        raise InvalidRequest(f"{WEIGHTS_NAME} holds no tensor", param="lora_path")
    return shapes


def _check_shapes(shapes: dict[str, list[int]], *, rank: int, has_pattern: bool) -> None:
    for name, shape in shapes.items():
        a_side = ".lora_A." in name
        if not a_side and ".lora_B." not in name:
            continue
        inner = shape[0] if a_side else shape[-1]
        if not has_pattern and inner != rank:
            raise InvalidRequest(
                f"{WEIGHTS_NAME}: {name} has shape {shape}, which is not of rank {rank}", param="lora_path"
            )
        partner = name.replace(".lora_A.", ".lora_B.") if a_side else name.replace(".lora_B.", ".lora_A.")
        if partner not in shapes:
            raise InvalidRequest(f"{WEIGHTS_NAME}: {name} has no partner {partner}", param="lora_path")


def _digest(root: Path) -> str:
    """The same identity as `identity.adapter_digest`, streamed."""
    digest = hashlib.sha256(ADAPTER_DOMAIN)
    for name in sorted((CONFIG_NAME, WEIGHTS_NAME)):
        encoded = name.encode()
        file = root / name
        digest.update(struct.pack(">Q", len(encoded)) + encoded + struct.pack(">Q", file.stat().st_size))
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
