"""docs/failures.md names tests that are there: no dead row, no row without a test, no name twice in a row."""

import ast
import re
from pathlib import Path

import pytest

from rollplane.testing import CHECKS

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs" / "failures.md").read_text().splitlines()
UNSHOWN = "## What no engine here can show"
PUBLIC = re.compile(r"#\d+|github\.io")


def rows(lines: list[str]) -> list[tuple[str, str, str]]:
    """(promise, report, last column) of every table row."""
    found = []
    for line in lines:
        if line.startswith("| ") and not line.startswith(("| promise", "| ---")):
            promise, report, last = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append((promise, report, last))
    return found


CUT = LINES.index(UNSHOWN)
SHOWN, NOT_SHOWN = rows(LINES[:CUT]), rows(LINES[CUT:])


def names_of_tests(path: Path) -> set[str]:
    """Names of the test functions of a module."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row[0][:60])
def test_every_promise_has_tests_that_exist(row: tuple[str, str, str]) -> None:
    promise, report, tests = row
    assert promise.endswith(".")
    assert PUBLIC.search(report), report
    named = [name.strip("`") for name in tests.split("<br>")]
    assert len(set(named)) == len(named) > 0
    for name in named:
        found = re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)(?:\[(\w+)\])?", name)
        assert found, name
        path = ROOT / found[1]
        assert path.is_file(), name
        assert found[2] in names_of_tests(path), name
        assert found[3] is None or found[3] in {check.__name__ for check in CHECKS}, name


def test_what_is_not_shown_has_a_reason() -> None:
    assert NOT_SHOWN
    for promise, report, why in NOT_SHOWN:
        assert promise.endswith(".")
        assert PUBLIC.search(report), report
        assert why.endswith(".")
        assert "::" not in why


def test_every_promise_test_is_in_the_catalogue() -> None:
    """What stands in `test_promises_*` is there for a row of the page."""
    named = "\n".join(LINES)
    for path in sorted((ROOT / "tests" / "e2e").glob("test_promises_*.py")):
        missing = [name for name in names_of_tests(path) if f"{path.relative_to(ROOT)}::{name}`" not in named]
        assert not missing, path


def test_every_program_that_gives_figures_is_there() -> None:
    programs = set(re.findall(r"`(bench/\w+\.py)`", "\n".join(LINES)))
    assert programs
    assert [name for name in programs if not (ROOT / name).is_file()] == []
