"""Facts about the life of the demo's processes, with small scripts in place of servers."""

import contextlib
import os
import select
import sys
import textwrap

import pytest

from rollplane.demo.fleet import Fleet
from rollplane.errors import Unavailable

SERVER = """
import json, os, pathlib, signal, subprocess, sys
ready, directory, temper = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
if temper == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
worker = subprocess.Popen([sys.executable, "-c", deaf])
(directory / "pids").write_text(f"{os.getpid()} {worker.pid}")
ready.write_text(json.dumps({"url": "http://127.0.0.1:4321"}) + chr(10))
signal.pause()
"""


class ScriptFleet(Fleet):
    def __init__(self, script, directory, *arguments, **timeouts):
        super().__init__(
            directory / "v0",
            workers=1,
            dtype="float32",
            slots=1,
            max_model_len=8,
            log=directory / "fleet.log",
            **timeouts,
        )
        self.script = textwrap.dedent(script)
        self.arguments = [str(directory), *arguments]

    def command(self, ready):
        return [sys.executable, "-c", self.script, str(ready), *self.arguments]


class Watch:
    """Whether processes have ended, by pid descriptors: no polling, and no other process can take the number."""

    def __init__(self, directory):
        self.pids = [int(pid) for pid in (directory / "pids").read_text().split()]
        self.descriptors = [os.pidfd_open(pid) for pid in self.pids]

    def ended(self, within_s):
        try:
            return [bool(select.select([one], [], [], within_s)[0]) for one in self.descriptors]
        finally:
            for one in self.descriptors:
                os.close(one)


@pytest.mark.parametrize("temper", ["obedient", "stubborn"])
def test_no_process_outlives_the_block(tmp_path, temper):
    with ScriptFleet(SERVER, tmp_path, temper, stop_timeout_s=0.5) as fleet:
        assert Watch(tmp_path).ended(within_s=0) == [False, False]
        watch = Watch(tmp_path)
        assert repr(fleet) == f"<Fleet v0 workers=1 float32 pid {watch.pids[0]}>"
        assert fleet.base_url == "http://127.0.0.1:4321"
    assert watch.ended(within_s=5) == [True, True]
    assert repr(fleet) == "<Fleet v0 workers=1 float32 stopped>"


def test_no_process_outlives_an_interrupt(tmp_path):
    watch = None
    with contextlib.suppress(KeyboardInterrupt), ScriptFleet(SERVER, tmp_path, "obedient", stop_timeout_s=0.5):
        watch = Watch(tmp_path)
        raise KeyboardInterrupt
    assert watch.ended(within_s=5) == [True, True]


def test_a_fleet_that_ends_at_once_says_why(tmp_path):
    fleet = ScriptFleet("import sys; sys.exit('no such model')", tmp_path)
    with pytest.raises(Unavailable, match=r"(?s)ended with code 1 before it was ready:.*no such model"):
        fleet.__enter__()


def test_a_fleet_that_never_answers_is_ended(tmp_path):
    script = """
    import os, pathlib, signal, sys
    (pathlib.Path(sys.argv[2]) / "pids").write_text(str(os.getpid()))
    signal.pause()
    """
    with pytest.raises(Unavailable, match="not ready within 4 s"):
        ScriptFleet(script, tmp_path, start_timeout_s=4.0).__enter__()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pids").read_text()), 0)
