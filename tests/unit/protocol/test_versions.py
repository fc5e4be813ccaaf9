"""Which policy version made which token of a choice."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplane.protocol.versions import VersionSpans, check_spans, version_of_token


@pytest.mark.parametrize(
    ("changes", "tokens", "spans"),
    [
        ([], 5, [("a", 0)]),
        ([("b", 3)], 5, [("a", 0), ("b", 3)]),
        ([("b", 3)], 3, [("a", 0)]),
        ([("b", 0)], 5, [("b", 0)]),
        ([("b", 0)], 0, [("b", 0)]),
        ([("b", 3), ("c", 3)], 5, [("a", 0), ("c", 3)]),
        ([("b", 3), ("a", 3)], 5, [("a", 0)]),
        ([("b", 3), ("c", 4)], 5, [("a", 0), ("b", 3), ("c", 4)]),
        ([("b", None)], 5, [("a", 0), ("b", None)]),
        ([("a", 3)], 5, [("a", 0)]),
        # A label that changed at an unknown place, and then a count: no token was made, so none under that label.
        ([("b", None), ("c", 0)], 5, [("c", 0)]),
        ([("b", None), ("a", 0)], 5, [("a", 0)]),
        ([("b", 3), ("c", None), ("d", 3)], 5, [("a", 0), ("d", 3)]),
        ([("b", None), ("c", 2)], 5, [("a", 0), ("b", None), ("c", 2)]),
        ([("b", 3), ("c", None)], 3, [("a", 0)]),
    ],
)
def test_spans_say_which_version_made_which_token(changes: list[Any], tokens: int, spans: list[Any]) -> None:
    found = VersionSpans("a")
    for version, made in changes:
        found.change(version, made=made)

    assert found.read(tokens) == spans
    check_spans(found.read(tokens), tokens=tokens)


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.booleans()), max_size=8),
    more=st.integers(0, 3),
)
def test_spans_name_no_wrong_version_whatever_changes_when(steps: list[tuple[int, str, bool]], more: int) -> None:
    found, present = VersionSpans("a"), "a"
    truth: list[str] = []
    for tokens, version, known in steps:
        truth += [present] * tokens
        found.change(version, made=len(truth) if known else None)
        present = version
    truth += [present] * more

    spans = found.read(len(truth))
    check_spans(spans, tokens=len(truth))
    for i, version in enumerate(truth):
        assert version_of_token(spans, i) in (version, None)
