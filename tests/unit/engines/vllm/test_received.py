"""Where received weights lie, and who removes them."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollplane.engines.vllm.received import ReceivedWeights
from rollplane.errors import EngineFailed


def test_all_but_the_named_directory_go(tmp_path: Path) -> None:
    received = ReceivedWeights(str(tmp_path))
    one, two = (str(received.make(10)) for _ in range(2))

    received.drop_all(but=two)

    assert received.paths == [two]
    assert [path.name for path in tmp_path.iterdir()] == [Path(two).name]
    assert Path(one) != Path(two)
    received.drop_all()
    assert list(tmp_path.iterdir()) == []


def test_what_an_ended_process_left_is_removed_and_what_another_one_holds_is_not(tmp_path: Path) -> None:
    held, left = ReceivedWeights(str(tmp_path)), ReceivedWeights(str(tmp_path))
    kept, orphan = held.make(1), left.make(1)
    (orphan / "000000.safetensors").write_bytes(b"x")
    (tmp_path / "rollplane-weights-not-ours").mkdir()  # without a lock it is nobody's of ours
    left.release()

    made = ReceivedWeights(str(tmp_path)).make(1)

    assert kept.is_dir()
    assert made.is_dir()
    assert not orphan.exists()
    assert (tmp_path / "rollplane-weights-not-ours").is_dir()


def test_the_next_root_is_taken_where_the_first_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for root in (small, large):
        root.mkdir()
    free = {str(small): 10_000, str(large): 10_000_000}
    monkeypatch.setattr(shutil, "disk_usage", lambda root: SimpleNamespace(free=free[str(root)]))
    received = ReceivedWeights()
    received.roots = [str(small), str(large)]

    assert received.make(1_000_000).parent == large
    with pytest.raises(EngineFailed, match="no room for 20000000 bytes"):
        received.make(20_000_000)


def test_a_root_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="No such file"):
        ReceivedWeights(str(tmp_path / "absent")).make(1)
