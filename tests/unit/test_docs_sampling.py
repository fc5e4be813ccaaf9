"""docs/engines.md says of every sampling parameter what tests/vllm tries on a real vLLM."""

import re
from pathlib import Path

from tests.vllm.sampling_fields import FIELDS

from rollplane.protocol.sampling import FIELD_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


def table() -> dict[str, tuple[str, str]]:
    """Parameter -> (verdict, reason)."""
    section = PAGE.partition("### Sampling parameters beside vLLM's own server")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| (.*?) ?\|$", section, flags=re.MULTILINE)
    return {name: (verdict, why) for names, verdict, why in rows for name in re.findall(r"`(\w+)`", names)}


def test_every_parameter_is_tried() -> None:
    assert set(FIELDS) == set(FIELD_NAMES)


def test_the_page_says_what_is_tried() -> None:
    assert {name: verdict for name, (verdict, _) in table().items()} == {
        name: verdict for name, (_, verdict) in FIELDS.items()
    }


def test_whatever_is_not_the_same_has_a_reason() -> None:
    assert [name for name, (verdict, why) in table().items() if verdict != "same" and not why] == []
