"""When a worker is left out: a circuit that only faults of the worker itself open. No I/O.

Rules for editors of the table: `open` is entered by `faults_to_open` faults in a row, or by a failed probe; it is left by
time. `half_open` lets one request through, whose outcome decides. A caller's mistake, a refused precondition and an
overload are no faults: they say that the worker answers.

    closed -> open -> half_open -> closed
                ^---------'
"""

import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from rollplane.errors import EngineProtocolError, PeerError, RollplaneError

CircuitState = Literal["closed", "open", "half_open"]

TRANSITIONS: Final[dict[CircuitState, frozenset[CircuitState]]] = {
    "closed": frozenset({"open"}),
    "open": frozenset({"half_open"}),
    "half_open": frozenset({"open", "closed"}),
}


class CircuitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`faults_to_open`: faults in a row. `first_s`, `longest_s`: time until a probe, doubling with each failed one."""

    faults_to_open: int = 3
    first_s: float = 1.0
    longest_s: float = 30.0


class Circuit:
    """One worker's circuit.

    Args:
        clock: monotonic seconds.
        on_change: called after every change of its state.
    """

    def __init__(
        self,
        settings: CircuitSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings or CircuitSettings()
        self.faults = 0
        """Faults since the last success."""
        self._state: CircuitState = "closed"
        self._until = 0.0
        self._probing = False
        self._pause_s = self.settings.first_s
        self._clock = clock
        self._on_change = on_change

    def __repr__(self) -> str:
        return f"<Circuit {self.state} {self.faults} faults>"

    @property
    def state(self) -> CircuitState:
        """Where it is now; `open` turns to `half_open` by time."""
        if self._state == "open" and self._clock() >= self._until:
            self._enter("half_open")
        return self._state

    @property
    def closed(self) -> bool:
        """Whether nothing is known against its worker."""
        return self._state == "closed"

    @property
    def admits(self) -> bool:
        """Whether a request may be sent: always while closed, one probe while half open."""
        return self._state == "closed" or self.state != "open"

    @property
    def reopens_in_s(self) -> float:
        """Seconds until a probe may be sent; 0 where one may be sent now."""
        return max(self._until - self._clock(), 0.0) if self.state == "open" else 0.0

    def sent(self) -> None:
        """A request was placed: while half open it is the probe, and no other follows until its outcome is known."""
        if self.state == "half_open":
            self._enter("open")
            self._until = self._clock() + self._pause_s
            self._probing = True

    def succeeded(self) -> None:
        """An answer came, also a refusal."""
        self.faults = 0
        self._probing = False
        self._pause_s = self.settings.first_s
        if self._state != "closed":
            if self._state == "open":
                self._enter("half_open")
            self._enter("closed")

    def failed(self) -> None:
        """The worker or the connection to it failed."""
        self.faults += 1
        if self.state == "closed" and self.faults < self.settings.faults_to_open:
            return
        if self.state == "open" and not self._probing:
            return  # sent before it opened: a burst that breaks off together is one fault, not many probes
        self._probing = False
        if self.state == "closed":
            self._pause_s = self.settings.first_s
        else:
            self._pause_s = min(self._pause_s * 2, self.settings.longest_s)
        if self._state != "open":
            self._enter("open")
        self._until = self._clock() + self._pause_s

    def _enter(self, state: CircuitState) -> None:
        if state not in TRANSITIONS[self._state]:
            raise RollplaneError(f"no way from a circuit's {self._state} to {state}")
        self._state = state
        self._on_change()


def is_fault(error: RollplaneError) -> bool:
    """Whether an error speaks against the worker: engine and transport faults, never a caller's or a limit."""
    return isinstance(error, PeerError)


def may_move(error: RollplaneError) -> bool:
    """Whether another worker may do better, before anything of the answer was handed on."""
    return isinstance(error, PeerError) and not isinstance(error, EngineProtocolError)
