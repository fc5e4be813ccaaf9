import math

from rollplane.engines.mock.step_clock import StepClock


def test_steps_pass_at_the_rate_of_the_batch() -> None:
    clock = StepClock(step_s=0.01, step_per_sequence_s=0.001)
    clock.run(0.0, sequences=10)
    clock.move_to(0.2)
    assert clock.whole == 10
    clock.run(0.2, sequences=90)
    clock.move_to(0.4)
    assert clock.whole == 12
    assert math.isclose(clock.seconds_until(14), 0.2)


def test_a_stopped_clock_stands_still() -> None:
    clock = StepClock(step_s=0.01, step_per_sequence_s=0.0)
    clock.run(0.0, sequences=1)
    clock.stop(0.055)
    clock.move_to(9.0)

    assert clock.whole == 5
    assert clock.seconds_until(6) == math.inf
    assert "stopped" in repr(clock)


def test_an_idle_clock_stops_at_the_end_of_a_step() -> None:
    clock = StepClock(step_s=0.01, step_per_sequence_s=0.0)
    clock.run(0.0, sequences=1)
    clock.run(0.055, sequences=0)

    assert clock.steps == 5.0


def test_instant_steps_are_ticked() -> None:
    clock = StepClock(step_s=0.0, step_per_sequence_s=0.0)
    clock.run(0.0, sequences=3)
    clock.move_to(100.0)
    clock.tick()

    assert clock.instant
    assert clock.whole == 1
