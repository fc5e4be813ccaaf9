"""Checkpoint and adapter directories as the mock reads them: every byte counts, no tensor is understood."""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollplane.engines.checkpoint_files import check_names
from rollplane.errors import InvalidRequest, NotFound
from rollplane.protocol.admin import AllowTensors, StagedWeights

MOCK_WEIGHTS = "mock_weights.json"
"""A JSON object that stands for a checkpoint: its bytes are the weights."""

_MAX_HEADER_BYTES = 100 * 2**20


def read_weights(path: str, *, allow_tensors: Sequence[AllowTensors] = ()) -> StagedWeights:
    """Read a directory of `*.safetensors`, or one with a `mock_weights.json`. Blocking.

    Raises:
        NotFound: no such directory, or neither in it.
        InvalidRequest: a file cannot be read as what its name says, or lists tensors that are not allowed.
    """
    files = _files(path, param="path", wanted=f"*.safetensors or {MOCK_WEIGHTS}", extra=MOCK_WEIGHTS)
    digest, size = _digest(files)
    tensors = 0
    listed: dict[str, list[str]] = {"missing": [], "unexpected": []}
    for file in files:
        if file.suffix == ".safetensors":
            tensors += len(_tensor_names(file))
        else:
            stand_in = _json_object(file)
            for kind in listed:
                listed[kind] = [str(name) for name in stand_in.get(kind, [])]
    ignored = check_names(
        missing=listed["missing"], unexpected=listed["unexpected"], allow_tensors=allow_tensors, param="path"
    )
    return StagedWeights(path=path, digest=digest, tensors=tensors, bytes=size, ignored=ignored, handle=digest)


def read_adapter(path: str, *, max_rank: int) -> str:
    """The content digest of a LoRA adapter directory: `adapter_config.json` and its `*.safetensors`. Blocking.

    Raises:
        NotFound: no such directory, or no adapter in it.
        InvalidRequest: the config is not a JSON object, or its rank is over the limit.
    """
    files = _files(path, param="path", wanted="adapter_config.json", extra="adapter_config.json")
    config = next((file for file in files if file.name == "adapter_config.json"), None)
    if config is None:
        raise NotFound(f"{path} has no adapter_config.json", param="path")
    rank = _json_object(config).get("r", 1)
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise InvalidRequest(f"the adapter's rank is {rank!r}, must be an integer in [1, {max_rank}]", param="path")
    return _digest(files)[0]


def _files(path: str, *, param: str, wanted: str, extra: str) -> list[Path]:
    root = Path(path)
    if not root.is_dir():
        raise NotFound(f"no directory {path}", param=param)
    files = sorted(f for f in root.iterdir() if f.is_file() and (f.suffix == ".safetensors" or f.name == extra))
    if not files:
        raise NotFound(f"{path} has no {wanted}", param=param)
    return files


def _digest(files: list[Path]) -> tuple[str, int]:
    digest, total = hashlib.sha256(), 0
    for file in files:
        size = file.stat().st_size
        name = file.name.encode()
        digest.update(struct.pack(">QQ", len(name), size) + name)
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        total += size
    return digest.hexdigest(), total


def _tensor_names(file: Path) -> list[str]:
    with file.open("rb") as stream:
        head = stream.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(_MAX_HEADER_BYTES, file.stat().st_size - 8):
            raise InvalidRequest(f"{file} is not a safetensors file", param="path")
        try:
            header = msgspec.json.decode(stream.read(length), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{file} is not a safetensors file: {error}", param="path") from None
    return [name for name in header if name != "__metadata__"]


def _json_object(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{file} is not a JSON object: {error}", param="path") from None
