"""Checkpoints on disk against the one the engine was loaded from: names, shapes and dtypes, before vLLM sees them.

vLLM's reload checks too little: a checkpoint that lacks a part of a fused tensor loads without an error and serves
garbage. One that has exactly the tensors of the loaded one cannot. Reads safetensors headers and bytes only, no torch.
"""

import hashlib
import json
import mmap
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from rollplane.engines.checkpoint_files import check_names
from rollplane.engines.float_bits import all_finite
from rollplane.errors import InvalidRequest, NotFound

_FLOATS: Final = frozenset({"F32", "F16", "BF16"})
"""Dtypes that vLLM converts among when it copies a tensor into a parameter."""

_TORCH_NAMES: Final = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's names of safetensors dtypes."""
SAFETENSORS_NAMES: Final = {torch_name: name for name, torch_name in _TORCH_NAMES.items()}

_HEADER_LIMIT_BYTES: Final = 100 * 2**20
_CHUNK_BYTES: Final = 1 << 24
_NAMED: Final = 8
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


class Tensor(msgspec.Struct, frozen=True):
    """One tensor in a file: safetensors dtype name, shape, and its bytes' place in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint directory: its tensors by name and its files as they were found (`stamp`)."""

    path: str
    tensors: dict[str, Tensor]
    stamps: list[list[Any]]

    def without(self, names: Iterable[str]) -> "Checkpoint":
        """The same files with some of their tensors left out."""
        out = frozenset(names)
        return msgspec.structs.replace(self, tensors={name: t for name, t in self.tensors.items() if name not in out})

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.end - tensor.begin for tensor in self.tensors.values())


def read_checkpoint(path: str) -> Checkpoint:
    """The headers of a directory's safetensors files. Blocking.

    Raises:
        NotFound: no such directory, or no safetensors files in it.
        InvalidRequest: a damaged file, or one tensor in two files.
    """
    root = Path(path)
    if not root.is_dir():
        raise NotFound(f"{path} is not a directory", param="model_path")
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise NotFound(f"{path} has no *.safetensors files", param="model_path")
    tensors: dict[str, Tensor] = {}
    stamps = [stamp(file) for file in files]
    for file in files:
        for name, tensor in _header(file).items():
            if name in tensors:
                raise InvalidRequest(f"tensor {name} is in two files of {path}", param="model_path")
            tensors[name] = tensor
    return Checkpoint(path=path, tensors=tensors, stamps=stamps)


def stamp(file: Path) -> list[Any]:
    """What tells a file from a later one of its name: name, size, time of change in nanoseconds, inode."""
    found = file.stat()
    return [file.name, found.st_size, found.st_mtime_ns, found.st_ino]


def changed_files(path: str, stamps: list[list[Any]]) -> str | None:
    """Why the files at `path` are not the stamped ones any more; None where they are."""
    for wanted in stamps:
        try:
            found = stamp(Path(path) / str(wanted[0]))
        except OSError as error:
            return f"{wanted[0]} cannot be read any more: {error}"
        if found != list(wanted):
            return f"{wanted[0]} changed after it was checked"
    return None


def unexpected_tensors(checkpoint: Checkpoint, loaded: Checkpoint, *, tied: bool) -> list[str]:
    """The names in a checkpoint that the loaded one does not have, sorted; see `check_like` for `tied`."""
    return sorted(set(checkpoint.tensors) - set(loaded.tensors) - ({"lm_head.weight"} if tied else set()))


def check_like(checkpoint: Checkpoint, loaded: Checkpoint, *, tied: bool, param: str = "model_path") -> None:
    """Hold a checkpoint to the tensors of the one the engine was loaded from.

    Args:
        param: the field that errors name.
        tied: the model ties its output embedding to its input embedding, so that `lm_head.weight` may be there or not.

    Raises:
        InvalidRequest: unexpected or missing tensors, other shapes or kinds of dtype; by name.
    """
    optional = {"lm_head.weight"} if tied else set()
    check_names(
        missing=sorted(set(loaded.tensors) - set(checkpoint.tensors) - optional),
        unexpected=unexpected_tensors(checkpoint, loaded, tied=tied),
        param=param,
    )
    for name, tensor in checkpoint.tensors.items():
        wanted = loaded.tensors.get(name)
        if wanted is None:
            continue
        if tensor.shape != wanted.shape:
            raise InvalidRequest(
                f"tensor {name} has shape {list(tensor.shape)}, the model's has {list(wanted.shape)}",
                param=param,
            )
        if tensor.dtype != wanted.dtype and not {tensor.dtype, wanted.dtype} <= _FLOATS:
            raise InvalidRequest(f"tensor {name} has dtype {tensor.dtype}, the model's has {wanted.dtype}", param=param)


def check_values(checkpoint: Checkpoint, *, tied: bool, param: str = "model_path") -> None:
    """Whether every value is finite, and an output embedding that the model ties equals the input one. Blocking.

    A policy that diverged would make no usable token: every answer would fail on its log-probabilities.

    Raises:
        InvalidRequest: naming the tensors that are not.
    """
    with _Maps(checkpoint) as maps:
        broken = sorted(name for name, tensor in checkpoint.tensors.items() if not _finite(maps, tensor))
        if broken:
            raise InvalidRequest(f"values that are not finite are in {_list(broken)}", param=param)
        head = checkpoint.tensors.get("lm_head.weight")
        inputs = next((t for n, t in checkpoint.tensors.items() if _is_input_embedding(n, t)), None)
        if (
            tied
            and head is not None
            and inputs is not None
            and (head.dtype != inputs.dtype or not maps.same(head, inputs))
        ):
            raise InvalidRequest(
                "lm_head.weight differs from the input embedding, but this model ties them", param=param
            )


