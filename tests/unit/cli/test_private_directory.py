"""The directory of one `serve`: private, and gone with the last process that uses it, however that ended."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollplane.cli.private_directory import LOCK, PREFIX, private_directory

KILLED = """
import os, signal, subprocess, sys
from rollplane.cli.private_directory import private_directory
with private_directory() as (path, lock):
    (path / "control.json").write_text("{}")
    child = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    if sys.argv[1] == "child":
        subprocess.Popen(child, pass_fds=(lock,), stdout=subprocess.DEVNULL)
    print(path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_it_is_private_and_goes_with_the_block(parent: Path) -> None:
    with private_directory() as (path, lock):
        assert path.parent == parent
        assert path.stat().st_mode & 0o777 == 0o700
        assert not os.get_inheritable(lock)
        (path / "control.json").write_text("{}")
    assert list(parent.iterdir()) == []


def test_one_that_is_in_use_is_left_alone(parent: Path) -> None:
    with private_directory() as (first, _), private_directory() as (second, _):
        assert first.is_dir()
        assert second.is_dir()


def test_what_a_killed_process_left_is_removed_by_the_next(parent: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, "alone"], stdout=subprocess.PIPE, text=True, timeout=30)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    with private_directory() as (path, _):
        assert [found.name for found in parent.iterdir()] == [path.name]


def test_what_a_killed_process_left_stays_while_a_child_uses_it(parent: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, "child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdin is not None
        left = Path(killed.stdout.readline().strip())
        killed.wait(timeout=30)
        with private_directory():
            assert (left / "control.json").is_file()
        killed.stdin.close()  # the child ends


@pytest.mark.parametrize("kind", ["without a lock", "a link"])
def test_what_is_not_surely_ours_is_left_alone(kind: str, parent: Path) -> None:
    precious = parent / "precious"
    precious.mkdir()
    found = parent / f"{PREFIX}1"
    if kind == "a link":
        (precious / LOCK).touch()
        found.symlink_to(precious)
    else:
        found.mkdir()
    with private_directory():
        assert found.exists()
        assert precious.is_dir()
