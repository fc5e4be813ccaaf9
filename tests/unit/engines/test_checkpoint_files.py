"""Which files of a directory are the checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollplane.engines.checkpoint_files import INDEX_NAME, check_places, weight_files
from rollplane.errors import InvalidRequest, NotFound

MAP = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for name in MAP.values():
        (tmp_path / name).touch()
    write_index(tmp_path, {"metadata": {"total_size": 8}, "weight_map": MAP})
    return tmp_path


def write_index(directory: Path, content: Any) -> None:
    (directory / INDEX_NAME).write_text(content if isinstance(content, str) else json.dumps(content))


def test_without_an_index_every_safetensors_file_is_the_checkpoints(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "notes.txt"):
        (tmp_path / name).touch()
    files, weight_map = weight_files(tmp_path)
    assert [file.name for file in files] == ["a.safetensors", "b.safetensors"]
    assert weight_map is None


def test_with_an_index_the_files_that_it_names_are(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").touch()
    files, weight_map = weight_files(sharded)
    assert [file.name for file in files] == sorted(MAP.values())
    assert weight_map == MAP


def test_a_shard_that_is_not_there_yet_is_not_found(sharded: Path) -> None:
    (sharded / MAP["b"]).unlink()
    with pytest.raises(NotFound, match=f"1 of 2 files that are not there, such as {MAP['b']}"):
        weight_files(sharded)


def test_an_index_beside_another_whole_checkpoint_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors").touch()
    with pytest.raises(InvalidRequest, match="two checkpoints"):
        weight_files(sharded)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        {"weight_map": {}},
        {"weight_map": {"a": 1}},
        {"weight_map": ["a"]},
        '{"weight_map": "\udcff"}',
    ],
)
def test_what_is_no_index_is_refused(content: Any, sharded: Path) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (sharded / INDEX_NAME).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidRequest, match=INDEX_NAME):
        weight_files(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "x.bin", ""])
def test_files_elsewhere_are_refused(name: str, sharded: Path) -> None:
    write_index(sharded, {"weight_map": {"a": name}})
    with pytest.raises(InvalidRequest, match="no safetensors file of its own directory"):
        weight_files(sharded)


def test_a_pipe_in_place_of_the_index_is_refused_and_not_waited_for(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    os.mkfifo(sharded / INDEX_NAME)
    with pytest.raises(InvalidRequest, match="not a regular file"):
        weight_files(sharded)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"a": MAP["a"]}, "b is in no file"),
        ({**MAP, "c": MAP["a"]}, "c is in .* the index says nothing of it"),
        ({"a": MAP["b"], "b": MAP["a"]}, "2 tensors are not where the index says"),
    ],
)
def test_tensors_that_are_not_where_the_index_says_are_refused(
    found: dict[str, str], says: str, tmp_path: Path
) -> None:
    check_places(MAP, MAP, directory=tmp_path)
    with pytest.raises(InvalidRequest, match=says):
        check_places(found, MAP, directory=tmp_path)
