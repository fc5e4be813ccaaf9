"""LoRA adapters over the model's own linear layers, any mix of them in one batch.

An adapter is read from PEFT's files (adapter_config.json, adapter_model.safetensors); its A and B matrices stay apart
from the base weights. A hook on each linear layer adds, for each adapter in the batch, `scaling * B(A(x))` to the rows
that use it: a row's result does not depend on which adapters the others use. A decode step does so for all adapters of
its batch in two products, so that requests that finish on old generations cost the step nothing to speak of.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rollplane.engines.embedded.adapter_reader import AdapterContents, LoraPair, pairs_of
from rollplane.errors import Conflict

STACKED_ROWS: Final = 64
"""Rows of a decode step, with its prompts' tokens, up to which two products for all adapters cost less than two for each."""


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
        """By layer, of the adapters `_stacked`. They are put together while an adapter loads (else when one joins the batch),
        not when one leaves.
        """

    def __contains__(self, name: object) -> bool:
        return name in self._pairs

    @property
    def names(self) -> list[str]:
        """Loaded adapters, oldest first."""
        return list(self._pairs)

    def pairs(self, contents: AdapterContents) -> Generator[None, None, dict[str, LoraPair]]:
        """An adapter's pairs by module name, checked against the model, in small slices; see `pairs_of`."""
        return pairs_of(contents, self._linears, max_rank=self._max_rank)

    def loading(
        self, name: str, contents: AdapterContents, *, in_use: Callable[[], Iterable[str]]
    ) -> Generator[None, None, None]:
        """Check an adapter and make it available under `name`, in small slices; the last one loads it.

        The factors of a batch that will have it beside the adapters `in_use` are put together meanwhile: the first step of
        such a batch takes no longer than another.

        Raises:
            InvalidRequest: files that do not fit; by name.
            Conflict: see `load`.
        """
        pairs = yield from self.pairs(contents)
        wanted = set(in_use()) | set(self._stacked[-1:])  # the last one loaded may get its first request meanwhile
        beside = [other for other in self._pairs if other in wanted and other != name]
        sources = [*(self._pairs[other] for other in beside), pairs]
        stacks: dict[str, _Stack] = {}
        if beside:
            for module in dict.fromkeys(module for source in sources for module in source):
                stacks[module] = _stack([source.get(module) for source in sources])
                yield
        self.load(name, pairs)
        if beside:
            self._stacked, self._stacks = (*beside, name), stacks

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
        if batch.tokens == 1 and len(batch.rows) > 1 and batch.size <= STACKED_ROWS:
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


class _Hook:
    """A forward hook that knows its layer's name."""

    def __init__(self, adapters: AdapterSet, module: str) -> None:
        self._adapters = adapters
        self._module = module

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._adapters.add_deltas(self._module, args[0], output)


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
