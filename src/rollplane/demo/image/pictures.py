"""Pictures of one colour, what vLLM's render route makes of them, and their pixels as the trainer needs them."""

import base64
import json
import struct
import urllib.request
import zlib
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollplane.errors import EngineProtocolError

COLOURS: Final = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
QUESTION: Final = "colour?"
_RAW_VIEW: Final = 3  # vLLM's extension code for a tensor's bytes


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """One picture as a renderer sends it: the prompt with its placeholders, and the features' envelope."""

    colour: str
    token_ids: list[int]
    features: dict[str, Any]


def render(base_url: str, *, model: str, side: int, timeout_s: float = 60.0) -> list[Rendered]:
    """Let vLLM render a question about a picture of every colour, `side` pixels wide and high.

    Raises:
        EngineProtocolError: an answer without features.
    """
    return [_render_one(base_url, model, colour, side, timeout_s) for colour in COLOURS]


def _render_one(base_url: str, model: str, colour: str, side: int, timeout_s: float) -> Rendered:
    url = "data:image/png;base64," + base64.b64encode(png(COLOURS[colour], side=side)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions/render", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        tree = json.load(answer)
    if not isinstance(tree.get("features"), dict) or not tree.get("token_ids"):
        raise EngineProtocolError(f"the renderer's answer has no features: {sorted(tree)}")
    return Rendered(colour=colour, token_ids=tree["token_ids"], features=tree["features"])


def pixels_of(rendered: Rendered) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Normalised patches float32 [P, numbers] and the grid int64 [3] of the one picture: the very bytes the engine gets.

    Raises:
        EngineProtocolError: the payload holds something else.
    """
    payload = base64.b64decode(rendered.features["kwargs_data"]["image"][0], validate=True)
    fields = msgspec.msgpack.decode(payload, ext_hook=_tensor_bytes)
    pixels, grid = (_array(fields[name]["data"]) for name in ("pixel_values", "image_grid_thw"))
    if pixels.dtype != np.float32 or grid.dtype != np.int64:
        raise EngineProtocolError(f"pixels are {pixels.dtype} and their grid {grid.dtype}, not float32 and int64")
    return pixels, grid.reshape(3)


def _tensor_bytes(code: int, data: memoryview) -> bytes:
    if code != _RAW_VIEW:
        raise EngineProtocolError(f"extension {code} in a payload, only a tensor's bytes ({_RAW_VIEW}) are read")
    return bytes(data)


def _array(data: Any) -> NDArray[Any]:
    dtype, shape, raw = data
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def png(colour: tuple[int, int, int], *, side: int) -> bytes:
    """A square PNG of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * side) * side
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)
