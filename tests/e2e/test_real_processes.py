import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from tests.real import processes

# A server whose child sits in a process group of its own and ignores the polite signal, as an engine may.
STUBBORN = """
import http.server, os, signal, subprocess, sys
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ending_a_server_ends_its_descendants_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (port,) = processes.free_ports(1)
    command = [sys.executable, "-c", STUBBORN, str(port)]
    with processes.running(command, log, environment={}, stop_s=0.5) as process:
        processes.wait_for_http(f"http://127.0.0.1:{port}/none", process, log, timeout_s=20)  # a 404 is an answer
        child = int(log.read_text().split()[0])
        assert is_running(child)
        assert os.getpgid(child) != os.getpgid(process.pid)
    assert process.returncode is not None
    assert not is_running(child)


HOLDER = """
import sys
from pathlib import Path
from tests.real import processes
with processes.running([sys.executable, "-c", sys.argv[1], sys.argv[2]], Path(sys.argv[3]), environment={}) as process:
    processes.wait_for_http(f"http://127.0.0.1:{sys.argv[2]}/none", process, Path(sys.argv[3]), timeout_s=20)
    print(process.pid, flush=True)
    sys.stdin.read()
"""


def test_a_killed_test_run_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (port,) = processes.free_ports(1)
    command = [sys.executable, "-c", HOLDER, STUBBORN, str(port), str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=processes.ROOT) as holder:
        assert holder.stdout is not None
        server = int(holder.stdout.readline())
        found = [server, int(log.read_text().split()[0])]
        handles = [os.pidfd_open(pid) for pid in found]
        holder.kill()
        ended = [bool(select.select([handle], [], [], 20)[0]) for handle in handles]
    for handle in handles:
        os.close(handle)
    assert ended == [True, True]


def test_a_command_that_is_none_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="could not be run"),
        processes.running([str(tmp_path / "none")], tmp_path / "log", environment={}),
    ):
        pass


def test_a_server_that_ends_early_fails_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        processes.running(command, log, environment={}) as process,
        pytest.raises(RuntimeError, match="ended with 1:\nno such model"),
    ):
        processes.wait_for_http("http://127.0.0.1:1/health", process, log, timeout_s=20)


def test_a_missing_environment_names_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "VLLM_ENV", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"scripts/make_vllm_env\.sh"), processes.vllm_rs(tmp_path, tmp_path):
        pass


def test_ports_differ_and_stay_below_the_limit() -> None:
    ports = processes.free_ports(5, highest=32_767)
    assert len(set(ports)) == 5
    assert all(20_000 <= port <= 32_767 for port in ports)
