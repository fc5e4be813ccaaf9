"""An adapter's files (PEFT's layout) as matrices that fit a model.

Reading has two parts: `read_contents` reads the bytes, which lets other threads run; `pairs_of` makes matrices of them in
small slices, so that whoever steps a model can do it between two steps.
"""

import json
import math
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec
import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rollplane.engines.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from rollplane.errors import InvalidRequest, NotFound

_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

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


@dataclass(frozen=True)
class AdapterContents:
    """The bytes of an adapter's two files. `tensors`: by name, safetensors' own dtype, shape and bytes."""

    directory: Path
    config: bytes
    tensors: list[tuple[str, Mapping[str, Any]]]


def read_contents(directory: str | Path) -> AdapterContents:
    """Read an adapter's files. Blocking.

    Raises:
        NotFound: the directory or one of the two files is missing.
        InvalidRequest: the weights are no safetensors file, or a file is no regular one (a pipe would never end).
    """
    directory = Path(directory)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise NotFound(f"{directory} is not an adapter directory: it has no {name}", param="lora_path")
    file = directory / WEIGHTS_NAME
    try:
        return AdapterContents(directory, (directory / CONFIG_NAME).read_bytes(), _tensors(file.read_bytes()))
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(f"{file} is not a readable safetensors file: {error}", param="lora_path") from error


def _tensors(data: bytes) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    return found


def pairs_of(
    contents: AdapterContents, linears: Mapping[str, nn.Linear], *, max_rank: int
) -> Generator[None, None, dict[str, LoraPair]]:
    """Check an adapter and make its matrices, by module name; stops (yields) after each tensor.

    Raises:
        InvalidRequest: a setting, module, rank, shape or value that does not fit; by name.
    """
    config = _read_config(contents)
    yield
    found: dict[str, dict[str, Tensor]] = {}
    for key, raw in contents.tensors:
        match = _KEY.match(key)
        if match is None:
            raise InvalidRequest(f"adapter tensor {key} is not a LoRA matrix of a linear layer")
        found.setdefault(match["module"], {})[match["side"]] = _tensor(key, raw)
        yield
    if not found:
        raise InvalidRequest(f"{contents.directory} has no LoRA matrices")
    pairs = {}
    for name, sides in found.items():
        pairs[name] = _pair(name, sides, linears.get(name), config, max_rank=max_rank)
        yield
    return pairs


def _tensor(key: str, raw: Mapping[str, Any]) -> Tensor:
    """One tensor as float32."""
    dtype = _DTYPES.get(raw["dtype"])
    if dtype is None:
        raise InvalidRequest(
            f"adapter tensor {key} has dtype {raw['dtype']}; readable are {', '.join(_DTYPES)}", param="lora_path"
        )
    data = raw["data"]
    tensor = (torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)).reshape(raw["shape"])
    if not bool(tensor.isfinite().all()):
        raise InvalidRequest(f"adapter tensor {key} holds values that are not finite", param="lora_path")
    return tensor.float()


def _pair(name: str, sides: dict[str, Tensor], linear: nn.Linear | None, config: Any, *, max_rank: int) -> LoraPair:
    if linear is None:
        raise InvalidRequest(f"adapter module {name} is not a linear layer of this model")
    if set(sides) != {"A", "B"}:
        raise InvalidRequest(f"adapter module {name} has only lora_{''.join(sides)}")
    a, b = sides["A"], sides["B"]
    rank = int(a.shape[0])
    if a.dim() != 2 or b.dim() != 2 or b.shape[1] != rank:
        raise InvalidRequest(f"adapter module {name} has matrices {list(a.shape)} and {list(b.shape)}")
    if rank > max_rank:
        raise InvalidRequest(f"adapter module {name} has rank {rank}, the limit is {max_rank}")
    if (linear.out_features, linear.in_features) != (b.shape[0], a.shape[1]):
        raise InvalidRequest(
            f"adapter module {name} maps {a.shape[1]} to {b.shape[0]} features, "
            f"the layer maps {linear.in_features} to {linear.out_features}"
        )
    return LoraPair(a, b * _scaling(name, rank, config))


def _read_config(contents: AdapterContents) -> Any:
    """adapter_config.json as PEFT's own record, if every setting is one that we honour.

    Raises:
        InvalidRequest: naming the setting.
    """
    from peft import LoraConfig

    path = contents.directory / CONFIG_NAME
    try:
        raw = json.loads(contents.config)
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
