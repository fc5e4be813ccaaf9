"""Facts about what a run shows while it runs."""

import io

from rich.console import Console

from rollplane.demo.phases import Phases


def shown(*, terminal, quiet_s=5.0):
    text = io.StringIO()
    with Phases(Console(file=text, force_terminal=terminal, width=80), quiet_s=quiet_s) as phases:
        imitating = phases.begin("imitate", total=3)
        for _ in range(3):
            imitating.advance()
        learning = phases.begin("GRPO", total=2)
        learning.advance("reward 0.25")
        learning.advance("reward 0.50")
        phases.begin("stress", total=None).end()
    return text.getvalue()


def test_without_a_terminal_every_phase_and_step_is_a_line():
    lines = [line.rsplit(" (", 1)[0] for line in shown(terminal=False).splitlines()]
    assert lines == [
        "imitate: begins",
        "imitate: 3/3",
        "GRPO: begins",
        "GRPO: 1/2 reward 0.25",
        "GRPO: 2/2 reward 0.50",
        "stress: begins",
        "stress: done",
    ]


def test_steps_without_a_note_are_said_now_and_then():
    assert "imitate: 1/3" in shown(terminal=False, quiet_s=0.0)


def test_a_line_is_there_when_its_step_is_done():
    text = io.TextIOWrapper(io.BytesIO())
    with Phases(Console(file=text)) as phases:
        phases.begin("GRPO", total=2).advance("reward 0.25")
        assert b"GRPO: 1/2 reward 0.25" in text.buffer.getvalue()


def test_on_a_terminal_bars_move():
    text = shown(terminal=True)
    assert "\x1b[" in text
    assert "2/2" in text
    assert "begins" not in text
