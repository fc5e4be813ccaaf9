"""Checkpoints on disk against the model in memory: checked by name, shape and dtype first, copied in place after.

On disk every expert projection is a tensor of its own; in memory a layer's experts are fused. The layout maps each
tensor on disk to a view of the parameter that holds it, so that copying needs no conversion and no second model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from rollplane.engines.checkpoint_files import check_names, check_places, weight_files
from rollplane.engines.embedded.model import CausalModel
from rollplane.engines.tensors import content_digest
from rollplane.errors import InvalidRequest
from rollplane.protocol.admin import AllowTensors, TensorMismatch

_READABLE = ("float32", "bfloat16", "float16")
"""Floating dtypes that a checkpoint may have; they become the engine's dtype, as when a model is first loaded."""

_NAMED = 8
"""How many offending tensors an error names; it counts the rest."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory that fits the model.

    `tensors` by name on disk; `digest` sha256, 64 hex digits, over every tensor's name, dtype, shape and bytes in the
    order of names, so that it does not depend on how a checkpoint is cut into files.
    """

    path: Path
    tensors: dict[str, Tensor]
    digest: str
    bytes: int
    ignored: TensorMismatch | None = None

    def with_kept(self, kept: Mapping[str, Tensor]) -> "LoadedCheckpoint":
        """The whole policy: this checkpoint's tensors and those that the model keeps."""
        return loaded_checkpoint(self.path, {**self.tensors, **kept}, ignored=self.ignored)


def loaded_checkpoint(
    path: Path, tensors: dict[str, Tensor], *, ignored: TensorMismatch | None = None
) -> LoadedCheckpoint:
    """Checked tensors with their digest and size."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return LoadedCheckpoint(path, tensors, content_digest(tensors), size, ignored)


class CheckpointLayout:
    """Where each tensor of a checkpoint lives in this model.

    `targets` maps a name on disk to a view of a parameter. A tied output embedding may be on disk or not.
    """

    def __init__(self, model: CausalModel) -> None:
        self.targets: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}
        parameters = dict(model.module.named_parameters())
        for name, parameter in parameters.items():
            self._add(name, parameter.data, model)
        if getattr(model.config, "tie_word_embeddings", False):
            embedding = next(n for n in parameters if parameters[n] is model.module.get_input_embeddings().weight)  # type: ignore[operator]
            self.tied["lm_head.weight"] = embedding

    def _add(self, name: str, data: Tensor, model: CausalModel) -> None:
        family = model.family
        if family is None or ".mlp." not in name:
            self.targets[name] = data
            return
        prefix, _, leaf = name.partition(".mlp.")
        block = f"{prefix}.{family.block}"
        if leaf == "experts.gate_up_proj":
            for expert, fused in enumerate(data):
                gate, up = fused.chunk(2, dim=0)
                self.targets[f"{block}.experts.{expert}.{family.gate}.weight"] = gate
                self.targets[f"{block}.experts.{expert}.{family.up}.weight"] = up
        elif leaf == "experts.down_proj":
            for expert, down in enumerate(data):
                self.targets[f"{block}.experts.{expert}.{family.down}.weight"] = down
        else:
            self.targets[f"{block}.{leaf}"] = data

    def read(self, directory: str | Path, *, allow_tensors: Sequence[AllowTensors] = ()) -> LoadedCheckpoint:
        """Read a checkpoint directory into memory and check it; the model is not touched.

        Args:
            allow_tensors: see `WeightReceiver.stage_weights`; what is missing is missing from the result too.

        Raises:
            NotFound: no such directory, no safetensors files in it, or not all that its index names.
            InvalidRequest: a damaged file or index, or tensors that are unexpected, missing, doubled, not where the index
                says, or of another shape or kind.
        """
        directory = Path(directory)
        files, weight_map = weight_files(directory)
        tensors: dict[str, Tensor] = {}
        places: dict[str, str] = {}
        for file in files:
            for name, tensor in read_safetensors(file).items():
                if name in tensors:
                    raise InvalidRequest(f"tensor {name} is in two files of {directory}")
                tensors[name], places[name] = tensor, file.name
        if weight_map is not None:
            check_places(places, weight_map, directory=directory)
        ignored = self.check(tensors, allow_tensors=allow_tensors)
        return loaded_checkpoint(directory, {n: t for n, t in tensors.items() if self._has(n)}, ignored=ignored)

    def missing(self, names: Iterable[str]) -> list[str]:
        """This model's tensors that are not among `names`, sorted."""
        return sorted(set(self.targets) - set(names))

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of what the model has now."""
        return {name: self.targets[name].detach().clone() for name in names}

    def _has(self, name: str) -> bool:
        return name in self.targets or name in self.tied

    def check(
        self, tensors: Mapping[str, Tensor], *, allow_tensors: Sequence[AllowTensors] = ()
    ) -> TensorMismatch | None:
        """Whether these tensors are this model's; what was allowed that is not.

        Raises:
            InvalidRequest: naming the tensors that are not.
        """
        specs = {name: (list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
        ignored = self.check_specs(specs, allow_tensors=allow_tensors)
        self.check_values({name: tensor for name, tensor in tensors.items() if self._has(name)})
        return ignored

    def check_specs(
        self, specs: Mapping[str, tuple[Sequence[int], str]], *, allow_tensors: Sequence[AllowTensors] = ()
    ) -> TensorMismatch | None:
        """Whether names, shapes and dtypes (by torch's names) are this model's, before any value is there; what was allowed
        that is not.

        Raises:
            InvalidRequest: naming the tensors that are not.
        """
        unexpected = sorted(name for name in specs if not self._has(name))
        ignored = check_names(missing=self.missing(specs), unexpected=unexpected, allow_tensors=allow_tensors)
        for name, (shape, dtype) in specs.items():
            if not self._has(name):
                continue
            target = self.targets.get(self.tied.get(name, name))
            if target is None or list(shape) != list(target.shape):
                wanted = "?" if target is None else list(target.shape)
                raise InvalidRequest(f"tensor {name} has shape {list(shape)}, the model's has {wanted}")
            if dtype not in _READABLE:
                raise InvalidRequest(f"tensor {name} has dtype {dtype}; readable are {', '.join(_READABLE)}")
        return ignored

    def check_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Whether every value is finite, and tensors that this model ties are equal.

        A policy that diverged would make no usable token: every answer would fail on its log-probabilities.

        Raises:
            InvalidRequest: naming the tensor, or the pair, that is not.
        """
        broken = sorted(name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all()))
        if broken:
            raise InvalidRequest(f"values that are not finite are in {_list(broken)}")
        for name, embedding in self.tied.items():
            if name in tensors and embedding not in tensors:
                raise InvalidRequest(f"tensor {name} is there and {embedding} is not, but this model ties them")
            if name in tensors and not torch.equal(tensors[name], tensors[embedding]):
                raise InvalidRequest(f"tensor {name} differs from {embedding}, but this model ties them")

    @torch.no_grad()
    def copy_in(self, checkpoint: LoadedCheckpoint) -> None:
        """Copy a checked checkpoint over the model's parameters, in place."""
        for name, target in self.targets.items():
            target.copy_(checkpoint.tensors[name])


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, read whole, so that what is checked is what is used.

    Raises:
        InvalidRequest: the file is damaged, cannot be read, or is no regular file (a pipe would never end).
    """
    if not file.is_file():
        raise InvalidRequest(f"{file} is not a regular file")
    try:
        return safetensors.torch.load(file.read_bytes())
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(f"{file} is not a readable safetensors file: {error}") from error


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
