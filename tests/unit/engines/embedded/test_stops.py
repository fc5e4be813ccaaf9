from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rollplane.engines.embedded.stops import StopMatcher, load_tokenizer
from rollplane.errors import InvalidRequest


@pytest.fixture(scope="module")
def tokenizer(moe_dir: Path) -> Tokenizer:
    found = load_tokenizer(moe_dir)
    assert found is not None
    return found


def feed(matcher: StopMatcher, ids: list[int]) -> tuple[int, str] | None:
    """(index of the completing token, the string)."""
    for i, token in enumerate(ids):
        if stop := matcher.feed(token):
            return i, stop
    return None


def test_the_token_that_completes_the_string_is_found(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("def stop_here(self): return None").ids
    at, stop = feed(StopMatcher(tokenizer, ("here(",)), ids) or (-1, "")
    assert stop == "here("
    assert "here(" in tokenizer.decode(ids[: at + 1])
    assert "here(" not in tokenizer.decode(ids[:at])


def test_a_character_cut_over_tokens_is_found_when_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab 漢字 cd").ids
    assert len(ids) > 5  # bytes, not characters
    found = feed(StopMatcher(tokenizer, ("字",)), ids)
    assert found is not None
    assert "字" in tokenizer.decode(ids[: found[0] + 1])
    assert "字" not in tokenizer.decode(ids[: found[0]])


def test_of_two_strings_the_one_that_ends_first_wins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("import os").ids
    assert feed(StopMatcher(tokenizer, ("os", "port", "never")), ids)[1] == "port"  # type: ignore[index]


def test_text_before_min_tokens_completes_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x x x x").ids
    found = feed(StopMatcher(tokenizer, ("x",), min_tokens=3), ids)
    assert found is not None
    assert found[0] >= 3


def test_special_tokens_have_text_only_when_asked(tokenizer: Tokenizer) -> None:
    ids = [2]
    assert feed(StopMatcher(tokenizer, ("<|im_end|>",)), ids) is None
    assert feed(StopMatcher(tokenizer, ("<|im_end|>",), skip_special_tokens=False), ids) == (0, "<|im_end|>")


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(None) is None


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
