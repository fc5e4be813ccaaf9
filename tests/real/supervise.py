"""Runs a command and ends with everything that it started, however its own caller ends.

    python supervise.py PID_DESCRIPTOR GRACE_S COMMAND ARGUMENT...

The caller holds the other end of standard input and never writes. Once that closes, which the kernel sees to even where the
caller is killed, the command and all its descendants are killed. Descendants that lose their parent become this process's
children instead of the first process's (`PR_SET_CHILD_SUBREAPER`), so that none is lost. The command's id is written to
the descriptor; a SIGTERM is passed on to it, and its exit status is this process's. Once it has ended, its descendants have
GRACE_S seconds to follow.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    pid_descriptor, grace_s, words = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    if LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    command = subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=_end_with_supervisor)
    signal.signal(signal.SIGTERM, lambda number, frame: command.send_signal(number))
    os.write(pid_descriptor, str(command.pid).encode())
    os.close(pid_descriptor)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        wanted = True
        while wanted and command.poll() is None:
            wanted = _is_wanted(selector, timeout_s=None)
        ends = time.monotonic() + grace_s
        while wanted and (left_s := ends - time.monotonic()) > 0 and _has_children():
            wanted = _is_wanted(selector, timeout_s=left_s)
    _kill_all()
    if command.returncode is None:
        return 128 + signal.SIGKILL
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def _end_with_supervisor() -> None:
    """In the command, before it runs: should this process itself be killed, at least the command is too."""
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _is_wanted(selector: selectors.BaseSelector, *, timeout_s: float | None) -> bool:
    """Wait for a signal, for the end of standard input or for the time; False where the input has ended."""
    for key, _ in selector.select(timeout_s):
        with contextlib.suppress(BlockingIOError):
            if not os.read(key.fd, 4096):
                return False
    return True


def _has_children() -> bool:
    """Whether any is left, after burying the dead ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _kill_all() -> None:
    """Kill children until there are none: those of a killed child become ours."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for pid in children.read_text(encoding="ascii").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main())
