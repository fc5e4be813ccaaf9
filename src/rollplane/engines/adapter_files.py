"""Adapter files before an engine sees them: what kills or confuses an engine is refused here, by name."""

import hashlib
import struct
from pathlib import Path
from typing import Annotated, BinaryIO, Final, Literal

import msgspec
from msgspec import Meta

from rollplane.engines.float_bits import all_finite
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
        InvalidRequest: not LoRA, a rank over `max_rank`, tensors whose shapes contradict the rank, target modules that no
            tensor is of, values that are not finite.
    """
    root = Path(path)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (root / name).is_file():
            raise NotFound(f"adapter file {name} is not at {path}", param="lora_path")
    config = _config(root / CONFIG_NAME)
    ranks = [config.r, *(config.rank_pattern or {}).values()]
    if max(ranks) > max_rank:
        raise InvalidRequest(f"the adapter has rank {max(ranks)}, the limit is {max_rank}", param="lora_path")
    start, entries = _header(root / WEIGHTS_NAME)
    shapes = {name: entry.shape for name, entry in entries.items()}
    _check_shapes(shapes, rank=config.r, has_pattern=bool(config.rank_pattern))
    modules = config.target_modules or []
    if not isinstance(modules, str):
        _check_targets(shapes, modules)
    _check_values(root / WEIGHTS_NAME, start, entries)
    return AdapterFiles(
        path=path,
        digest=_digest(root),
        rank=max(ranks),
        target_modules=[modules] if isinstance(modules, str) else sorted(modules),
        shapes=shapes,
    )


class _Config(msgspec.Struct, frozen=True):
    """What is read of PEFT's config; the engines look at the rest."""

    peft_type: Literal["LORA"]
    r: Annotated[int, Meta(ge=1)]
    rank_pattern: dict[str, Annotated[int, Meta(ge=1)]] | None = None
    target_modules: str | list[str] | None = None


class _Entry(msgspec.Struct, frozen=True):
    """One tensor of a safetensors header; offsets count from the header's end."""

    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def _config(file: Path) -> _Config:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Config)
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise InvalidRequest(f"{CONFIG_NAME}: {error}", param="lora_path") from None


def _header(file: Path) -> tuple[int, dict[str, _Entry]]:
    """Where a safetensors file's values begin, and its tensors: 8 bytes of little-endian length, then JSON."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        lead = stream.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else -1
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise InvalidRequest(f"{WEIGHTS_NAME} is not a safetensors file", param="lora_path")
        try:
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{WEIGHTS_NAME}: the header cannot be read: {error}", param="lora_path") from None
    for name, entry in entries.items():
        start, end = entry.data_offsets
        if end > size - 8 - length:
            raise InvalidRequest(
                f"{WEIGHTS_NAME}: {name} ends past the file (is it still being written?)", param="lora_path"
            )
        if start > end:
            raise InvalidRequest(f"{WEIGHTS_NAME}: {name} ends before it starts", param="lora_path")
    if not entries:
        raise InvalidRequest(f"{WEIGHTS_NAME} holds no tensor", param="lora_path")
    return 8 + length, entries


def _check_values(file: Path, start: int, entries: dict[str, _Entry]) -> None:
    """An adapter that diverged makes no usable token: every answer under its name would fail.

    Tensors of one dtype that lie side by side are looked at together: each look takes the interpreter from an engine that
    steps in this process.
    """
    runs: list[list[str]] = []
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        before = entries[runs[-1][-1]] if runs else None
        if before is not None and (before.dtype, before.data_offsets[1]) == (entry.dtype, entry.data_offsets[0]):
            runs[-1].append(name)
        else:
            runs.append([name])
    with file.open("rb") as stream:
        for names in runs:
            if _finite(stream, start, entries[names[0]], entries[names[-1]]):
                continue
            for name in names:
                if not _finite(stream, start, entries[name], entries[name]):
                    raise InvalidRequest(f"{WEIGHTS_NAME}: {name} holds values that are not finite", param="lora_path")


def _finite(stream: BinaryIO, start: int, first: _Entry, last: _Entry) -> bool:
    """Whether all values are, from a tensor to another of its dtype."""
    begin, end = start + first.data_offsets[0], start + last.data_offsets[1]
    stream.seek(begin)
    chunks = (stream.read(min(_CHUNK_BYTES, end - at)) for at in range(begin, end, _CHUNK_BYTES))
    return all(all_finite(chunk, first.dtype) for chunk in chunks)


def _check_shapes(shapes: dict[str, list[int]], *, rank: int, has_pattern: bool) -> None:
    for name, shape in shapes.items():
        a_side = ".lora_A." in name
        if not a_side and ".lora_B." not in name:
            continue
        if len(shape) != 2:
            raise InvalidRequest(f"{WEIGHTS_NAME}: {name} has shape {shape}, not two dimensions", param="lora_path")
        inner = shape[0] if a_side else shape[-1]
        if not has_pattern and inner != rank:
            raise InvalidRequest(
                f"{WEIGHTS_NAME}: {name} has shape {shape}, which is not of rank {rank}", param="lora_path"
            )
        partner = name.replace(".lora_A.", ".lora_B.") if a_side else name.replace(".lora_B.", ".lora_A.")
        if partner not in shapes:
            raise InvalidRequest(f"{WEIGHTS_NAME}: {name} has no partner {partner}", param="lora_path")


def _check_targets(shapes: dict[str, list[int]], modules: list[str]) -> None:
    """A list that names none of the tensors' modules is of another model: engines would load it and change nothing."""
    adapted = {name.rpartition(".lora_")[0] for name in shapes if ".lora_" in name}
    if not modules or not adapted:
        return
    if not any(f".{module}".endswith(f".{target}") for module in adapted for target in modules):
        raise InvalidRequest(
            f"{CONFIG_NAME}: no tensor is of the target_modules {', '.join(sorted(modules)[:8])}; there is "
            f"{', '.join(sorted(adapted)[:3])}",
            param="lora_path",
        )


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
