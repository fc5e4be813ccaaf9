"""Facts about the demo's command: its exit codes and what it says."""

import signal

import pytest
import typer
from typer.testing import CliRunner

from rollplane.demo import command, run
from rollplane.demo.grpo import StepFailed


@pytest.fixture
def invoke(monkeypatch):
    """Call the command with a run of the test's own; SIGTERM's handler is put back."""
    before = signal.getsignal(signal.SIGTERM)
    app = typer.Typer()
    app.command()(command.demo)

    def call(outcome, *arguments):
        def stub(options, console):
            if isinstance(outcome, BaseException):
                raise outcome
            return {"checks": outcome, "options": options}

        monkeypatch.setattr(run, "run", stub)
        return CliRunner().invoke(app, list(arguments))

    yield call
    signal.signal(signal.SIGTERM, before)


def test_a_run_whose_checks_hold_ends_with_0(invoke):
    assert invoke({"no_request_lost": True}).exit_code == 0


def test_a_failed_step_is_named_and_ends_with_1(invoke):
    result = invoke(StepFailed("step 7: 1 of 16 requests were lost"))
    assert result.exit_code == 1
    assert "demo failed: step 7: 1 of 16 requests were lost" in result.stdout


def test_a_broken_check_is_named_and_ends_with_1(invoke):
    result = invoke({"no_request_lost": True, "stress_gain_at_least_20": False})
    assert result.exit_code == 1
    assert "demo failed: stress_gain_at_least_20" in result.stdout


def test_a_full_disk_is_said_and_ends_with_1(invoke):
    result = invoke(OSError(28, "No space left on device", "report.json"))
    assert result.exit_code == 1
    assert "demo failed: [Errno 28] No space left on device: 'report.json'" in result.stdout


def test_an_interrupt_ends_with_130(invoke):
    assert invoke(KeyboardInterrupt()).exit_code == 130


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "4"], ["--workers", "0"], ["--engine-dtype", "float16"], ["--seed", "-1"], ["--seed", str(2**31)]],
)
def test_options_out_of_range_end_with_2(invoke, arguments):
    assert invoke({}, *arguments).exit_code == 2