def check_adapter_fits(shapes: dict[str, list[int]], loaded: Checkpoint) -> None:
    """Hold an adapter's factors to the modules they change, where the checkpoint names those modules alike.

    A factor of `layers.0.elsewhere.k_proj`, where the checkpoint's `k_proj` are all of `self_attn`, would be loaded and change
    nothing. Modules whose last name the checkpoint does not have are left to vLLM, which may know them by another.

    Raises:
        InvalidRequest: a factor of no module of this model, or whose width is not its module's; by name.
    """
    changed = {name: name.replace(".lora_A.", ".").replace(".lora_B.", ".") for name in shapes}
    bases = {name: loaded.tensors.get(weight.removeprefix("base_model.model.")) for name, weight in changed.items()}
    _check_places([name for name, base in bases.items() if base is None], changed, loaded)
    for name, shape in shapes.items():
        a_side, base = ".lora_A." in name, bases[name]
        if base is None or len(base.shape) != 2 or len(shape) != 2 or (not a_side and ".lora_B." not in name):
            continue
        wanted, found = (base.shape[1], shape[1]) if a_side else (base.shape[0], shape[0])
        if wanted != found:
            raise InvalidRequest(
                f"adapter tensor {name} has shape {shape}, its module's weight has {list(base.shape)}",
                param="lora_path",
            )


def _check_places(names: list[str], changed: dict[str, str], loaded: Checkpoint) -> None:
    """Factors whose weights the checkpoint does not name alike: whether it has such a module anywhere."""
    if not names:
        return
    places = {_place(name) for name in loaded.tensors}
    last = {place.rsplit(".", 2)[-2] for place in places if "." in place}
    for name in names:
        place = _place(changed[name])
        if place not in places and "." in place and place.rsplit(".", 2)[-2] in last:
            raise InvalidRequest(f"adapter tensor {name} is of no module of this model", param="lora_path")


def _place(name: str) -> str:
    """A tensor's name after its last number: `self_attn.k_proj.weight`, whatever the layer and what stands before it."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts[-2:])


def embedding_rows(loaded: Checkpoint) -> int | None:
    """Rows of the input embedding, which token ids must stay below; None where no tensor has a name that says so."""
    for name, tensor in loaded.tensors.items():
        if _is_input_embedding(name, tensor):
            return tensor.shape[0]
    return None


def _is_input_embedding(name: str, tensor: Tensor) -> bool:
    return name.endswith(_EMBEDDINGS) and len(tensor.shape) == 2 and "visual" not in name and "vision" not in name


def content_digest(checkpoint: Checkpoint) -> str:
    """sha256 over (name, dtype, shape, bytes) of every tensor in the order of names; 64 hex digits. Blocking.

    It does not depend on how a checkpoint is cut into files, and is `engines.tensors.content_digest` of the same tensors:
    a trainer that sends them and a worker that read them from disk know them by one name.
    """
    digest = hashlib.sha256()
    with _Maps(checkpoint) as maps:
        for name in sorted(checkpoint.tensors):
            tensor = checkpoint.tensors[name]
            dtype = f"torch.{_TORCH_NAMES.get(tensor.dtype, tensor.dtype)}"
            head = f"{name}\0{dtype}\0{','.join(map(str, tensor.shape))}".encode()
            digest.update(struct.pack(">Q", len(head)) + head + struct.pack(">Q", tensor.end - tensor.begin))
            for chunk in maps.chunks(tensor):
                digest.update(chunk)
    return digest.hexdigest()


class _Maps:
    """The files of a checkpoint, mapped into memory while the block lasts; errors of reading are InvalidRequest."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._maps: dict[str, mmap.mmap] = {}

    def __enter__(self) -> "_Maps":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for each in self._maps.values():
            each.close()
        if isinstance(error, OSError):
            raise InvalidRequest(f"{self._checkpoint.path} cannot be read: {error}", param="model_path") from None

    def chunks(self, tensor: Tensor) -> Iterator[memoryview]:
        """The bytes of a tensor, at most `_CHUNK_BYTES` at a time; each is valid until the next."""
        if tensor.file not in self._maps:
            with (Path(self._checkpoint.path) / tensor.file).open("rb") as file:
                self._maps[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with memoryview(self._maps[tensor.file]) as view:
            for at in range(tensor.begin, tensor.end, _CHUNK_BYTES):
                with view[at : min(at + _CHUNK_BYTES, tensor.end)] as chunk:
                    yield chunk

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors have the same bytes."""
        return one.end - one.begin == other.end - other.begin and all(
            a == b for a, b in zip(self.chunks(one), self.chunks(other), strict=True)
        )


def _finite(maps: _Maps, tensor: Tensor) -> bool:
    return all(all_finite(chunk, tensor.dtype) for chunk in maps.chunks(tensor))


def _header(file: Path) -> dict[str, Tensor]:
    """The tensors a safetensors file says it has; places count from the file's begin."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            lead = stream.read(8)
            length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else -1
            if not 0 < length <= min(size - 8, _HEADER_LIMIT_BYTES):
                raise ValueError("no header")
            entries = json.loads(stream.read(length))
        base = 8 + length
        found = {
            name: Tensor(
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                file=file.name,
                begin=base + entry["data_offsets"][0],
                end=base + entry["data_offsets"][1],
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InvalidRequest(f"{file} is not a readable safetensors file: {error}", param="model_path") from None
    for name, tensor in found.items():
        if not base <= tensor.begin <= tensor.end <= size:
            raise InvalidRequest(
                f"{file.name}: tensor {name} ends past the file (is it still being written?)", param="model_path"
            )
    return found


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
