import pytest

from rollplane.errors import (
    EngineDied,
    EngineFailed,
    EngineProtocolError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PreconditionFailed,
    RollplaneError,
    TransportError,
    Unavailable,
)
from rollplane.router.health import Circuit, CircuitSettings, is_fault, may_move


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def circuit(clock: Clock) -> Circuit:
    return Circuit(CircuitSettings(faults_to_open=3, first_s=1.0, longest_s=3.0), clock=clock)


def test_faults_in_a_row_open_it_and_a_success_between_starts_over(circuit: Circuit) -> None:
    circuit.failed()
    circuit.failed()
    circuit.succeeded()
    circuit.failed()
    circuit.failed()
    assert circuit.admits
    circuit.failed()
    assert not circuit.admits
    assert circuit.reopens_in_s == 1.0


def test_half_open_lets_one_probe_through_and_its_outcome_decides(circuit: Circuit, clock: Clock) -> None:
    for _ in range(3):
        circuit.failed()
    clock.now += 1.0
    assert circuit.state == "half_open"
    circuit.sent()
    assert not circuit.admits
    circuit.succeeded()
    assert repr(circuit) == "<Circuit closed 0 faults>"


def test_each_failed_probe_doubles_the_pause_up_to_the_longest(circuit: Circuit, clock: Clock) -> None:
    for _ in range(3):
        circuit.failed()
    pauses = []
    for _ in range(3):
        clock.now += circuit.reopens_in_s
        circuit.sent()
        circuit.failed()
        pauses.append(circuit.reopens_in_s)
    assert pauses == [2.0, 3.0, 3.0]


def test_requests_that_break_off_together_count_once(circuit: Circuit, clock: Clock) -> None:
    for _ in range(40):
        circuit.failed()
    assert circuit.reopens_in_s == 1.0


def test_a_probe_whose_outcome_never_came_is_followed_by_another(circuit: Circuit, clock: Clock) -> None:
    for _ in range(3):
        circuit.failed()
    clock.now += 1.0
    circuit.sent()
    clock.now += 1.0
    assert circuit.admits


@pytest.mark.parametrize(
    ("error", "fault", "moves"),
    [
        (InvalidRequest("no"), False, False),
        (NotFound("no"), False, False),
        (PreconditionFailed("no"), False, False),
        (Overloaded("no"), False, False),
        (Unavailable("no"), False, False),
        (EngineFailed("no"), True, True),
        (EngineDied("no"), True, True),
        (TransportError("no"), True, True),
        (EngineProtocolError("no"), True, False),
    ],
)
def test_only_engine_and_transport_faults_count(error: RollplaneError, fault: bool, moves: bool) -> None:
    assert is_fault(error) is fault
    assert may_move(error) is moves
