"""Messages as templates read them, and text as it comes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models import tiny

from rollplane.errors import InvalidRequest
from rollplane.server.text import TextModel, Texts, chat_messages, named_texts, text_directory


@pytest.fixture(scope="module")
def texts() -> TextModel:
    return TextModel(tiny.shared_model("qwen3", layers=2))


def test_text_parts_become_one_string_and_media_keep_their_place() -> None:
    parts: list[Any] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = {"type": "image_url", "image_url": {"url": "data:x"}, "uuid": "u"}

    plain, none = chat_messages([{"role": "user", "content": parts}])
    mixed, media = chat_messages([{"role": "user", "content": [parts[0], image]}])

    assert (plain[0]["content"], none) == ("a\nb", [])
    assert mixed[0]["content"] == [parts[0], {"type": "image"}]
    assert [(each.type, each.url, each.uuid) for each in media] == [("image_url", "data:x", "u")]


def test_tokens_fed_one_by_one_give_the_text_without_half_characters(texts: TextModel) -> None:
    text = "na\u00efve \u2603 code"
    stream = texts.stream(skip_special=True)

    pieces = [stream.feed(np.asarray([i], dtype=np.int32)) for i in texts.encode(text, special=False).tolist()]

    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_a_template_of_the_callers_is_refused(texts: TextModel) -> None:
    with pytest.raises(InvalidRequest, match=r"chat_template_kwargs\.tokenize"):
        texts.render([{"role": "user", "content": "x"}], generation_prompt=True, options={"tokenize": True})


def test_the_last_message_may_be_left_open(texts: TextModel) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so"}]

    assert texts.render(messages, generation_prompt=False, continue_last=True).endswith("so")


def test_the_first_directory_with_a_tokenizer_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    assert text_directory(None, str(tmp_path / "no"), str(tmp_path)) == tmp_path
    assert text_directory(None, "some/name") is None


def test_a_directory_that_is_named_must_have_a_tokenizer(tmp_path: Path) -> None:
    assert named_texts(None) is None
    with pytest.raises(InvalidRequest, match=r"server\.tokenizer: .* has no tokenizer\.json"):
        named_texts(str(tmp_path))


async def test_what_was_named_is_read_at_the_start_and_anything_else_when_it_is_asked_for() -> None:
    directory = tiny.shared_model("qwen3", layers=2)
    named, there = named_texts(str(directory)), Texts(directory)
    assert named is not None

    await named.start()
    await there.start()

    assert repr(named) == f"<Texts {directory}, read>"
    assert repr(there) == f"<Texts {directory}, not read>"
    assert (await named.model()) is (await named.model())


async def test_a_directory_that_cannot_be_read_is_an_error_each_time(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    texts = Texts(tmp_path)

    for _ in range(2):
        with pytest.raises(InvalidRequest, match="could not be read"):
            await texts.model()
