"""Which vLLM may be used, and that it has what is used of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollplane.engines.vllm import versions
from rollplane.engines.vllm.step_stats import Progress
from rollplane.errors import InvalidRequest


@pytest.mark.parametrize(("version", "line"), [("0.31.0", "0.31"), ("0.31.0+cpu", "0.31"), ("0.29.1", "0.29")])
def test_releases_that_were_tried_pass(version: str, line: str) -> None:
    assert versions.check_version(version) == line


@pytest.mark.parametrize("version", ["0.30.0", "0.3.1", "1.0.0", "0.310.0"])
def test_others_are_refused_by_name_unless_allowed(version: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"vLLM {version} .*allow_untested_vllm"):
        versions.check_version(version)

    assert versions.check_version(version, allow_untested=True)


def engine(**changes: Any) -> Any:
    """Something that has every part of an engine."""
    made = SimpleNamespace()
    for path in versions._PARTS:
        at = made
        *way, last = path.split(".")
        for name in way:
            at = at.__dict__.setdefault(name, SimpleNamespace())
        setattr(at, last, None)
    made.__dict__.update(changes)
    return made


def test_an_engine_without_a_part_is_refused_by_its_name() -> None:
    versions.check_parts(engine(), "0.99.0")
    for path in versions._PARTS:
        made = engine()
        at = made
        *way, last = path.split(".")
        for name in way:
            at = getattr(at, name)
        delattr(at, last)
        with pytest.raises(InvalidRequest, match=rf"vLLM 0\.99\.0 lacks .*AsyncLLM\.{path}"):
            versions.check_parts(made, "0.99.0")


def test_an_engine_that_is_read_already_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="reads already"):
        versions.watch(engine(output_handler="a task"), "0.99.0", Progress(moved_at=0.0), lambda: None)
