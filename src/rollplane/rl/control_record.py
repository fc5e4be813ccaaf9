"""What a control owner must not forget: its epoch, the fleet's checkpoint, the order of versions, the adapters.

Kept in one small JSON file, replaced atomically. A lock beside it makes a second owner of the same record a refusal; the
system drops the lock with the process, however that ends.
"""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO, Final

import msgspec

from rollplane.errors import Conflict, InvalidRequest, Unavailable
from rollplane.rl.fleet_update import Checkpoint

MAX_VERSIONS: Final = 1024
"""Versions whose order outlives the owner; older names are unknown to the next one."""


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fleet's record. `adapters`: path by name, `adapter_digests`: contents by name. `versions`: oldest first. `checkpoint` None: no update yet, workers are only observed.

    `left_paused`: workers that an update of the fleet paused and did not resume, by address; no caller asked for that.
    """

    format: int = 1
    epoch: int
    checkpoint: Checkpoint | None = None
    versions: list[str] = msgspec.field(default_factory=list)
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    adapter_digests: dict[str, str] = msgspec.field(default_factory=dict)
    dropped_adapters: list[str] = msgspec.field(default_factory=list)
    paused: bool = False
    left_paused: list[str] = msgspec.field(default_factory=list)


class RecordFile:
    """The record in a file, owned by this process from `open` to `close`.

    Args:
        path: the file; its directory must exist. The lock is `<path>.lock`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def __repr__(self) -> str:
        return f"<RecordFile {self.path} {'owned' if self._lock is not None else 'closed'}>"

    def open(self) -> ControlRecord | None:
        """Become the owner; the record of the owner before, None where there was none. Blocking, short.

        Raises:
            Conflict: another process owns it.
            InvalidRequest: the file cannot be opened, or is no record.
        """
        try:
            lock = Path(f"{self.path}.lock").open("ab")  # noqa: SIM115 - held until `close`
        except OSError as error:
            raise InvalidRequest(f"the control record {self.path} cannot be kept: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise Conflict(f"another process owns the control record {self.path}") from None
        self._lock = lock
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=ControlRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.close()
            raise InvalidRequest(f"{self.path} is no control record: {error}") from None

    def write(self, record: ControlRecord) -> None:
        """Replace the file; whoever reads it sees the old record or the new one. Blocking, short.

        Raises:
            Unavailable: it could not be written; the old record is as it was.
        """
        if self._lock is None:
            raise Unavailable(f"the control record {self.path} is not open")
        data = msgspec.json.format(msgspec.json.encode(record), indent=2)
        try:
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=f"{self.path.name}.", delete=False) as new:
                new.write(data)
                new.flush()
                os.fsync(new.fileno())
            Path(new.name).replace(self.path)
        except OSError as error:
            raise Unavailable(f"the control record {self.path} could not be written: {error}") from error

    def close(self) -> None:
        """Let go of it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()
