"""Encodings too big to be made in one go: a list of pieces that are written one after the other and never joined.

A call into C that runs for milliseconds holds the interpreter, in whatever thread it runs. So a big answer is made of
pieces that take a fraction of a millisecond each, and arrays in it are their own memory, cut.

The small text around the pieces is encoded as ever, with a mark where each piece belongs; then it is cut at the marks.
"""

import io
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pybase64

from rollplane.protocol.arrays import enc_hook, encode_array

Piece = bytes | memoryview

PIECE_BYTES: Final = 192 * 1024
"""Longest piece of an array, a multiple of 3 so that pieces of base64 need no padding between them."""
HOLE_BYTES: Final = 64 * 1024
"""From this size on, an array is a piece of its own; shorter ones are copied."""
_MARK_BYTES: Final = 16
_NUMBER: Final = struct.Struct(">I")


class Holes:
    """Marks in an encoding, and what belongs there."""

    def __init__(self) -> None:
        # Nothing that a caller sent can hold it by chance or by intent.
        self._mark = secrets.token_bytes(_MARK_BYTES)
        self._contents: list[Iterable[Piece]] = []

    def __repr__(self) -> str:
        return f"<Holes {len(self._contents)}>"

    def mark(self, content: Iterable[Piece]) -> bytes:
        """A mark to encode in the place of `content`."""
        self._contents.append(content)
        return self._mark + _NUMBER.pack(len(self._contents) - 1)

    def fill(self, text: bytes) -> list[Piece]:
        """The encoding with every mark replaced.

        Raises:
            ValueError: a mark is missing, or there twice.
        """
        first, *rest = text.split(self._mark)
        numbers = [_NUMBER.unpack_from(part)[0] for part in rest]
        if sorted(numbers) != list(range(len(self._contents))):
            raise ValueError(f"an encoding has the marks {numbers[:8]} of {len(self._contents)} pieces")
        pieces: list[Piece] = [first]
        for number, part in zip(numbers, rest, strict=True):
            pieces.extend(self._contents[number])
            if len(part) > _NUMBER.size:
                pieces.append(part[_NUMBER.size :])
        return pieces


def msgpack_pieces(value: Any) -> list[Piece]:
    """The msgpack of a record of ours; big arrays in it are their own memory, cut."""
    holes = Holes()

    def hook(obj: Any) -> Any:
        if not isinstance(obj, np.ndarray) or obj.nbytes < HOLE_BYTES:
            return enc_hook(obj)
        wire = encode_array(obj)
        data = wire["data"]
        wire["data"] = msgspec.Raw(b"\xc6" + len(data).to_bytes(4, "big") + holes.mark(cut(data)))
        return wire

    return holes.fill(msgspec.msgpack.Encoder(enc_hook=hook).encode(value))


def cut(data: Piece, *, size: int = PIECE_BYTES) -> Iterator[Piece]:
    """Slices of at most `size` bytes of the same memory."""
    if len(data) <= size:
        yield data
        return
    whole = memoryview(data)
    for at in range(0, len(data), size):
        yield whole[at : at + size]


def base64_pieces(data: Piece) -> Iterator[bytes]:
    """Base64 text of the bytes."""
    for part in cut(data):
        yield pybase64.b64encode(part)


def npy_pieces(array: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """Base64 text of the array as a .npy file."""
    array = np.ascontiguousarray(array)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    data = array.reshape(-1).view(np.uint8).data
    # The head takes as many bytes of the array as make it a multiple of 3.
    first = -len(head.getvalue()) % 3
    yield pybase64.b64encode(head.getvalue() + bytes(data[:first]))
    yield from base64_pieces(data[first:])


def in_blocks(rows: int, write: Callable[[int, int], bytes], *, block: int) -> Iterator[bytes]:
    """`write(a, b)` for every block of rows, a comma between two."""
    for at in range(0, rows, block):
        text = write(at, min(at + block, rows))
        yield b"," + text if at else text


def joined(pieces: Iterable[Piece]) -> bytes:
    """All of it in one; for tests and small things."""
    return b"".join(pieces)


def size_of(pieces: Iterable[Piece]) -> int:
    """Bytes of all pieces."""
    return sum(len(piece) for piece in pieces)
