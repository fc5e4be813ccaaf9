"""Side payloads of a rollout: log-probabilities, routed experts, sampling masks.

Each class states shape, dtype, unit and when it is absent; both ends of every wire use these and nothing else.
Ragged data are CSR: row `i` of a flat array is `flat[offsets[i]:offsets[i + 1]]`, offsets int32 and one longer than
the number of rows.
"""

import base64
import io
import itertools
import math
from tokenize import TokenError
from typing import Any

import msgspec
import numpy as np
import pybase64

from rollplane.protocol.arrays import ExpertArray, Float32Array, Int32Array

LOGPROB_FLOOR = -9999.0
"""What stands for an alternative whose log-probability is not finite (JSON has no infinity); each is counted."""


class Alternatives(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The most likely tokens per position, CSR over positions.

    `ids` int32 [M], `values` float32 [M] natural log, `ranks` int32 [M] from 1, `offsets` int32 [positions + 1].
    """

    ids: Int32Array
    values: Float32Array
    ranks: Int32Array
    offsets: Int32Array


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities of the tokens of one choice (or one delta of it).

    `values` float32 [T] natural log, one per token id; `ranks` int32 [T] from 1 among the whole vocabulary, None where
    the engine does not say; `alternatives` None unless more than the sampled token was asked for.
    """

    values: Float32Array
    ranks: Int32Array | None = None
    alternatives: Alternatives | None = None

    def rows(self, first: int, end: int) -> "TokenLogprobs":
        """Those of the tokens [first, end), over the same memory."""
        top = self.alternatives
        if top is not None:
            offsets = top.offsets[first : end + 1]
            a, b = int(offsets[0]), int(offsets[-1])
            top = Alternatives(
                ids=top.ids[a:b], values=top.values[a:b], ranks=top.ranks[a:b], offsets=offsets - offsets[0]
            )
        ranks = None if self.ranks is None else self.ranks[first:end]
        return TokenLogprobs(values=self.values[first:end], ranks=ranks, alternatives=top)


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log-probabilities of the prompt, CSR over prompt positions.

    Row 0 is empty (nothing comes before the first token); in every other row the prompt's own token comes first.
    `ids` int32 [M], `values` float32 [M], `ranks` int32 [M] (0 = unknown), `offsets` int32 [prompt + 1].
    """

    ids: Int32Array
    values: Float32Array
    ranks: Int32Array
    offsets: Int32Array


class SamplingMask(msgspec.Struct, frozen=True, kw_only=True):
    """Per generated token, the ids that survived truncation. `ids` int32 [M], `offsets` int32 [T + 1]."""

    ids: Int32Array
    offsets: Int32Array

    def rows(self, first: int = 0, end: int | None = None) -> list[list[int]]:
        """One list of ids per token of [first, end), as JSON carries it; all where no end is given."""
        offsets = self.offsets[first : None if end is None else end + 1]
        start = int(offsets[0])
        flat = self.ids[start : int(offsets[-1])].tolist()
        return [flat[a:b] for a, b in itertools.pairwise((offsets - start).tolist())]


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts chosen per forwarded token and MoE layer.

    `array` [rows, moe layers, top_k] of expert ids, uint8, uint16 or int32 (the narrowest that holds the largest id);
    row `i` belongs to token `start + i` of prompt + completion. The last sampled token was never forwarded, so
    rows = prompt + completion - 1 - start; no completion: 0 rows.
    """

    array: ExpertArray
    start: int = 0


def narrow_expert_ids(array: np.ndarray[Any, Any], *, num_experts: int | None = None) -> ExpertArray:
    """The same ids in the narrowest of uint8, uint16, int32. Give `num_experts` where it is known, to skip the scan.

    Raises:
        ValueError: an id is negative or does not fit int32.
    """
    top = (num_experts - 1) if num_experts is not None else (int(array.max()) if array.size else 0)
    if num_experts is None and array.size and int(array.min()) < 0:
        raise ValueError(f"expert id {int(array.min())} is negative")
    if top > np.iinfo(np.int32).max:
        raise ValueError(f"expert id {top} does not fit int32")
    dtype = np.uint8 if top <= 0xFF else np.uint16 if top <= 0xFFFF else np.int32
    return np.ascontiguousarray(array, dtype=dtype)


def encode_routes_structured(routes: RoutedExperts) -> dict[str, Any]:
    """The `structured` JSON form: base64 of raw C-order bytes with shape, start and dtype; `data` comes first.

    Clients search the body for the bytes `"routed_experts":{"data":"`, so the key order is part of the contract.
    """
    array, described = wire_routes(routes)
    return {"data": pybase64.b64encode_as_string(array.reshape(-1).view(np.uint8).data), **described}


def wire_routes(routes: RoutedExperts) -> tuple[ExpertArray, dict[str, Any]]:
    """The array whose bytes `structured` carries, C-order and little-endian, and what it says of them."""
    array = np.ascontiguousarray(routes.array, dtype=routes.array.dtype.newbyteorder("<"))
    return array, {"shape": list(array.shape), "start": routes.start, "dtype": array.dtype.name}


def decode_routes_structured(obj: dict[str, Any]) -> RoutedExperts:
    """The routes of a `structured` object.

    Raises:
        ValueError: a key is missing, the dtype is not an expert dtype, or the bytes do not fill the shape.
    """
    if not isinstance(obj, dict):
        raise ValueError(f"routed_experts is a {type(obj).__name__}, not an object")
    missing = {"data", "shape", "start", "dtype"} - set(obj)
    if missing:
        raise ValueError(f"routed_experts lacks {sorted(missing)}")
    if obj["dtype"] not in ("uint8", "uint16", "int32"):
        raise ValueError(f"routed_experts.dtype {obj['dtype']!r} is not uint8, uint16 or int32")
    shape = obj["shape"]
    if not isinstance(shape, list) or len(shape) != 3 or not all(type(d) is int and d >= 0 for d in shape):
        raise ValueError(f"routed_experts.shape {shape!r} is not [rows, layers, top_k]")
    if type(obj["start"]) is not int or obj["start"] < 0:
        raise ValueError(f"routed_experts.start {obj['start']!r} is not an integer >= 0")
    try:
        data = pybase64.b64decode(obj["data"], validate=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"routed_experts.data is not base64: {error}") from None
    dtype = np.dtype(obj["dtype"]).newbyteorder("<")
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise ValueError(f"routed_experts.shape {shape} of {dtype.name} needs {wanted} bytes, got {len(data)}")
    return RoutedExperts(array=np.frombuffer(data, dtype=dtype).reshape(shape), start=obj["start"])


def encode_routes_npy(routes: RoutedExperts) -> str:
    """The `npy` JSON form, vLLM's own: base64 of a .npy file. It cannot state the start."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(routes.array), allow_pickle=False)
    return pybase64.b64encode_as_string(buffer.getbuffer())


def decode_routes_npy(text: str, *, start: int = 0) -> RoutedExperts:
    """The routes of an `npy` string. The caller knows the start it asked for.

    Raises:
        ValueError: not base64, not a .npy file, or not a three-dimensional integer array.
    """
    try:
        data = base64.b64decode(text, validate=True)
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (ValueError, TypeError, EOFError, OSError, OverflowError, MemoryError, SyntaxError, TokenError) as error:
        raise ValueError(f"routed_experts is not a base64 .npy file: {error}") from None
    if array.ndim != 3 or array.dtype.kind not in "ui":
        raise ValueError(
            f"routed_experts is not a [rows, layers, top_k] integer array: {array.dtype.name}{list(array.shape)}"
        )
    if not array.dtype.isnative or array.dtype.name not in ("uint8", "uint16", "int32"):
        array = narrow_expert_ids(array)
    return RoutedExperts(array=np.ascontiguousarray(array), start=start)


def concat_offsets(parts: list[Int32Array]) -> Int32Array:
    """Offsets of concatenated CSR parts: each part rebased on the end of the one before.

    Raises:
        ValueError: a part is empty or does not start at 0.
    """
    out = [np.zeros(1, dtype=np.int32)]
    base = 0
    for part in parts:
        if part.size == 0 or int(part[0]) != 0:
            raise ValueError("CSR offsets start at 0 and are one longer than their rows")
        out.append(part[1:] + np.int32(base))
        base += int(part[-1])
    return np.concatenate(out).astype(np.int32, copy=False)
