"""What the engine-side salts and adapters of a worker's cached blocks stand for, now."""

from collections import OrderedDict
from typing import Final

from rollplane.dynamo.kv_translation import Scope
from rollplane.identity import engine_salt
from rollplane.worker import Worker

MAX_SALTS: Final = 16_384
"""Callers' salts that are remembered; of the blocks of an older one the router is not told."""


class Scopes:
    """The salts that callers sent, and the worker's version and adapters.

    A salt of the engine is a hash of the caller's and the version, so it can only be read back by trying those that were
    sent.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._salts: OrderedDict[str | None, None] = OrderedDict({None: None})
        self._scope: str | None = ""  # none is called so: the first look reads it
        self._by_engine: dict[str | None, str | None] = {}

    def __repr__(self) -> str:
        return f"<Scopes {len(self._salts)} salts at {self._worker.version!r}>"

    def note(self, salt: str | None) -> None:
        """A caller sent this salt."""
        if salt in self._salts:
            self._salts.move_to_end(salt)
            return
        self._salts[salt] = None
        if len(self._salts) > MAX_SALTS:
            old = next(each for each in self._salts if each is not None)
            del self._salts[old]
            self._by_engine.pop(self._engine_side(old), None)
        if self._scope == self._worker.salt_scope:
            self._by_engine[self._engine_side(salt)] = salt

    def of(self, salt: str | None, adapter: str | None) -> Scope | None:
        """See `ScopeOf`."""
        if self._scope != self._worker.salt_scope:
            self._scope = self._worker.salt_scope
            self._by_engine = {self._engine_side(each): each for each in self._salts}
        if salt not in self._by_engine:
            return None
        sent = self._by_engine[salt]
        if adapter is None:
            return Scope(sent, None)
        table = self._worker.adapter_table
        for record in table.records() if table is not None else ():
            if record.engine_name == adapter and record.state == "ready":
                return Scope(sent, record.name)
        return None

    def _engine_side(self, salt: str | None) -> str | None:
        return engine_salt(salt, scope=self._worker.salt_scope)
