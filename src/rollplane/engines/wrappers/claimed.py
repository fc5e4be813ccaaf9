"""Request ids that live in one of several processes: whoever has an id first has it, the others send its requests there.

A claim is a symbolic link in a shared directory whose name is the id's hash and whose target is the process's number:
made and looked up in one step of the system, without a process to ask. What a process that ended left behind is dropped
by its successor, or by the first one that finds it gone.
"""

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Final

import xxhash

from rollplane.engines.base import Engine, close_events
from rollplane.errors import Unavailable
from rollplane.protocol.events import Event
from rollplane.protocol.info import EngineHealth, EngineInfo
from rollplane.protocol.request import GenerateRequest

TRIES: Final = 8


class Claims:
    """The ids of all processes.

    Args:
        directory: shared by them, and nobody else's.
        process: our number.
    """

    def __init__(self, directory: Path, *, process: int) -> None:
        self.directory = directory
        self.process = process

    def __repr__(self) -> str:
        return f"<Claims of process {self.process} in {self.directory}>"

    def take(self, request_id: str) -> int:
        """The process that has the id: ours where nobody had it.

        Raises:
            Unavailable: it changes hands too fast to tell.
        """
        path = self._path(request_id)
        for _ in range(TRIES):
            try:
                path.symlink_to(str(self.process))
            except FileExistsError:
                holder = self.holder(request_id)
                if holder is not None:
                    return holder
            else:
                return self.process
        raise Unavailable(f"request_id {request_id!r} is taken and let go all the time", retry_after_s=1.0)

    def holder(self, request_id: str) -> int | None:
        """The process that has the id, None where none has."""
        try:
            return int(self._path(request_id).readlink().name)
        except FileNotFoundError:
            return None

    def drop(self, request_id: str) -> None:
        """Let go of an id of ours."""
        self._path(request_id).unlink(missing_ok=True)

    def drop_all_of(self, process: int) -> None:
        """Let go of every id of a process that has ended."""
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.readlink().name == str(process):
                    path.unlink()

    def _path(self, request_id: str) -> Path:
        return self.directory / xxhash.xxh3_128_hexdigest(request_id.encode())


class ClaimedIds:
    """An engine that runs a request where its id lives.

    Args:
        engine: of this process.
        other: the engine of another process by its number; None where that has ended.
    """

    def __init__(self, engine: Engine, claims: Claims, *, other: Callable[[int], Engine | None]) -> None:
        self.engine = engine
        self.claims = claims
        self._other = other
        self._ours: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<ClaimedIds {len(self._ours)} of process {self.claims.process} over {self.engine!r}>"

    @property
    def info(self) -> EngineInfo:
        """The inner engine's facts."""
        return self.engine.info

    async def start(self) -> None:
        """Start the inner engine."""
        await self.engine.start()

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Close the inner engine."""
        await self.engine.close(grace_s=grace_s)

    async def health(self) -> EngineHealth:
        """The inner engine's health."""
        return await self.engine.health()

    async def abort(self, request_id: str) -> int:
        """End a request in whichever process it is."""
        there = self._elsewhere(request_id, self.claims.holder(request_id))
        return await (self.engine if there is None else there).abort(request_id)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Run the request here, or where its id lives; see `Engine.generate`."""
        request_id = request.request_id
        there: Engine | None = None
        if request_id not in self._ours:
            for _ in range(TRIES):
                holder = self.claims.take(request_id)
                there = self._elsewhere(request_id, holder)
                if there is not None or holder == self.claims.process:
                    break
        if there is not None:
            async for event in there.generate(request):
                yield event
            return
        self._ours[request_id] += 1
        events = self.engine.generate(request)
        try:
            async for event in events:
                yield event
        finally:
            await close_events(events)
            self._ours[request_id] -= 1
            if not self._ours[request_id]:
                del self._ours[request_id]
                self.claims.drop(request_id)

    def _elsewhere(self, request_id: str, holder: int | None) -> Engine | None:
        if holder is None or holder == self.claims.process:
            return None
        there = self._other(holder)
        if there is None:
            self.claims.drop_all_of(holder)
        return there
