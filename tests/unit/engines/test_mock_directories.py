import json
from pathlib import Path

import pytest

from rollplane.engines.mock.directories import read_weights
from rollplane.errors import InvalidRequest, NotFound


def safetensors(path: Path, header: dict[str, object], data: bytes = b"") -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def test_tensors_and_bytes_of_every_shard_count(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    safetensors(tmp_path / "a.safetensors", {"w": entry, "__metadata__": {}}, b"1234")
    safetensors(tmp_path / "b.safetensors", {"v": entry, "u": entry}, b"5678")
    (tmp_path / "config.json").write_text("{}")
    first = read_weights(str(tmp_path))

    (tmp_path / "config.json").write_text('{"changed": true}')
    same = read_weights(str(tmp_path))
    safetensors(tmp_path / "b.safetensors", {"v": entry, "u": entry}, b"5679")

    assert first.tensors == 3
    assert first.bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert first.digest == same.digest
    assert first.digest != read_weights(str(tmp_path)).digest


def test_a_directory_without_weights_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"has no \*\.safetensors or mock_weights\.json"):
        read_weights(str(tmp_path))
    with pytest.raises(NotFound, match="no directory"):
        read_weights(str(tmp_path / "missing"))


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 16, (2).to_bytes(8, "little") + b"[]"])
def test_what_is_not_safetensors_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)

    with pytest.raises(InvalidRequest, match="is not a safetensors file"):
        read_weights(str(tmp_path))


def test_mock_weights_are_an_object(tmp_path: Path) -> None:
    (tmp_path / "mock_weights.json").write_text("[1]")

    with pytest.raises(InvalidRequest, match="is not a JSON object"):
        read_weights(str(tmp_path))
