"""Directories that administration may name."""

from pathlib import Path

import pytest

from rollplane.errors import Forbidden, InvalidRequest, NotFound
from rollplane.server import paths
from rollplane.server.paths import check_directory


def test_the_canonical_path_is_given_back(tmp_path: Path) -> None:
    real = tmp_path / "root" / "step_1"
    real.mkdir(parents=True)
    (tmp_path / "alias").symlink_to(tmp_path / "root")

    for asked in (f"{tmp_path}/root/../root/step_1/", f"{tmp_path}/alias/step_1", f"file://{real}"):
        assert check_directory(asked, roots=[str(tmp_path / "alias")], param="p") == str(real)


def test_a_root_is_not_a_prefix_of_its_neighbours_name(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root-2").mkdir()

    with pytest.raises(Forbidden):
        check_directory(str(tmp_path / "root-2"), roots=[str(tmp_path / "root")], param="p")


def test_what_is_missing_outside_the_roots_is_not_told_from_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "there").mkdir()

    for name in ("there", "missing"):
        with pytest.raises(Forbidden, match="outside"):
            check_directory(str(tmp_path / name), roots=[str(tmp_path / "root")], param="p")


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "f").touch()

    with pytest.raises(NotFound, match="is not a directory"):
        check_directory(str(tmp_path / "f"), roots=[str(tmp_path)], param="p")


def test_links_inside_the_roots_are_fine(tmp_path: Path) -> None:
    """The layout of a hub's local cache: files that link to blobs beside them."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").touch()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/abc")

    check_directory(str(tmp_path / "snapshot"), roots=[str(tmp_path)], param="p")


def test_a_dangling_link_to_the_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root" / "w").mkdir(parents=True)
    (tmp_path / "root" / "w" / "x").symlink_to("/nonexistent/secret")

    with pytest.raises(Forbidden, match="leads outside"):
        check_directory(str(tmp_path / "root" / "w"), roots=[str(tmp_path / "root")], param="p")


def test_a_directory_is_not_walked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MAX_ENTRIES", 3)
    for i in range(4):
        (tmp_path / str(i)).touch()

    with pytest.raises(InvalidRequest, match="more than 3 entries"):
        check_directory(str(tmp_path), roots=[str(tmp_path)], param="p")


def test_without_roots_any_local_directory_will_do_and_a_hub_name_still_not(tmp_path: Path) -> None:
    assert check_directory(str(tmp_path), roots=None, param="p") == str(tmp_path)
    for name in ("org/repo", "//host/share", "s3://bucket/x"):
        with pytest.raises(Forbidden):
            check_directory(name, roots=None, param="p")
