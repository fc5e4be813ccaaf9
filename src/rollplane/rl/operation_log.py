"""What happens in an operation, event by event: for whoever watches it, also from its middle on or after its end.

Bounded: the last `MAX_EVENTS` events of an operation, whole logs of the last `MAX_WHOLE` operations that ended, and of
`MAX_LOGS` how they ended.
"""

import asyncio
import time
from collections import OrderedDict, deque
from typing import Any, Final, Protocol

from rollplane.errors import RollplaneError
from rollplane.protocol.admin import OperationEvent, OperationEventKind

MAX_EVENTS: Final = 1000
MAX_WHOLE: Final = 32
MAX_LOGS: Final = 256


class Tell(Protocol):
    """Notes a step of an operation."""

    def __call__(
        self,
        phase: str,
        *,
        worker: str | None = None,
        seconds: float | None = None,
        error: RollplaneError | None = None,
    ) -> None:
        """`worker` None: the phase begins; else it ended on this worker, with `error` where it failed."""
        ...


def tell_nobody(
    phase: str, *, worker: str | None = None, seconds: float | None = None, error: RollplaneError | None = None
) -> None:
    """For an operation without a name."""


class OperationLog:
    """The events of one operation, over all of its steps."""

    def __init__(self, operation_id: str) -> None:
        self.operation_id = operation_id
        self.outcomes: dict[int, str] = {}
        """By step: `running`, `done` or the sentence of its error."""
        self._events: deque[OperationEvent] = deque(maxlen=MAX_EVENTS)
        self._count = 0
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<OperationLog {self.operation_id} {self._count} events, {'running' if self.running else 'ended'}>"

    @property
    def running(self) -> bool:
        """Whether a step of it runs."""
        return "running" in self.outcomes.values()

    @property
    def changed(self) -> asyncio.Event:
        """Set once, at the next event; take it before you look."""
        return self._changed

    def since(self, number: int) -> list[OperationEvent]:
        """The kept events after this number, in order."""
        return [event for event in self._events if event.number > number]

    def began(self, step: int, what: str) -> None:
        """A step begins, for the first time or again after it failed."""
        self.outcomes[step] = "running"
        self._add(step, "began", what=what)

    def done(self, step: int, report: dict[str, Any] | None) -> None:
        """A step ended well."""
        self.outcomes[step] = "done"
        self._add(step, "done", report=report)

    def failed(self, step: int, error: RollplaneError) -> None:
        """A step failed."""
        self.outcomes[step] = error.message
        self._add(step, "failed", error=error.message, code=error.code, details=error.details)

    def teller(self, step: int) -> Tell:
        """Notes what happens in a step."""

        def tell(
            phase: str, *, worker: str | None = None, seconds: float | None = None, error: RollplaneError | None = None
        ) -> None:
            said = None if error is None else error.message
            rounded = None if seconds is None else round(seconds, 4)
            kind: OperationEventKind = "phase" if worker is None else "worker"
            self._add(step, kind, phase=phase, worker=worker, seconds=rounded, error=said)

        return tell

    def shorten(self) -> None:
        """Keep how it ended and nothing else."""
        ends = [event for event in self._events if event.event in ("done", "failed")]
        self._events = deque(ends, maxlen=MAX_EVENTS)

    def _add(self, step: int, event: OperationEventKind, **fields: Any) -> None:
        self._count += 1
        self._events.append(
            OperationEvent(number=self._count, at_s=round(time.time(), 3), step=step, event=event, **fields)
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class OperationLogs:
    """The logs of one control owner, by operation id."""

    def __init__(self) -> None:
        self._logs: OrderedDict[str, OperationLog] = OrderedDict()
        self._opened = asyncio.Event()

    def __repr__(self) -> str:
        running = sum(log.running for log in self._logs.values())
        return f"<OperationLogs {running} running of {len(self._logs)}>"

    @property
    def opened(self) -> asyncio.Event:
        """Set once, when the next operation begins; take it before you look."""
        return self._opened

    def find(self, operation_id: str) -> OperationLog | None:
        """The log of an operation; None where nothing is known of it."""
        return self._logs.get(operation_id)

    def open(self, operation_id: str) -> OperationLog:
        """The log of an operation that begins now, which is its old one where there is one."""
        log = self._logs.pop(operation_id, None) or OperationLog(operation_id)
        self._logs[operation_id] = log
        ended = [known for known in self._logs.values() if known is not log and not known.running]
        for old in ended[: max(len(ended) - MAX_WHOLE, 0)]:
            old.shorten()
        for old in ended[: max(len(ended) - MAX_LOGS, 0)]:
            del self._logs[old.operation_id]
        opened, self._opened = self._opened, asyncio.Event()
        opened.set()
        return log
