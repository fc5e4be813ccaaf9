"""LoRA adapters over the model's own linear layers, any mix of them in one batch.

An adapter is read from PEFT's files (adapter_config.json, adapter_model.safetensors); its A and B matrices stay apart
from the base weights. A hook on each linear layer adds, for each adapter in the batch, `scaling * B(A(x))` to the rows
that use it: a row's result does not depend on which adapters the others use. A decode step does so for all adapters of
its batch in two products, so that requests that finish on old generations cost the step nothing to speak of.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rollplane.engines.embedded.weights import read_safetensors
from rollplane.errors import Conflict, InvalidRequest, NotFound

_HARMLESS = frozenset(
    {
        "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern",
        "use_rslora", "layers_to_transform", "layers_pattern", "base_model_name_or_path", "revision", "task_type",
        "inference_mode", "peft_version", "auto_mapping", "init_lora_weights", "peft_type", "ensure_weight_tying",
        "runtime_config", "loftq_config", "megatron_core",
    }
)  # fmt: skip
"""Settings of PEFT's LoraConfig that are honoured, or that say nothing about a trained adapter's forward."""


class _Scales(msgspec.Struct, frozen=True):
    """The settings that the forward computes with, which PEFT's record takes unchecked; null is PEFT's default."""

    lora_alpha: float | None = None
    use_rslora: bool | None = None
    alpha_pattern: dict[str, float] | None = None
    rank_pattern: dict[str, int] | None = None


_PLAIN_INITS = (True, False, "gaussian", "orthogonal")
"""Initialisations that leave the base weights alone; others (PiSSA, OLoRA, ...) train against changed ones."""

_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")


@dataclass(frozen=True)
class LoraPair:
    """One layer's share of an adapter: `a` [rank, in], `b` [out, rank] with the scaling in it, float32; the delta is
    `b @ a`.
    """

    a: Tensor
    b: Tensor


@dataclass
class _Batch:
    """Which rows of the running forward use which adapter. `rows` int64; None: all of them. `foreign`: by the ranks of the
    adapters in a stack, bool [rows, sum of ranks], which of its columns are not of a row's own adapter.
    """

    rows: dict[str, Tensor | None]
    size: int
    tokens: int
    foreign: dict[tuple[int, ...], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Stack:
    """One layer's shares of several adapters, one after the other: `a` [sum of ranks, in], `b` [out, sum of ranks].
    `ranks`: by adapter, 0 where it does not touch the layer.
    """

    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]


class AdapterSet:
    """The adapters loaded over one model.

    Args:
        module: the base model.
        max_adapters: how many may be loaded at once.
        max_rank: the largest rank taken.
    """

    def __init__(self, module: nn.Module, *, max_adapters: int, max_rank: int) -> None:
        self._linears = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
        self._max_adapters = max_adapters
        self._max_rank = max_rank
        self._pairs: dict[str, dict[str, LoraPair]] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._batch: _Batch | None = None
        self._stacked: tuple[str, ...] = ()
        self._stacks: dict[str, _Stack] = {}
        """By layer, of the adapters `_stacked`. They are put together when an adapter joins the batch, not when one leaves."""

    def __contains__(self, name: object) -> bool:
        return name in self._pairs

    @property
    def names(self) -> list[str]:
        """Loaded adapters, oldest first."""
        return list(self._pairs)

    def read(self, directory: str | Path) -> dict[str, LoraPair]:
        """Read and check an adapter without loading it: its pairs by module name.

        Raises:
            NotFound: the directory or one of the two files is missing.
            InvalidRequest: a setting, module, rank, shape or value that does not fit; by name.
        """
        directory = Path(directory)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not (directory / file).is_file():
                raise NotFound(f"{directory} is not an adapter directory: it has no {file}", param="lora_path")
        config = _read_config(directory)
        found: dict[str, dict[str, Tensor]] = {}
        tensors = read_safetensors(directory / "adapter_model.safetensors")
        _check_values(tensors)
        for key, tensor in tensors.items():
            match = _KEY.match(key)
            if match is None:
                raise InvalidRequest(f"adapter tensor {key} is not a LoRA matrix of a linear layer")
            found.setdefault(match["module"], {})[match["side"]] = tensor.float()
        if not found:
            raise InvalidRequest(f"{directory} has no LoRA matrices")
        return {name: self._pair(name, sides, config) for name, sides in found.items()}

    def load(self, name: str, pairs: dict[str, LoraPair]) -> None:
        """Make an adapter available under `name`.

        Raises:
            Conflict: the name is taken, or there is no free slot.
        """
        if name in self._pairs:
            raise Conflict(f"adapter {name!r} is loaded already; a new generation needs a new engine-side name")
        if len(self._pairs) >= self._max_adapters:
            raise Conflict(f"all {self._max_adapters} adapter slots are taken: {', '.join(sorted(self._pairs))}")
        self._pairs[name] = pairs
        if name in self._stacked:  # an unloaded one stays there until another joins
            self._forget_stacks()
        for module in pairs:
            if module not in self._hooks:
                self._hooks[module] = self._linears[module].register_forward_hook(_Hook(self, module))

    def unload(self, name: str) -> None:
        """Forget an adapter; an unknown name is no error."""
        self._pairs.pop(name, None)
        if not self._pairs:
            self._forget_stacks()
        needed = {module for pairs in self._pairs.values() for module in pairs}
        for module in [m for m in self._hooks if m not in needed]:
            self._hooks.pop(module).remove()

    @contextmanager
    def rows(self, adapters: Sequence[str | None], *, tokens: int) -> Iterator[None]:
        """For one forward: the adapter of each batch row (None: the base model), and tokens per row."""
        used = {a for a in adapters if a is not None}
        if used:
            rows: dict[str, Tensor | None] = {}
            for name in sorted(used):
                index = [i for i, a in enumerate(adapters) if a == name]
                rows[name] = None if len(index) == len(adapters) else torch.tensor(index)
            self._batch = _Batch(rows, len(adapters), tokens)
        try:
            yield
        finally:
            self._batch = None

    def add_deltas(self, module: str, x: Tensor, y: Tensor) -> None:
        """Add the running batch's deltas for one layer to its output `y`, in place; `x` is the layer's input."""
        batch = self._batch
        if batch is None:
            return
        if batch.tokens == 1 and len(batch.rows) > 1:
            self._add_stacked(module, x, y, batch)
            return
        for name, rows in batch.rows.items():
            pair = self._pairs[name].get(module)
            if pair is None:
                continue
            index = rows if rows is None else _flat_rows(rows, x, batch)
            part = x if index is None else x[index]
            delta = ((part.float() @ pair.a.T) @ pair.b.T).to(y.dtype)
            if index is None:
                y += delta
            else:
                y[index] += delta

    def _add_stacked(self, module: str, x: Tensor, y: Tensor, batch: _Batch) -> None:
        """All adapters' deltas of a decode step at once; a column of another adapter than a row's own counts nothing."""
        if not batch.rows.keys() <= set(self._stacked):
            self._forget_stacks()
            self._stacked = tuple(batch.rows)
        stack = self._stacks.get(module)
        if stack is None:
            pairs = [self._pairs[name].get(module) for name in self._stacked]
            if not any(pairs):  # the layer's hook is another adapter's
                return
            stack = self._stacks[module] = _stack(pairs)
        foreign = batch.foreign.get(stack.ranks)
        if foreign is None:
            foreign = batch.foreign[stack.ranks] = _foreign_columns(batch, self._stacked, stack.ranks)
        # Not by multiplying: what another adapter makes of a row may be infinite.
        inner = (x.reshape(batch.size, -1).float() @ stack.a.T).masked_fill_(foreign, 0.0)
        y += (inner @ stack.b.T).view_as(y).to(y.dtype)

    def _forget_stacks(self) -> None:
        self._stacked = ()
        self._stacks.clear()

    def _pair(self, name: str, sides: dict[str, Tensor], config: Any) -> LoraPair:
        linear = self._linears.get(name)
        if linear is None:
            raise InvalidRequest(f"adapter module {name} is not a linear layer of this model")
        if set(sides) != {"A", "B"}:
            raise InvalidRequest(f"adapter module {name} has only lora_{''.join(sides)}")
        a, b = sides["A"], sides["B"]
        rank = int(a.shape[0])
        if a.dim() != 2 or b.dim() != 2 or b.shape[1] != rank:
            raise InvalidRequest(f"adapter module {name} has matrices {list(a.shape)} and {list(b.shape)}")
        if rank > self._max_rank:
            raise InvalidRequest(f"adapter module {name} has rank {rank}, the limit is {self._max_rank}")
        if (linear.out_features, linear.in_features) != (b.shape[0], a.shape[1]):
            raise InvalidRequest(
                f"adapter module {name} maps {a.shape[1]} to {b.shape[0]} features, "
                f"the layer maps {linear.in_features} to {linear.out_features}"
            )
        return LoraPair(a, b * _scaling(name, rank, config))


class _Hook:
    """A forward hook that knows its layer's name."""

    def __init__(self, adapters: AdapterSet, module: str) -> None:
        self._adapters = adapters
        self._module = module

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._adapters.add_deltas(self._module, args[0], output)


