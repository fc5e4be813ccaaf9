"""Which safetensors files of a directory make up one checkpoint (all of them, or those that its index names), and what
may be said of tensors that are not the model's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from rollplane.errors import InvalidRequest, NotFound
from rollplane.protocol.admin import MISMATCHES_NAMED, AllowTensors, TensorMismatch, mismatch_of

INDEX_NAME: Final = "model.safetensors.index.json"
WHOLE_NAME: Final = "model.safetensors"
MAX_INDEX_BYTES: Final = 256 * 2**20


class _Index(msgspec.Struct, frozen=True):
    """Hugging Face's index of a checkpoint in shards; `weight_map`: tensor name -> file name."""

    weight_map: dict[str, str]


def weight_files(directory: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The checkpoint's files in the order of their names, and where an index says that each tensor is.

    Without an index these are all `*.safetensors` of the directory, and the map is None. With one they are the files
    that it names; others there (a consolidated copy, say) are not the checkpoint's. Blocking.

    Raises:
        NotFound: no such directory, no safetensors in it, or files that the index names are not there (yet).
        InvalidRequest: the index cannot be read, names files elsewhere, or lies beside another whole checkpoint.
    """
    if not directory.is_dir():
        raise NotFound(f"{directory} is not a directory")
    index = directory / INDEX_NAME
    if not index.exists():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise NotFound(f"{directory} has no *.safetensors files")
        return files, None
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    elsewhere = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if elsewhere:
        raise InvalidRequest(f"{index} names {elsewhere[0]!r}, which is no safetensors file of its own directory")
    if WHOLE_NAME not in names and (directory / WHOLE_NAME).exists():
        raise InvalidRequest(f"{directory} has both {WHOLE_NAME} and an index that does not name it: two checkpoints")
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise NotFound(f"{index} names {len(missing)} of {len(names)} files that are not there, such as {missing[0]}")
    return [directory / name for name in names], weight_map


def check_places(found: Mapping[str, str], weight_map: Mapping[str, str], *, directory: Path) -> None:
    """Whether every tensor is in the file that the index says, and none is elsewhere.

    Args:
        found: tensor name -> name of the file that it was read from.
        weight_map: from `weight_files`.
        directory: for the message.

    Raises:
        InvalidRequest: naming a tensor that is not.
    """
    wrong = sorted(name for name in found.keys() | weight_map.keys() if found.get(name) != weight_map.get(name))
    if wrong:
        name = wrong[0]
        raise InvalidRequest(
            f"{directory}: {len(wrong)} tensors are not where the index says; {name} is in {found.get(name, 'no file')},"
            f" the index says {weight_map.get(name, 'nothing of it')}"
        )


def _read_index(index: Path) -> dict[str, str]:
    if not index.is_file():
        raise InvalidRequest(f"{index} is not a regular file")
    size = index.stat().st_size
    if size > MAX_INDEX_BYTES:
        raise InvalidRequest(f"{index} has {size} bytes, the limit is {MAX_INDEX_BYTES}")
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise InvalidRequest(f"{index} is not an index of safetensors files: {error}") from None
    if not weight_map:
        raise InvalidRequest(f"{index} names no tensor")
    return weight_map


def check_names(
    *,
    missing: Sequence[str],
    unexpected: Sequence[str],
    allow_tensors: Sequence[AllowTensors] = (),
    param: str = "model_path",
) -> TensorMismatch | None:
    """What is told of tensors that are not the model's; None where there are none.

    Args:
        param: the field that errors name.

    Raises:
        InvalidRequest: there are some that are not allowed; by name.
    """
    refused = [
        f"{kind} {_some(names)}"
        for kind, names in (("unexpected", unexpected), ("missing", missing))
        if names and kind not in allow_tensors
    ]
    if refused:
        raise InvalidRequest(
            f"the checkpoint's tensors are not this model's: {'; '.join(refused)} (allow_tensors allows a kind)",
            param=param,
        )
    return mismatch_of(missing, unexpected)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MISMATCHES_NAMED} more" if len(names) > MISMATCHES_NAMED else ""
    return ", ".join(names[:MISMATCHES_NAMED]) + more
