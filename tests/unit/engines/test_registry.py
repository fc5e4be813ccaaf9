import subprocess
import sys

import pytest

from rollplane.engines.registry import ENGINES, engine_class
from rollplane.errors import InvalidRequest


def test_a_name_gives_its_class() -> None:
    assert engine_class("mock").__name__ == "MockEngine"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=f"known: {', '.join(sorted(ENGINES))}$"):
        engine_class("moc")


def test_every_name_points_at_a_class_path() -> None:
    assert [t for t in ENGINES.values() if t.count(":") != 1 or not t.startswith("rollplane.engines.")] == []


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "absent", "library_that_is_not_there.engine:Engine")

    with pytest.raises(InvalidRequest, match="needs the module 'library_that_is_not_there', which is not installed"):
        engine_class("absent")


def test_choosing_one_engine_loads_no_other() -> None:
    probe = "import sys; from rollplane.engines.registry import engine_class; engine_class('mock'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=50, check=True)

    assert {"torch", "grpc", "vllm", "aiohttp"}.isdisjoint(done.stdout.split())
