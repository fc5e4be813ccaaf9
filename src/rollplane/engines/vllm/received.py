"""Weights that were received and lie beside the model as checkpoint directories, and the room they need.

They lie in memory (`/dev/shm`) where there is room, else among the temporary files. A process that was killed cannot
clean up after itself, so every directory is held by a lock that ends with its process; the next process removes what
nobody holds.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from rollplane.errors import EngineFailed

PREFIX: Final = "rollplane-weights-"
_MAKING: Final = ".rollplane-weights-"
_LOCK: Final = "lock"
_MEMORY: Final = "/dev/shm"
_HEADERS_BYTES: Final = 1 << 20
"""What the files need beside the values, per bucket's header and for the file system."""


class ReceivedWeights:
    """The directories of one engine.

    Args:
        root: where they are made; None: in memory where there is room, else where temporary files go.
    """

    def __init__(self, root: str | None = None) -> None:
        self.roots = [root] if root is not None else [_MEMORY, tempfile.gettempdir()]
        self._held: dict[str, int] = {}
        self._swept = False

    def __repr__(self) -> str:
        return f"<ReceivedWeights {sorted(self._held) or 'none'}>"

    @property
    def paths(self) -> list[str]:
        """The directories that there are."""
        return list(self._held)

    def make(self, size: int) -> Path:
        """An empty directory with room for `size` bytes. Blocking.

        Raises:
            EngineFailed: there is no room anywhere.
        """
        if not self._swept:
            self._swept = True
            for root in self.roots:
                _sweep(Path(root))
        said = []
        for root in self.roots:
            try:
                free = shutil.disk_usage(root).free
                if free >= size + _HEADERS_BYTES:
                    return self._make(root)
                said.append(f"{root} has room for {free}")
            except OSError as error:
                said.append(f"{root}: {error.strerror}")
        raise EngineFailed(f"no room for {size} bytes of received weights: {', '.join(said)}")

    def drop_all(self, *, but: str | None = None) -> None:
        """Remove every directory except the one that is named. Blocking."""
        for path in [path for path in self._held if path != but]:
            shutil.rmtree(path, ignore_errors=True)
            os.close(self._held.pop(path))

    def release(self) -> None:
        """Let go of the directories and leave them, as the end of this process would."""
        for lock in self._held.values():
            os.close(lock)
        self._held.clear()

    def _make(self, root: str) -> Path:
        making = Path(tempfile.mkdtemp(prefix=_MAKING, dir=root))
        lock = os.open(making / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = making.with_name(PREFIX + making.name.removeprefix(_MAKING))
        making.rename(path)  # only now may others find it: it is locked
        self._held[str(path)] = lock
        return path


def _sweep(root: Path) -> None:
    """Remove what ended processes left."""
    for found in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(found / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(found, ignore_errors=True)
            finally:
                os.close(lock)
