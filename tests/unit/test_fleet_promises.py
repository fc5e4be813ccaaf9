"""docs/fleet-promises.md names tests that are there."""

import re
from pathlib import Path

import pytest
from tests.unit.test_failure_catalogue import names_of_tests

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (?!promise|---)(.+?) \| (.+) \|$", (ROOT / "docs/fleet-promises.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_every_promise_has_tests_that_exist(row: tuple[str, str]) -> None:
    promise, tests = row
    assert promise.endswith(".")
    for name in tests.split("<br>"):
        path, _, test = name.strip("`").partition("::")
        assert (ROOT / path).is_file(), name
        assert test in names_of_tests(ROOT / path), name


def test_the_page_was_read() -> None:
    assert len(ROWS) > 25
