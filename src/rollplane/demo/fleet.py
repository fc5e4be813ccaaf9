"""A fleet for the demo: a frontend and its workers as child processes in a process group of their own."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from rollplane.errors import Unavailable


class Fleet:
    """`rollplane serve` with the embedded engine, for the length of a `with` block.

    Leaving the block, by whatever way, ends every process of the group: asked first, killed after `stop_timeout_s`.

    Args:
        model: checkpoint directory; its name is the first policy version.
        workers: engines behind the frontend.
        dtype: of the engines' weights, such as `bfloat16`.
        slots: sequences that an engine runs at once.
        max_model_len: tokens of the longest sequence.
        log: file for what the processes print.
        start_timeout_s: how long it may take to become ready.
        stop_timeout_s: how long it may take to end.

    Raises:
        Unavailable: the fleet ended, or did not become ready in time; with the end of its log.
    """

    def __init__(
        self,
        model: Path,
        *,
        workers: int,
        dtype: str,
        slots: int,
        max_model_len: int,
        log: Path,
        start_timeout_s: float = 180.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        self.model = model
        self.workers = workers
        self.dtype = dtype
        self.slots = slots
        self.max_model_len = max_model_len
        self.log = log
        self.start_timeout_s = start_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.base_url = ""
        self.admin_key = secrets.token_urlsafe(16)
        self._process: subprocess.Popen[bytes] | None = None

    def command(self, port: int) -> list[str]:
        """What to execute for a frontend on `port`."""
        command = [sys.executable, "-m", "rollplane.cli.main", "serve"]
        command += ["--engine", "embedded", "--model", str(self.model), "--workers", str(self.workers)]
        return [*command, "--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype]

    def __repr__(self) -> str:
        state = "stopped" if self._process is None else f"pid {self._process.pid}"
        return f"<Fleet {self.model.name} workers={self.workers} {self.dtype} {state}>"

    def __enter__(self) -> Self:
        port = _free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def log_tail(self, *, lines: int = 20) -> str:
        """The end of what the processes printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_until_ready(self) -> None:
        process = self._process
        deadline = time.monotonic() + self.start_timeout_s
        while process is not None and process.poll() is None:
            if _answers(f"{self.base_url}/health"):
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"the fleet was not ready within {self.start_timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.1)
        code = None if process is None else process.returncode
        raise Unavailable(f"the fleet ended with code {code} before it was ready:\n{self.log_tail()}")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(self.stop_timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also where the leader is gone: a worker that outlived it is still in the group.
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
