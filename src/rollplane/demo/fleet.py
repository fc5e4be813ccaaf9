"""A fleet for the demo: a frontend and its workers as child processes in a process group of their own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rollplane.errors import Unavailable


class Fleet:
    """`rollplane serve` with the embedded engine, for the length of a `with` block.

    Leaving the block, by whatever way, ends every process: asked to drain, told to end, at last killed.

    Args:
        model: checkpoint directory; its name is the first policy version.
        workers: engines behind the frontend.
        dtype: of the engines' weights, such as `bfloat16`.
        slots: sequences that an engine runs at once.
        max_model_len: tokens of the longest sequence.
        log: file for what the processes print.
        start_timeout_s: how long it may take to become ready.
        stop_timeout_s: how long each of the first two may take.

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
        self._process: subprocess.Popen[bytes] | None = None

    def command(self, ready: Path) -> list[str]:
        """What to execute; it writes `ready`, a JSON line with the frontend's `url`, once it serves."""
        options = {
            "--engine": "embedded",
            "--model": self.model,
            "--workers": self.workers,
            "--dtype": self.dtype,
            "--max-num-seqs": self.slots,
            "--max-model-len": self.max_model_len,
            "--root": self.model.parent,
            "--port": 0,
            "--ready-file": ready,
            "--drain-s": 2,
            "--log-level": "warning",
        }
        words = [str(word) for option in options.items() for word in option]
        return [sys.executable, "-m", "rollplane.cli.main", "serve", "--stop-with-stdin", *words]

    def __repr__(self) -> str:
        state = "stopped" if self._process is None else f"pid {self._process.pid}"
        return f"<Fleet {self.model.name} workers={self.workers} {self.dtype} {state}>"

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ready = self.log.with_suffix(".ready")  # in the run's directory: a killed run leaves nothing elsewhere
        ready.unlink(missing_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(ready),
                stdin=subprocess.PIPE,  # ours until the end of this process, however it ends
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
            try:
                self.base_url = self._wait_until(ready)
            except BaseException:
                self._stop()
                raise
            finally:
                ready.unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def log_tail(self, *, lines: int = 20) -> str:
        """The end of what the processes printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_until(self, ready: Path) -> str:
        """The frontend's URL, once it serves."""
        process = self._process
        deadline = time.monotonic() + self.start_timeout_s
        while process is not None and process.poll() is None:
            if ready.exists() and (line := ready.read_text()).endswith("\n"):
                return str(json.loads(line)["url"])
            if time.monotonic() > deadline:
                raise Unavailable(f"the fleet was not ready within {self.start_timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.05)
        code = None if process is None else process.returncode
        raise Unavailable(f"the fleet ended with code {code} before it was ready:\n{self.log_tail()}")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            for _ in range(2):  # asked once, `serve` drains; asked again, it kills what it started and ends
                _signal_group(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.stop_timeout_s)
                    break
        finally:
            # Also where the leader is gone. Workers have groups of their own; they end when `serve` does.
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