def _check_values(tensors: dict[str, Tensor]) -> None:
    """One look at all of them, for every call of torch here takes the interpreter from the thread that steps."""
    if not tensors or bool(torch.cat([tensor.reshape(-1).float() for tensor in tensors.values()]).isfinite().all()):
        return
    broken = next(name for name, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    raise InvalidRequest(f"adapter tensor {broken} holds values that are not finite", param="lora_path")


def _stack(pairs: list[LoraPair | None]) -> _Stack:
    found = [pair for pair in pairs if pair is not None]
    return _Stack(
        torch.cat([pair.a for pair in found]),
        torch.cat([pair.b for pair in found], dim=1),
        tuple(0 if pair is None else int(pair.a.shape[0]) for pair in pairs),
    )


def _foreign_columns(batch: _Batch, names: Sequence[str], ranks: tuple[int, ...]) -> Tensor:
    owner = torch.full((batch.size,), -1)
    for name, rows in batch.rows.items():
        if rows is not None:
            owner[rows] = names.index(name)
    columns = torch.repeat_interleave(torch.arange(len(ranks)), torch.tensor(ranks))
    return owner[:, None] != columns[None]


def _flat_rows(rows: Tensor, x: Tensor, batch: _Batch) -> Tensor:
    """Row indices for a layer that sees [rows, tokens, features], or [rows * tokens, features] inside MoE blocks."""
    if x.shape[0] == batch.size:
        return rows
    return (rows[:, None] * batch.tokens + torch.arange(batch.tokens)).reshape(-1)


def _read_config(directory: Path) -> Any:
    """adapter_config.json as PEFT's own record, if every setting is one that we honour.

    Raises:
        InvalidRequest: naming the setting.
    """
    from peft import LoraConfig

    path = directory / "adapter_config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        kind = raw.pop("peft_type", None)
        scales = msgspec.convert(raw, _Scales)
        for pattern in (*(scales.alpha_pattern or ()), *(scales.rank_pattern or ())):
            re.compile(pattern)
        known = {f.name for f in fields(LoraConfig)} - {n for n in _Scales.__struct_fields__ if raw.get(n) is None}
        config = LoraConfig(**{name: value for name, value in raw.items() if name in known})
    except (ValueError, TypeError, AttributeError, msgspec.MsgspecError, re.error) as error:
        raise InvalidRequest(f"{path} was refused: {error}", param="lora_path") from error
    if kind != "LORA":
        raise InvalidRequest(f"the adapter's peft_type is {kind}; only LORA is served", param="lora_path")
    neutral = LoraConfig()
    for name, value in raw.items():
        # PEFT ignores names it does not know; an adapter that needs one would be served wrongly.
        if name not in _HARMLESS and value and value != getattr(neutral, name, None):
            raise InvalidRequest(f"the adapter uses {name}={value!r}, which is not served", param="lora_path")
    if config.init_lora_weights not in _PLAIN_INITS:
        raise InvalidRequest(
            f"the adapter was initialised by {config.init_lora_weights!r}, which changes the base weights",
            param="lora_path",
        )
    return config


def _scaling(name: str, rank: int, config: Any) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA; patterns go before the common values."""
    alpha, declared = config.lora_alpha, config.r
    if config.alpha_pattern or config.rank_pattern:
        from peft.utils.other import get_pattern_key

        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), alpha)
        declared = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), declared)
    if declared != rank:
        raise InvalidRequest(f"adapter module {name} has rank {rank}, its config says {declared}")
    return float(alpha) / (math.sqrt(rank) if config.use_rslora else rank)
