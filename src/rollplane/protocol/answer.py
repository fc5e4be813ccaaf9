"""Writes a Generate response as JSON or msgpack, and reads the msgpack form back.

JSON is assembled from arrays: numbers are written by msgspec as one array, cut at the commas and joined with the fixed
text between them, so there is no Python object per field of a token and no Python bytecode per token. A big answer is
made of pieces (`rollplane.protocol.pieces`), block by block of tokens.
"""

import itertools
from typing import Any, Final, Literal

import msgspec
import numpy as np

from rollplane.protocol.arrays import dec_hook, enc_hook
from rollplane.protocol.artifacts import (
    Alternatives,
    PromptLogprobs,
    RoutedExperts,
    SamplingMask,
    TokenLogprobs,
    encode_routes_npy,
    encode_routes_structured,
    wire_routes,
)
from rollplane.protocol.events import ServedBy
from rollplane.protocol.invariants import is_one_each
from rollplane.protocol.pieces import Holes, Piece, base64_pieces, in_blocks, msgpack_pieces, npy_pieces
from rollplane.protocol.request import Encoding
from rollplane.protocol.response import WIRE_VERSION as WIRE_VERSION
from rollplane.protocol.response import Choice, GenerateResponse, Usage

_msgpack = msgspec.msgpack.Encoder(enc_hook=enc_hook)
_response_decoder = msgspec.msgpack.Decoder(GenerateResponse, dec_hook=dec_hook)
_json = msgspec.json.Encoder()
RoutesForm = Encoding | Literal["nested"]
"""How an answer writes routed experts: as a request may ask, or `nested`, SkyRL's JSON lists [rows, layers, top_k]."""
_NULL: Final = msgspec.Raw(b"null")
_ENTRY: Final = '{"token":"token_id:'
_LOGPROB: Final = '","logprob":'
_TOP: Final = ',"bytes":null,"top_logprobs":['
_END: Final = ',"bytes":null}'
_NEXT: Final = "]}," + _ENTRY
"""The fixed text of `logprobs`, in its order: a sampled token, its alternatives (which begin as it does), the next token."""
BLOCK_NUMBERS: Final = 2048
"""Numbers written in one go where an answer is made of pieces: a fraction of a millisecond."""


def encode_msgpack(response: GenerateResponse) -> bytes:
    """The msgpack form: the response record, arrays as `{dtype, shape, data}` maps."""
    return _msgpack.encode(response)


def decode_msgpack(body: bytes) -> GenerateResponse:
    """The response in a msgpack body.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: not such a body, or one of another wire version.
    """
    try:
        response = _response_decoder.decode(body)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    except RecursionError:
        raise msgspec.DecodeError("the body is nested too deeply") from None
    if response.wire != WIRE_VERSION:
        raise msgspec.ValidationError(f"the answer has wire version {response.wire}, this side reads {WIRE_VERSION}")
    return response


def encode_json(response: GenerateResponse, *, routes: RoutesForm = "structured") -> bytes:
    """The JSON form of a whole answer, compact."""
    return _json.encode(_tree(response, routes=routes))


def json_pieces(response: GenerateResponse, *, routes: RoutesForm = "structured") -> list[Piece]:
    """The same text in pieces."""
    holes = Holes()
    return holes.fill(_json.encode(_tree(response, routes=routes, holes=holes)))


def encode_pieces(response: GenerateResponse) -> list[Piece]:
    """The msgpack form in pieces."""
    return msgpack_pieces(response)


def _tree(response: GenerateResponse, *, routes: RoutesForm, holes: Holes | None = None) -> dict[str, Any]:
    return {
        "request_id": response.request_id,
        "model": response.model,
        "created": response.created,
        "choices": [choice_tree(choice, routes=routes, holes=holes) for choice in response.choices],
        "usage": usage_tree(response.usage),
        "prompt_logprobs": prompt_logprobs_raw(response.prompt_logprobs, holes),
        "prompt_token_id_logprobs": response.prompt_token_id_logprobs,
        "prompt_token_ids": ids_raw(response.prompt_token_ids, holes),
        "mm_placeholders": response.mm_placeholders,
        "metrics": response.metrics,
        "kv_transfer_params": response.kv_transfer_params,
        "ec_transfer_params": response.ec_transfer_params,
        "rollplane": served_by_tree(response.served_by),
    }


def choice_tree(choice: Choice, *, routes: RoutesForm = "structured", holes: Holes | None = None) -> dict[str, Any]:
    """The JSON tree of one finished choice; big parts are raw bytes already, or (with `holes`) marks of pieces."""
    ids = ids_raw(choice.token_ids, holes)
    text = bytes(ids) if choice.token_ids.size <= BLOCK_NUMBERS else None
    tree: dict[str, Any] = {
        "index": choice.index,
        "token_ids": ids,
        "logprobs": logprobs_raw(choice.token_ids, choice.logprobs, holes, text=text),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "sampling_mask": mask_raw(choice.sampling_mask, holes),
        "policy_versions": choice.policy_versions,
    }
    if choice.routed_experts is not None:
        tree["routed_experts"] = routes_tree(choice.routed_experts, routes=routes, holes=holes)
    else:
        tree["routed_experts"] = None
    return tree


