"""A directory for the files of one `serve` and its children, which goes with the last of them.

It holds a lock that every child inherits. A killed `serve` cannot remove its directory; the next one sees that nobody
holds the lock any more and does it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

PREFIX: Final = "rollplane-serve-"
LOCK: Final = "in-use"


@contextlib.contextmanager
def private_directory() -> Generator[tuple[Path, int], None, None]:
    """The directory, readable by its owner alone, and the descriptor that children must inherit.

    Directories of earlier processes of the same user that nobody uses any more are removed first.
    """
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        path = Path(name)
        lock = os.open(path / "locking", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (path / "locking").rename(path / LOCK)  # seen under this name, it is held
            yield path, lock
        finally:
            os.close(lock)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, gone meanwhile, or in use
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
