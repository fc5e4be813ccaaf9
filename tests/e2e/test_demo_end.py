"""The demo stopped in the middle: none of its processes is left."""

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest
from tests.e2e.commands import demo

FLEET_LOG = "fleet.log"


def descendants(pid):
    """Every process below `pid`."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


def ignore_sigint():
    """As a shell without job control does for what it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),  # SIGTERM goes its way
        (signal.SIGTERM, 130),
        (signal.SIGKILL, -9),
    ],
)
def test_an_interrupted_demo_leaves_no_process(tmp_path, number, code):
    out, said = tmp_path / "run", tmp_path / "output.log"
    command = demo("--steps", "500", "--out", str(out), imitation_steps=2)
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=ignore_sigint)
    descriptors = [os.pidfd_open(process.pid)]
    try:
        answered = out / "rollouts" / "before.npz"  # written once the fleet has answered
        for _ in range(1200):
            if answered.exists() or select.select(descriptors, [], [], 0.1)[0]:
                break
        assert answered.exists(), f"{said.read_text()}\n{(out / FLEET_LOG).read_text()}"
        below = descendants(process.pid)
        assert len(below) >= 4, "serve, a frontend and two workers"
        descriptors += [os.pidfd_open(pid) for pid in below]
        process.send_signal(number)
        assert process.wait(30) == code, said.read_text()
        assert all(select.select([one], [], [], 20)[0] for one in descriptors)
    finally:
        process.kill()
        process.wait()
        for one in descriptors:
            os.close(one)
