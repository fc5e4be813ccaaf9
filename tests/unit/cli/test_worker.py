"""What `rollplane worker` sets in its process before its engine is made."""

import os
import subprocess
import sys

import pytest

from rollplane.cli.worker import GRPC_EXPERIMENTS, GRPC_THREADS_OFF, spare_grpc_threads

OPENS_A_CHANNEL = """
import grpc
try:
    grpc.channel_ready_future(grpc.insecure_channel("127.0.0.1:1")).result(timeout=0.05)
except grpc.FutureTimeoutError:
    pass
"""


def test_grpc_is_told_to_read_its_sockets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRPC_EXPERIMENTS, "")  # so that what is set below is taken back
    monkeypatch.delenv(GRPC_EXPERIMENTS)
    spare_grpc_threads()
    assert os.environ[GRPC_EXPERIMENTS] == GRPC_THREADS_OFF


def test_what_the_operator_set_for_grpc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRPC_EXPERIMENTS, "")
    spare_grpc_threads()
    assert os.environ[GRPC_EXPERIMENTS] == ""


@pytest.mark.parametrize(("switch", "is_known"), [(GRPC_THREADS_OFF, True), ("-no_such_switch", False)])
def test_this_grpc_knows_the_switch(switch: str, is_known: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPENS_A_CHANNEL],
        env={**os.environ, GRPC_EXPERIMENTS: switch},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ("Unknown experiment" not in done.stderr) is is_known
