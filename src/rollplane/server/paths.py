"""Which directories administration may name: canonical paths under the allowed roots, nothing else."""

import os
from pathlib import Path

from rollplane.errors import Forbidden, InvalidRequest, NotFound

MAX_ENTRIES = 10_000


def check_directory(path: str, *, roots: list[str] | None, param: str) -> str:
    """The canonical form of a directory that a caller named. Reads the file system: not for the event loop.

    Args:
        path: an absolute path, or a `file://` URI of one. Hub names are never resolved.
        roots: allowed directories; None allows every one (a server without keys, on loopback).
        param: the field's name, for errors.

    Raises:
        InvalidRequest: not a path at all.
        Forbidden: relative, a network path, outside the roots, or it holds a link that leads outside.
        NotFound: inside the roots and not there (yet).
    """
    text = path.removeprefix("file://")
    if not text or "\0" in text or not text.isprintable():
        raise InvalidRequest(f"{param} must be a path of printable characters", param=param)
    if "://" in text:
        raise Forbidden(f"{param} must be a local directory; {text.split('://', 1)[0]!r} is not fetched", param=param)
    if not text.startswith("/") or text.startswith("//"):
        raise Forbidden(
            f"{param} must be the absolute path of a local directory; names of a hub or a host are not resolved",
            param=param,
        )
    try:
        real = Path(os.path.realpath(text))
        allowed = None if roots is None else [Path(os.path.realpath(root)) for root in roots]
        if allowed is not None and not any(real.is_relative_to(root) for root in allowed):
            raise Forbidden(f"{param} is outside the directories that server.root allows", param=param)
        if not real.is_dir():
            what = "is not a directory" if real.exists() else "does not exist (yet)"
            raise NotFound(f"{param} {what}", param=param)
        if allowed is not None:
            _check_links(real, allowed, param=param)
    except OSError as error:
        raise NotFound(f"{param} cannot be read: {error.strerror}", param=param) from None
    return str(real)


def _check_links(directory: Path, allowed: list[Path], *, param: str) -> None:
    seen = 0
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files):
            seen += 1
            if seen > MAX_ENTRIES:
                raise InvalidRequest(f"{param} has more than {MAX_ENTRIES} entries", param=param)
            entry = Path(parent, name)
            if entry.is_symlink():
                target = Path(os.path.realpath(entry))
                if not any(target.is_relative_to(root) for root in allowed):
                    raise Forbidden(f"{param} holds {name!r}, a link that leads outside server.root", param=param)