def routes_tree(
    experts: RoutedExperts, *, routes: RoutesForm, holes: Holes | None = None
) -> dict[str, Any] | str | msgspec.Raw:
    """Routed experts in the encoding that was asked for; `npy` and `nested` cannot state their start."""
    if routes == "nested":
        return _nested(experts.array, holes)
    if holes is None:
        return encode_routes_npy(experts) if routes == "npy" else encode_routes_structured(experts)
    if routes == "npy":
        return _quoted(holes.mark(npy_pieces(experts.array)))
    array, described = wire_routes(experts)
    return {"data": _quoted(holes.mark(base64_pieces(array.reshape(-1).view(np.uint8).data))), **described}


def _nested(rows: np.ndarray[Any, Any], holes: Holes | None) -> msgspec.Raw:
    if holes is None or rows.size <= BLOCK_NUMBERS:
        return msgspec.Raw(_json.encode(rows.tolist()))
    blocks = in_blocks(
        len(rows), lambda a, b: _json.encode(rows[a:b].tolist())[1:-1], block=_rows(len(rows), rows.size)
    )
    return msgspec.Raw(b"[" + holes.mark(blocks) + b"]")


def usage_tree(usage: Usage) -> dict[str, Any]:
    """The JSON tree of token counts."""
    tree: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        tree["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return tree


def served_by_tree(served_by: ServedBy) -> dict[str, Any]:
    """The JSON tree of the `rollplane` object; fields at their defaults are left out.

    The logprob mode, the attempt and `wire`, the version of the answer's encodings, never are.
    """
    tree: dict[str, Any] = msgspec.to_builtins(served_by)
    tree["logprobs_mode"] = served_by.logprobs_mode
    tree["attempt"] = served_by.attempt
    tree["wire"] = WIRE_VERSION
    return tree


def ids_raw(ids: np.ndarray[Any, Any] | None, holes: Holes | None = None) -> msgspec.Raw:
    """A JSON array of integers, or null."""
    if ids is None:
        return _NULL
    if holes is None or ids.size <= BLOCK_NUMBERS:
        return msgspec.Raw(_json.encode(ids.tolist()))
    blocks = in_blocks(ids.size, lambda a, b: _json.encode(ids[a:b].tolist())[1:-1], block=BLOCK_NUMBERS)
    return msgspec.Raw(b"[" + holes.mark(blocks) + b"]")


def mask_raw(mask: SamplingMask | None, holes: Holes | None = None) -> msgspec.Raw:
    """A JSON array of one array of ids per token, or null."""
    if mask is None:
        return _NULL
    if holes is None or mask.ids.size <= BLOCK_NUMBERS:
        return msgspec.Raw(_json.encode(mask.rows()))

    def write(a: int, b: int) -> bytes:
        return _json.encode(mask.rows(a, b))[1:-1]

    rows = mask.offsets.size - 1
    return msgspec.Raw(b"[" + holes.mark(in_blocks(rows, write, block=_rows(rows, mask.ids.size))) + b"]")


def logprobs_raw(
    token_ids: np.ndarray[Any, Any],
    logprobs: TokenLogprobs | None,
    holes: Holes | None = None,
    *,
    text: bytes | None = None,
) -> msgspec.Raw:
    """`{"content": [{token, logprob, bytes, top_logprobs}, ...]}`, or null where logprobs were not asked for.

    Args:
        text: the ids as a JSON array, where it is written already.
    """
    if logprobs is None:
        return _NULL
    rows = token_ids.size
    if rows == 0:
        return msgspec.Raw(b'{"content":[]}')
    numbers = rows if logprobs.alternatives is None else rows + logprobs.alternatives.ids.size
    if holes is None or numbers <= BLOCK_NUMBERS:
        return msgspec.Raw(b'{"content":[' + _entries(token_ids, logprobs, text=text) + b"]}")

    def write(a: int, b: int) -> bytes:
        return _entries(token_ids[a:b], logprobs.rows(a, b))

    return msgspec.Raw(b'{"content":[' + holes.mark(in_blocks(rows, write, block=_rows(rows, numbers))) + b"]}")


def _rows(rows: int, numbers: int) -> int:
    """Rows of a block, so that it has about `BLOCK_NUMBERS`."""
    return max(1, BLOCK_NUMBERS * rows // numbers)


def _quoted(mark: bytes) -> msgspec.Raw:
    return msgspec.Raw(b'"' + mark + b'"')


def _entries(token_ids: np.ndarray[Any, Any], logprobs: TokenLogprobs, *, text: bytes | None = None) -> bytes:
    """The objects of one or more tokens, a comma between two.

    Args:
        text: the ids as a JSON array, where it is written already.
    """
    ids = _cells(token_ids) if text is None else _cut(text)
    values = _cells(logprobs.values)
    woven = _woven([ids, _LOGPROB, values, *_top_parts(token_ids, ids, logprobs, values)])
    woven[0] = _ENTRY + woven[0]
    return "".join(woven).encode("ascii")


def _top_parts(
    token_ids: np.ndarray[Any, Any], ids: list[str], logprobs: TokenLogprobs, values: list[str]
) -> list[str | list[str]]:
    """What stands between the log-probability of one token and the id of the next, as parts to weave.

    Rows of one width, as engines make them, are woven column by column. The one column that repeats the sampled tokens
    (`logprobs: 1`) takes the cells that are written already.
    """
    top = logprobs.alternatives
    if top is None:
        return [_TOP + _NEXT]
    width = 1
    if is_one_each(top.offsets):
        if top.ids.tobytes() == token_ids.tobytes() and top.values.tobytes() == logprobs.values.tobytes():
            return [_TOP + _ENTRY, ids, _LOGPROB, values, _END + _NEXT]
    else:
        widths = np.diff(top.offsets)
        width = int(widths[0])
        if not (widths == width).all():
            return [_TOP, _top_cells(top), _NEXT]
        if width == 0:
            return [_TOP + _NEXT]
    top_ids, top_values = _cells(top.ids), _cells(top.values)
    parts: list[str | list[str]] = []
    for i in range(width):
        before = _END + "," if i else _TOP
        parts += [before + _ENTRY, top_ids[i::width], _LOGPROB, top_values[i::width]]
    return [*parts, _END + _NEXT]


def _top_cells(alternatives: Alternatives) -> list[str]:
    ids, values = _cells(alternatives.ids), _cells(alternatives.values)
    cells = [_ENTRY + token + _LOGPROB + value + _END for token, value in zip(ids, values, strict=True)]
    return [",".join(cells[a:b]) for a, b in itertools.pairwise(alternatives.offsets.tolist())]


def prompt_logprobs_raw(logprobs: PromptLogprobs | None, holes: Holes | None = None) -> msgspec.Raw:
    """`[null, {"<id>": {logprob, rank, decoded_token}}, ...]`; the prompt's own token is the first key of each."""
    if logprobs is None:
        return _NULL
    rows = logprobs.offsets.size - 2
    if rows < 1:
        return msgspec.Raw(b"[null]")

    def write(a: int, b: int) -> bytes:
        return _prompt_rows(logprobs, a + 1, b + 1)

    block = rows if holes is None else _rows(rows, max(logprobs.ids.size, 1))
    if block >= rows or holes is None:
        return msgspec.Raw(b"[null," + write(0, rows) + b"]")
    return msgspec.Raw(b"[null," + holes.mark(in_blocks(rows, write, block=block)) + b"]")


def _prompt_rows(logprobs: PromptLogprobs, first: int, end: int) -> bytes:
    """The objects of prompt positions [first, end), a comma between two."""
    a, b = int(logprobs.offsets[first]), int(logprobs.offsets[end])
    ids, values, ranks = (_cells(part[a:b]) for part in (logprobs.ids, logprobs.values, logprobs.ranks))
    cells = [
        f'"{token}":{{"logprob":{value},"rank":{rank if rank != "0" else "null"},"decoded_token":null}}'
        for token, value, rank in zip(ids, values, ranks, strict=True)
    ]
    offsets = (logprobs.offsets[first : end + 1] - a).tolist()
    return ",".join(["{" + ",".join(cells[i:j]) + "}" for i, j in itertools.pairwise(offsets)]).encode("ascii")


def _cells(array: np.ndarray[Any, Any]) -> list[str]:
    """The JSON text of each number. float32 values are written as the doubles they are, which read back exactly."""
    return _cut(_json.encode(array.tolist())) if array.size else []


def _cut(text: bytes) -> list[str]:
    """The numbers of a JSON array that has some. As `str`: joining `bytes` takes a buffer of 80 bytes for each of them."""
    return text.decode("ascii")[1:-1].split(",")


def _woven(parts: list[str | list[str]]) -> list[str]:
    """As many records of cells and fixed text as the first part has cells; what begins the next record is cut off the last."""
    width, count = len(parts), len(parts[0])
    out = ["" if isinstance(part, list) else part for part in parts] * count
    for i, part in enumerate(parts):
        if isinstance(part, list):
            out[i::width] = part
    out[-1] = out[-1].removesuffix("," + _ENTRY)
    return out
